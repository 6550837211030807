"""PipeDream: 1F1B that never drains, with an update after every backward (Narayanan et al., 2019, arXiv:1806.03377).

There is no bubble after the ramp. A backward differentiates its stage at the weights that its forward read (weight
stashing). On stage s, p-1-s updates happen between a forward and its backward, so p-s versions of the stage's weights
live at once. Left out: vertical sync.
"""

from jaxscale.pipeline.builders import single_route, with_updates
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule, Versions
from jaxscale.pipeline.schedules.one_f_one_b import alternating_orders


def pipedream(ranks: int, microbatches: int, updates: int) -> Schedule:
    """Make the asynchronous schedule of 1F1B with an update after each group of microbatches.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: number of microbatches per update: 1 in PipeDream, more in 2BW.
        updates: number of updates.
    """
    microbatch_count = microbatches * updates
    orders = with_updates(alternating_orders(ranks, microbatch_count), microbatches)
    max_activations = (min(ranks - stage, microbatch_count) for stage in range(ranks))
    versions = Versions(group=microbatches, backward="forward")
    return single_route("pipedream", orders, microbatch_count, max_activations, versions=versions)


METHOD = Method("pipedream", "1F1B without end, an update per microbatch", pipedream, steps=True, streams=True)
