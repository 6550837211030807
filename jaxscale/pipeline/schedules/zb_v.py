"""ZB-V: zero bubble, two stages per rank, down the ranks and back up (Qi et al., 2024, arXiv:2401.10241, section 6).

This is the published order, which is meant for F = I = W. With m >= 2p-1 no rank idles within its own span, and the
makespan has a bubble of (p-1) F/2 seconds, where F is the time of both stages of a rank. A rank holds at most 2p
activations. Each belongs to a stage with half of the rank's share of the model, so they take as much memory as those of
the first stage of 1F1B. With fewer microbatches, the order is made for 2p-1 microbatches, and the actions of
microbatches m and later are removed.
"""

from jaxscale.pipeline.builders import MotifPhase, vee
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule with zero bubble in which the stages go down the ranks and back up.

    Args:
        ranks: p, number of ranks; rank s has the stages s and 2p-1-s.
        microbatches: m, any number of microbatches; with 2p-1 or more, no rank idles within its own span.
    """

    def phases_of(rank: int, microbatch_count: int) -> tuple[MotifPhase, ...]:
        """Return the phases of one rank's schedule, as `vee` expects them: (motif, number of repetitions).

        In a motif, 0 and 1 number the rank's two stages.
        """
        ranks_below = ranks - 1 - rank
        return (
            ("F0", 2 * ranks_below + 1),
            ("F1 F0", rank),
            ("F1 I1 W1", ranks_below + 1),
            ("F0 I0 W0 F1 I1 W1", microbatch_count - ranks - ranks_below),
            ("I0 W0 F1 I1 W1", ranks_below),
            ("I0 I1", rank),
            ("I0 W0", ranks_below + 1),
            ("W1", rank),
            ("W0", rank),
        )

    return vee("zb-v", ranks, microbatches, phases_of, min_microbatches=2 * ranks - 1, max_activations=2 * ranks)


METHOD = Method("zb-v", "zero bubble, stages down and up again", zb_v, chunks=2)
