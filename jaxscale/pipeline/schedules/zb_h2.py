"""ZB-H2: no bubble within a rank's own span, for the memory of two 1F1B (Qi et al., 2024, arXiv:2401.10241).

Twice the forwards of ZB-H1 before the first backward: at most 2p-1 activations. With F = I = W and m >= 2p-1 no rank
idles between its first and last action; the makespan has the ramp of ZB-H1 still, (p-1) F, unless steps overlap.
"""

from jaxscale.pipeline.builders import single_route
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules.zb_h1 import delayed_orders


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule of zero bubble for twice the memory of 1F1B.

    Args:
        ranks: p, number of ranks, with one stage each.
        microbatches: m, any number of microbatches; there is no bubble from 2p-1 on.
    """
    bound = (min(2 * ranks - 1, microbatches),) * ranks
    return single_route("zb-h2", delayed_orders(ranks, microbatches, reach=2), microbatches, bound)


METHOD = Method("zb-h2", "zero bubble for twice the memory of 1F1B", zb_h2)
