"""DualPipe-V: half of DualPipe, two stages a rank, forwards beside backwards (DeepSeek, 2025).

From the order of github.com/deepseek-ai/DualPipe. A forward of one stage and a backward of the other stand side by
side, so that the messages of one can travel under the other; weight gradients are actions of their own only where they
fill a ramp. At most 2p+1 activations of half a rank each. The order is made for m >= 2p; with fewer microbatches it is
the same without the missing microbatches.
"""

from jaxscale.pipeline.builders import SlotPhase, vee
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Forwards beside backwards over a V of stages.

    Args:
        ranks: p, number of ranks; rank s has the stages s and 2p-1-s.
        microbatches: m, any number of microbatches; the order is made for 2p or more.
    """

    def phases_of(rank: int, count: int) -> tuple[SlotPhase, ...]:
        ranks_below = ranks - 1 - rank
        turns = ["1", "0"] * (rank + 1)
        return (
            ("F0", 2 * ranks_below),
            ("F0 F1", rank + 1),
            ("I1 W1 F1", ranks_below),
            ("F0 B1 F1 B0", count - 2 * ranks + rank + 1),
            ("B1 F1 B0", ranks_below),
            (" ".join("B" + lane for lane in turns[: rank + 1]), 1),
            (" ".join("I" + lane for lane in turns[rank + 1 :]), 1),
            ("W I0", ranks_below),
            ("W", rank + 1),
        )

    return vee("dualpipe-v", ranks, microbatches, phases_of, least=2 * ranks, most=2 * ranks + 1)


METHOD = Method("dualpipe-v", "forwards beside backwards, stages down and up again", dualpipe_v, chunks=2)
