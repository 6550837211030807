"""Ticks: when each action of a schedule runs if all ranks move together.

One program on many devices (SPMD) exchanges messages at the end of every tick, so a result is there one tick later. An
action takes the first tick in which its rank is free and its inputs are there. Of a lock-step schedule (`cycle`) a tick
is of one kind on all ranks: kinds come in turn, and a turn that no rank takes is left out. An update inside a schedule
belongs to the tick of the backward before it.
"""

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.schedule import Schedule


def ticks(schedule: Schedule) -> dict[Action, int]:
    """The tick of each action, as early as its inputs and the order of its rank allow.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["gpipe"].schedule(2, 2)
        >>> at = ticks(schedule)
        >>> [(str(action), at[action]) for action in schedule.orders[1]]
        [('1F0', 1), ('1F1', 2), ('1B0', 3), ('1B1', 4)]
    """
    at: dict[Action, int] = {}
    position = [0] * schedule.ranks
    left = sum(map(len, schedule.orders))
    tick = turn = 0
    while left:
        kind = schedule.cycle[turn % len(schedule.cycle)] if schedule.cycle else None
        turn += 1
        placed = []
        for rank, order in enumerate(schedule.orders):
            if position[rank] == len(order):
                continue
            action = order[position[rank]]
            if kind in (None, action.kind) and all(one in at for one in schedule.inputs(action)):
                placed.append((rank, action))
        for rank, action in placed:
            order = schedule.orders[rank]
            while True:
                at[action] = tick
                position[rank] += 1
                left -= 1
                if position[rank] == len(order) or order[position[rank]].kind is not Kind.U:
                    break
                action = order[position[rank]]
        tick += bool(placed)
    return at


def rows(schedule: Schedule) -> list[list[Action | None]]:
    """The table: for each tick what each rank does, `None` where it is idle; updates are left out."""
    at = ticks(schedule)
    table: list[list[Action | None]] = [[None] * schedule.ranks for _ in range(1 + max(at.values()))]
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind is not Kind.U:
                table[at[action]][rank] = action
    return table
