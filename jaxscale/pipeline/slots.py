"""Slots: orders from a timetable, the form of Chimera and the lock-step schedules."""

from collections.abc import Iterable

from jaxscale.pipeline.action import Action


def by_slot(ranks: int, cells: Iterable[tuple[int, int, Action]]) -> tuple[tuple[Action, ...], ...]:
    """The order of each rank.

    Args:
        ranks: p.
        cells: (rank, slot, action) in any sequence, one action for each rank and slot.

    Example:
        >>> from jaxscale.pipeline.action import Kind
        >>> forward, backward = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
        >>> by_slot(1, [(0, 5, backward), (0, 2, forward)]) == ((forward, backward),)
        True
    """
    table: list[dict[int, Action]] = [{} for _ in range(ranks)]
    for rank, slot, action in cells:
        assert slot not in table[rank], f"{action} and {table[rank][slot]} share slot {slot} of rank {rank}"
        table[rank][slot] = action
    return tuple(tuple(row[slot] for slot in sorted(row)) for row in table)
