"""PipeMare: PipeDream without weight stashing (Yang et al., 2021, arXiv:1910.05124).

The order of PipeDream, but one version of the weights: a backward linearises at the newest, not at those its forward
read. What makes that converge, learning rates by delay and the discrepancy correction, is the executor's.
"""

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Schedule, Versions
from jaxscale.pipeline.schedules.one_f_one_b import alternating
from jaxscale.pipeline.weave import with_updates


def pipemare(ranks: int, microbatches: int, updates: int) -> Schedule:
    """A stream of updates, one for each microbatch.

    Args:
        ranks: p, one stage each.
        microbatches: per update: 1.
        updates: how many.
    """
    count = microbatches * updates
    return Schedule(
        name="pipemare",
        orders=with_updates(alternating(ranks, count), microbatches),
        stages=ranks,
        microbatches=count,
        routes=(straight(ranks),),
        route=(0,) * count,
        versions=Versions(group=microbatches, backward="newest"),
        bound=tuple(min(ranks - stage, count) for stage in range(ranks)),
    )


METHOD = Method("pipemare", "PipeDream with one version of the weights", pipemare, steps=True, streams=True)
