"""The searched schedule `search:PxM`, for equal stages with F = I = W and at most p activations per rank.

For such stages, no order with one stage per rank is faster: for every m, this schedule takes exactly the lower bound of
`choose/search.py`. (ZB-H1 reaches the bound only for m >= p.) For measured costs and other memory limits, call `search`
from that module, and save the resulting schedule as CSV. That module needs numpy. It is imported inside `searched`, so
that plans can name schedules before heavy imports.
"""

import dataclasses

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule

NAME = "search"


def searched(ranks: int, microbatches: int) -> Schedule:
    """Search for the fastest schedule of equal stages.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    from jaxscale.pipeline.choose.search import search

    unit_seconds = (1.0,) * ranks
    return dataclasses.replace(
        search(Costs(unit_seconds, unit_seconds, unit_seconds), ranks, microbatches, copies=1).schedule, name=NAME
    )


METHOD = Method(NAME, "searched for equal costs", searched)
