"""1F1B: a forward, a backward, in turn (PipeDream-flush, DAPPLE; Fan et al., 2021, arXiv:2007.01045).

Bubble (p-1)/(m+p-1) of the makespan, like GPipe, but stage s holds min(p-s, m) activations: flat as m grows. Where
forwards and backwards share a tick, every rank waits for the backward; `lockstep` pays with memory instead.
"""

from jaxscale.pipeline.action import Action
from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule


def alternating(ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The orders of 1F1B: p-1-s forwards, then a forward and a backward in turn, then the backwards that are left."""
    orders = []
    for stage in range(ranks):
        warmup = min(ranks - 1 - stage, microbatches)
        phases = ("F", warmup), ("F B", microbatches - warmup), ("B", warmup)
        orders.append(weave(Lane.of_stage(stage, microbatches), *phases))
    return tuple(orders)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """A forward and a backward in turn, after p-1-s forwards on stage s.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    bound = (min(ranks - stage, microbatches) for stage in range(ranks))
    return single_route("1f1b", alternating(ranks, microbatches), microbatches, bound)


METHOD = Method("1f1b", "a forward and a backward in turn", one_f_one_b)
