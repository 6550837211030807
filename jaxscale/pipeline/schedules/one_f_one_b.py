"""1F1B: a forward and a backward in turn (PipeDream-flush, DAPPLE; Fan et al., 2021, arXiv:2007.01045).

The bubble is (p-1)/(m+p-1) of the makespan, as in GPipe. But stage s holds only min(p-s, m) activations, a number that
stops growing at m = p. If forwards and backwards share a tick, ranks with forwards wait for the backwards; `lockstep`
avoids this wait, but needs more memory.
"""

from jaxscale.pipeline.action import Action
from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def alternating_orders(rank_count: int, microbatch_count: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank in 1F1B.

    Stage s runs p-1-s forwards, then a forward and a backward in turn, and then the remaining backwards.
    """
    orders = []
    for stage in range(rank_count):
        warmup_count = min(rank_count - 1 - stage, microbatch_count)
        phases = ("F", warmup_count), ("F B", microbatch_count - warmup_count), ("B", warmup_count)
        orders.append(weave(Lane.of_stage(stage, microbatch_count), *phases))
    return tuple(orders)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule that runs a forward and a backward in turn, after p-1-s forwards on stage s.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    max_activations = (min(ranks - stage, microbatches) for stage in range(ranks))
    return single_route("1f1b", alternating_orders(ranks, microbatches), microbatches, max_activations)


METHOD = Method("1f1b", "a forward and a backward in turn", one_f_one_b)
