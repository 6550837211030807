"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

Bubble (p-1)/(m+p-1) of the makespan; every rank holds the activations of all m microbatches. Each tick is of one kind
without any further rule.
"""

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.pipeline.weave import Lane, weave


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Args:
        ranks: p, one stage each.
        microbatches: m, any.
    """
    return Schedule(
        name="gpipe",
        orders=tuple(
            weave({"": Lane.of_stage(rank, microbatches)}, ("F", microbatches), ("B", microbatches))
            for rank in range(ranks)
        ),
        stages=ranks,
        microbatches=microbatches,
        routes=(straight(ranks),),
        route=(0,) * microbatches,
        cycle=(Kind.F, Kind.B),
        bound=(microbatches,) * ranks,
    )


METHOD = Method("gpipe", "all forwards, then all backwards", gpipe)
