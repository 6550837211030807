"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965).

Bubble (p-1)/(m+p-1) of the makespan; every rank holds the activations of all m microbatches.
"""

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Action, Kind, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Args:
        ranks: p, one stage each.
        microbatches: m, any.
    """
    orders = tuple(
        tuple(Action(kind, rank, i) for kind in (Kind.F, Kind.B) for i in range(microbatches)) for rank in range(ranks)
    )
    return Schedule(
        name="gpipe",
        orders=orders,
        stages=ranks,
        microbatches=microbatches,
        routes=(straight(ranks),),
        route=(0,) * microbatches,
        bound=(microbatches,) * ranks,
    )


METHOD = Method("gpipe", "all forwards, then all backwards", gpipe)
