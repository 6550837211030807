"""Chimera: two pipelines through the same devices, in opposite directions (Li and Hoefler, 2021, arXiv:2107.06925).

Rank s holds the stages s and p-1-s, so there are two copies of the model. Of every p microbatches, the first half
goes down the ranks and the second half goes up, and no slot of a rank has two actions. The bubble is (p-2)/(2m+p-2) of
the makespan if a backward takes as long as a forward. It is (k+1)(p-2)/(k(4p-2)+p-2), for m = kp, if a backward takes
twice as long. A rank holds p/2+1 to p activations. Left out: the paper's variants for large m (forward doubling,
backward halving).
"""

from collections.abc import Iterator

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.builders import orders_by_slot
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule


def _timetable(rank_count: int, microbatch_count: int) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, slot, action) of every action."""
    for microbatch in range(microbatch_count):
        # a unit is p microbatches: the first half of them (half 0) goes down the ranks, and the second (half 1) goes up
        unit, index_in_unit = divmod(microbatch, rank_count)
        half, index_in_half = divmod(index_in_unit, rank_count // 2)
        first_slot = 2 * rank_count * unit + 2 * index_in_half
        for stage in range(rank_count):
            rank = rank_count - 1 - stage if half else stage
            yield rank, first_slot + stage, Action(Kind.F, stage, microbatch)
            yield rank, first_slot + 2 * rank_count - 1 - stage, Action(Kind.B, stage, microbatch)


def _refuse(ranks: int, microbatches: int, chunks: int) -> None:
    """Raise UserError if p is odd, or m is not a multiple of p."""
    if ranks % 2:
        raise UserError(f"schedule chimera: got {ranks} devices, expected an even number: two directions share them")
    if microbatches % ranks:
        expectation = f"expected a multiple of {ranks}, the number of devices: microbatches come in units of {ranks}"
        raise UserError(f"schedule chimera: got {microbatches} microbatches, {expectation}")


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Make the schedule with two pipelines in opposite directions.

    Args:
        ranks: p, number of ranks, which must be even; each rank has two stages.
        microbatches: m, number of microbatches, a multiple of p.

    Raises:
        UserError: p is odd, or m is not a multiple of p.
    """
    _refuse(ranks, microbatches, chunks=2)
    down_route = tuple(range(ranks))
    return Schedule(
        name="chimera",
        orders=orders_by_slot(ranks, _timetable(ranks, microbatches)),
        stages=ranks,
        microbatches=microbatches,
        routes=(down_route, down_route[::-1]),
        route=tuple(2 * (i % ranks) // ranks for i in range(microbatches)),
        bound=tuple(ranks // 2 + 1 + min(rank, ranks - 1 - rank) for rank in down_route),
    )


METHOD = Method(
    "chimera", "two pipelines in opposite directions, two copies of the weights", chimera, chunks=2, refuse=_refuse
)
