"""The searched schedule, for stages that take equally long, F = I = W, and p activations: `search:PxM`.

For such stages no order with one stage per rank is faster: this one meets the bound of `search.py` for every m (ZB-H1
does for m >= p). The search is meant for measured costs and other memory limits: call `search.search` with them, and
keep its schedule as CSV. `search.py` needs numpy and is imported inside `searched`, so that plans can name
schedules before heavy imports.
"""

import dataclasses

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule

NAME = "search"


def searched(ranks: int, microbatches: int) -> Schedule:
    """Search for the schedule of the fastest order.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    from jaxscale.pipeline.choose.search import search

    ones = (1.0,) * ranks
    return dataclasses.replace(search(Costs(ones, ones, ones), ranks, microbatches, copies=1).schedule, name=NAME)


METHOD = Method(NAME, "searched for equal costs", searched)
