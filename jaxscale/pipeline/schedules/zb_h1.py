"""ZB-H1: 1F1B with weight gradients in place of the bubble (Qi et al., 2024, arXiv:2401.10241).

On stage s, the weight gradients run s microbatches later than the input gradients. So every stage holds p activations,
as many as the first stage of 1F1B. For m >= p the bubble takes (p-1) max(F+I-W, I, F) seconds. If F = I = W, this is a
third of the bubble of 1F1B.
"""

from jaxscale.pipeline.action import Action
from jaxscale.pipeline.builders import Lane, single_route, weave
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def delayed_orders(ranks: int, microbatches: int, reach: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank in ZB-H1 or ZB-H2.

    Stage s first runs reach*(p-1-s) forwards, and its weight gradients run reach*s microbatches later than its input
    gradients.

    Args:
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.
        reach: a stage runs this many forwards before its first backward for each stage that follows it: 1 in ZB-H1, 2
            in ZB-H2.
    """
    orders = []
    for stage in range(ranks):
        warmup_count, delay = min(reach * (ranks - 1 - stage), microbatches), min(reach * stage, microbatches)
        pair_count = microbatches - warmup_count  # number of turns with a forward and an input gradient
        lone_count = max(0, delay - pair_count)  # number of input gradients after these and before the first W
        phases = (
            ("F", warmup_count),
            ("F I", min(delay, pair_count)),
            ("F I W", max(0, pair_count - delay)),
            ("I", lone_count),
            ("I W", warmup_count - lone_count),
            ("W", delay),
        )
        orders.append(weave(Lane.of_stage(stage, microbatches), *phases))
    return tuple(orders)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule of 1F1B with weight gradients in place of the bubble.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches.
    """
    max_activations = (min(ranks, microbatches),) * ranks
    return single_route("zb-h1", delayed_orders(ranks, microbatches, reach=1), microbatches, max_activations)


METHOD = Method("zb-h1", "1F1B with weight gradients in the bubble", zb_h1)
