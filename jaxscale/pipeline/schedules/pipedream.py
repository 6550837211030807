"""PipeDream: 1F1B that never drains; a stage updates after every backward (Narayanan et al., 2019, arXiv:1806.03377).

No bubble after the ramp. A backward linearises at the weights its forward read (weight stashing), which on stage s have
missed p-1-s updates: p-s versions live there. Left out: vertical sync, which nobody used.
"""

from jaxscale.pipeline.builders import single_route, with_updates
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule, Versions
from jaxscale.pipeline.schedules.one_f_one_b import alternating


def pipedream(ranks: int, microbatches: int, updates: int) -> Schedule:
    """A stream of updates, one for each microbatch.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: number of microbatches per update: 1 in PipeDream, more in 2BW.
        updates: number of updates.
    """
    count = microbatches * updates
    orders = with_updates(alternating(ranks, count), microbatches)
    bound = (min(ranks - stage, count) for stage in range(ranks))
    versions = Versions(group=microbatches, backward="forward")
    return single_route("pipedream", orders, count, bound, versions=versions)


METHOD = Method("pipedream", "1F1B without end, an update per microbatch", pipedream, steps=True, streams=True)
