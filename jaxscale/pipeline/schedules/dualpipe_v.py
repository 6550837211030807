"""DualPipe-V: half of DualPipe, with two stages per rank and forwards beside backwards (DeepSeek, 2025).

The order is that of github.com/deepseek-ai/DualPipe. Forwards of one stage of a rank alternate with backwards of its
other stage, so that the messages of one stage can travel while the other stage computes. Weight gradients are separate
actions only in the ramps, where they fill idle time. A rank holds at most 2p+1 activations; each belongs to a stage
with half of the rank's share of the model. The order is defined for m >= 2p. With fewer microbatches, the order is made
for 2p microbatches, and the actions of microbatches m and later are removed.
"""

from jaxscale.pipeline.builders import MotifPhase, vee
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule with forwards beside backwards, in which the stages go down the ranks and back up.

    Args:
        ranks: p, number of ranks; rank s has the stages s and 2p-1-s.
        microbatches: m, any number of microbatches.
    """

    def phases_of(rank: int, microbatch_count: int) -> tuple[MotifPhase, ...]:
        """Return the phases of a rank's order for `microbatch_count` microbatches, with the lanes of `vee`."""
        ranks_below = ranks - 1 - rank
        lane_names = ["1", "0"] * (rank + 1)
        return (
            ("F0", 2 * ranks_below),
            ("F0 F1", rank + 1),
            ("I1 W1 F1", ranks_below),
            ("F0 B1 F1 B0", microbatch_count - 2 * ranks + rank + 1),
            ("B1 F1 B0", ranks_below),
            (" ".join("B" + lane for lane in lane_names[: rank + 1]), 1),
            (" ".join("I" + lane for lane in lane_names[rank + 1 :]), 1),
            ("W I0", ranks_below),
            ("W", rank + 1),
        )

    return vee("dualpipe-v", ranks, microbatches, phases_of, min_microbatches=2 * ranks, max_activations=2 * ranks + 1)


METHOD = Method("dualpipe-v", "forwards beside backwards, stages down and up again", dualpipe_v, chunks=2)
