"""ZB-H2: no bubble within a rank's own span, for twice the memory of 1F1B (Qi et al., 2024, arXiv:2401.10241).

Each stage runs twice as many forwards before its first backward as in ZB-H1, and a rank holds at most 2p-1 activations.
With F = I = W and m >= 2p-1 no rank idles between its first and its last action. The makespan still includes the ramp
of ZB-H1, (p-1) F, unless steps overlap.
"""

from jaxscale.pipeline.builders import single_route
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules.zb_h1 import delayed_orders


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule with zero bubble for twice the memory of 1F1B.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches; with 2p-1 or more, no rank idles within its own span.
    """
    max_activations = (min(2 * ranks - 1, microbatches),) * ranks
    return single_route("zb-h2", delayed_orders(ranks, microbatches, reach=2), microbatches, max_activations)


METHOD = Method("zb-h2", "zero bubble for twice the memory of 1F1B", zb_h2)
