"""Chimera: two pipelines through the same devices, in opposite directions (Li and Hoefler, 2021, arXiv:2107.06925).

Every rank holds two stages, s and p-1-s: two copies of the model. Of every p microbatches the first half goes down the
ranks and the second half up, in slots that never meet. Bubble (p-2)/(2m+p-2) if a backward takes as long as a forward,
and (k+1)(p-2)/(k(4p-2)+p-2) for m = kp if it takes twice as long; p/2+1 to p activations. Left out: the paper's
variants for large m (forward doubling, backward halving).
"""

from collections.abc import Iterator

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.builders import by_slot
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.schedule import Schedule


def _cells(ranks: int, microbatches: int) -> Iterator[tuple[int, int, Action]]:
    """(rank, slot, action) of every action."""
    for i in range(microbatches):
        unit, place_in_unit = divmod(i, ranks)
        goes_up, place_in_half = divmod(place_in_unit, ranks // 2)
        start = 2 * ranks * unit + 2 * place_in_half
        for stage in range(ranks):
            rank = ranks - 1 - stage if goes_up else stage
            yield rank, start + stage, Action(Kind.F, stage, i)
            yield rank, start + 2 * ranks - 1 - stage, Action(Kind.B, stage, i)


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, in units of p microbatches.

    Args:
        ranks: p, number of ranks, even; each has two stages.
        microbatches: m, number of microbatches, a multiple of p.

    Raises:
        UserError: p is odd, or m is not a multiple of p.
    """
    if ranks % 2:
        raise UserError(f"schedule chimera: got {ranks} devices, expected an even number: two directions share them")
    if microbatches % ranks:
        rule = f"expected a multiple of the {ranks} devices"
        raise UserError(f"schedule chimera: got {microbatches} microbatches, {rule}, so that its units are whole")
    down = tuple(range(ranks))
    return Schedule(
        name="chimera",
        orders=by_slot(ranks, _cells(ranks, microbatches)),
        stages=ranks,
        microbatches=microbatches,
        routes=(down, down[::-1]),
        route=tuple(2 * (i % ranks) // ranks for i in range(microbatches)),
        bound=tuple(ranks // 2 + 1 + min(rank, ranks - 1 - rank) for rank in down),
    )


METHOD = Method("chimera", "two pipelines in opposite directions, two copies of the weights", chimera, chunks=2)
