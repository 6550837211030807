"""1F1B: a forward, a backward, in turn (PipeDream-flush, DAPPLE; Fan et al., 2021, arXiv:2007.01045).

Bubble (p-1)/(m+p-1) of the makespan, like GPipe, but stage s holds min(p-s, m) activations: flat as m grows. Where
forwards and backwards share a tick, every rank waits for the backward; `lockstep` pays with memory instead.
"""

from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import straight
from jaxscale.pipeline.schedule import Action, Kind, Schedule


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """p-1-s forwards to warm up, then a forward and a backward in turn, then the backwards that are left.

    Args:
        ranks: p, one stage each.
        microbatches: m, any.
    """
    orders = []
    for stage in range(ranks):
        warm = min(ranks - 1 - stage, microbatches)
        order = [Action(Kind.F, stage, i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [Action(Kind.F, stage, warm + i), Action(Kind.B, stage, i)]
        order += [Action(Kind.B, stage, i) for i in range(microbatches - warm, microbatches)]
        orders.append(tuple(order))
    return Schedule(
        name="1f1b",
        orders=tuple(orders),
        stages=ranks,
        microbatches=microbatches,
        routes=(straight(ranks),),
        route=(0,) * microbatches,
        bound=tuple(min(ranks - stage, microbatches) for stage in range(ranks)),
    )


METHOD = Method("1f1b", "a forward and a backward in turn", one_f_one_b)
