"""ZB-V: zero bubble, two stages a rank, down the devices and back up (Qi et al., 2024, arXiv:2401.10241, section 6).

The published order, made for F = I = W: with m >= 2p-1 no rank idles within its own span, and the makespan has
(p-1) F/2 seconds of bubble (F of a rank's two stages together). At most 2p activations of half a rank each: as much as
the first stage of 1F1B. With fewer microbatches the order is the same without the missing ones.
"""

from jaxscale.pipeline.action import Action
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.routes import vee
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.weave import Lane, weave


def _order(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    count = max(microbatches, 2 * ranks - 1)
    ranks_below = ranks - 1 - rank
    order = weave(
        {"0": Lane.of_stage(rank, count), "1": Lane.of_stage(2 * ranks - 1 - rank, count)},
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
    return tuple(action for action in order if action.microbatch < microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble over a V of stages.

    Args:
        ranks: p, two stages each: s and 2p-1-s.
        microbatches: m, any; no bubble from 2p-1 on.
    """
    return Schedule(
        name="zb-v",
        orders=tuple(_order(ranks, rank, microbatches) for rank in range(ranks)),
        stages=2 * ranks,
        microbatches=microbatches,
        routes=(vee(ranks),),
        route=(0,) * microbatches,
        bound=tuple(min(2 * ranks, 2 * microbatches, microbatches + 1 + rank) for rank in range(ranks)),
    )


METHOD = Method("zb-v", "zero bubble, stages down and up again", zb_v, chunks=2)
