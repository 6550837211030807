"""ZB-V: zero bubble, two stages a rank, down the devices and back up (Qi et al., 2024, arXiv:2401.10241, section 6).

The published order, made for F = I = W: with m >= 2p-1 no rank idles within its own span, and the makespan has
(p-1) F/2 seconds of bubble (F of a rank's two stages together). At most 2p activations of half a rank each: as much as
the first stage of 1F1B. With fewer microbatches the order is the same without the missing microbatches.
"""

from jaxscale.pipeline.builders import SlotPhase, vee
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble over a V of stages.

    Args:
        ranks: p, number of ranks; rank s has the stages s and 2p-1-s.
        microbatches: m, any number of microbatches; there is no bubble from 2p-1 on.
    """

    def phases_of(rank: int, count: int) -> tuple[SlotPhase, ...]:
        ranks_below = ranks - 1 - rank
        return (
            ("F0", 2 * ranks_below + 1),
            ("F1 F0", rank),
            ("F1 I1 W1", ranks_below + 1),
            ("F0 I0 W0 F1 I1 W1", count - ranks - ranks_below),
            ("I0 W0 F1 I1 W1", ranks_below),
            ("I0 I1", rank),
            ("I0 W0", ranks_below + 1),
            ("W1", rank),
            ("W0", rank),
        )

    return vee("zb-v", ranks, microbatches, phases_of, least=2 * ranks - 1, most=2 * ranks)


METHOD = Method("zb-v", "zero bubble, stages down and up again", zb_v, chunks=2)
