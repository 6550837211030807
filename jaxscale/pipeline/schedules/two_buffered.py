"""PipeDream-2BW: 1F1B that never drains, an update per M microbatches (Narayanan et al., 2021, arXiv:2006.09503).

Two versions of the weights: every stage computes the microbatches of group g with the weights after g-1 updates, one
group late on all stages alike: W(t+1) = update(W(t), grad at W(t-1)). That takes M >= p, so that the update of group
g-2 is done everywhere in time.
"""

from jaxscale.errors import UserError
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Schedule, Versions
from jaxscale.pipeline.schedules.one_f_one_b import alternating
from jaxscale.pipeline.weave import with_updates


def two_buffered(ranks: int, microbatches: int, updates: int) -> Schedule:
    """A stream of updates, one for each M microbatches.

    Args:
        ranks: p, one stage each.
        microbatches: M, per update; p or more.
        updates: how many.

    Raises:
        UserError: fewer microbatches than devices.
    """
    if microbatches < ranks:
        what = f"got {microbatches} microbatches per update, expected at least the {ranks} devices"
        raise UserError(f"schedule 2bw: {what}: two versions of the weights are too few otherwise")
    count = microbatches * updates
    return Schedule(
        name="2bw",
        orders=with_updates(alternating(ranks, count), microbatches),
        stages=ranks,
        microbatches=count,
        routes=(straight(ranks),),
        route=(0,) * count,
        versions=Versions(group=microbatches, backward="forward", lag=1),
        bound=tuple(min(ranks - stage, count) for stage in range(ranks)),
    )


METHOD = Method("2bw", "1F1B without end, an update per M microbatches, two versions", two_buffered, steps=True)
