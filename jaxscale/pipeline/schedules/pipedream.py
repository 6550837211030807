"""PipeDream: 1F1B that never drains; a stage updates after every backward (Narayanan et al., 2019, arXiv:1806.03377).

No bubble after the ramp. A backward linearises at the weights its forward read (weight stashing), which on stage s have
missed p-1-s updates: p-s versions live there. Left out: vertical sync, which nobody used.
"""

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Schedule, Versions
from jaxscale.pipeline.schedules.one_f_one_b import alternating
from jaxscale.pipeline.weave import with_updates


def pipedream(ranks: int, microbatches: int, updates: int) -> Schedule:
    """A stream of updates, one for each microbatch.

    Args:
        ranks: p, one stage each.
        microbatches: per update: 1 here, more in 2BW.
        updates: how many.
    """
    count = microbatches * updates
    return Schedule(
        name="pipedream",
        orders=with_updates(alternating(ranks, count), microbatches),
        stages=ranks,
        microbatches=count,
        routes=(straight(ranks),),
        route=(0,) * count,
        versions=Versions(group=microbatches, backward="forward"),
        bound=tuple(min(ranks - stage, count) for stage in range(ranks)),
    )


METHOD = Method("pipedream", "1F1B without end, an update per microbatch", pipedream, steps=True, streams=True)
