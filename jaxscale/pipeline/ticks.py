"""Ticks: when each action of a schedule runs if all ranks move together.

One program on many devices (SPMD) exchanges messages at the end of every tick, so a result arrives one tick later. An
action takes the first tick in which its rank is free and its inputs have arrived. In a lock-step schedule (`cycle`) a
tick is of one kind on all ranks: kinds come in turn, and a turn without any action takes no tick. An update inside a
schedule belongs to the tick of the backward before it.
"""

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.schedule import Schedule


def ticks(schedule: Schedule) -> dict[Action, int]:
    """The tick of each action, as early as its inputs and the order of its rank allow.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["gpipe"].schedule(2, 2)
        >>> tick_of = ticks(schedule)
        >>> [(str(action), tick_of[action]) for action in schedule.orders[1]]
        [('1F0', 1), ('1F1', 2), ('1B0', 3), ('1B1', 4)]
    """
    tick_of: dict[Action, int] = {}
    position = [0] * schedule.ranks
    remaining = sum(map(len, schedule.orders))
    tick = turn = 0
    while remaining:
        kind = schedule.cycle[turn % len(schedule.cycle)] if schedule.cycle else None
        turn += 1
        cells = []
        for rank, order in enumerate(schedule.orders):
            if position[rank] == len(order):
                continue
            action = order[position[rank]]
            if kind in (None, action.kind) and all(source in tick_of for source in schedule.inputs(action)):
                cells.append((rank, action))
        for rank, action in cells:
            order = schedule.orders[rank]
            while True:
                tick_of[action] = tick
                position[rank] += 1
                remaining -= 1
                if position[rank] == len(order) or order[position[rank]].kind is not Kind.U:
                    break
                action = order[position[rank]]
        tick += bool(cells)
    return tick_of


def rows(schedule: Schedule) -> list[list[Action | None]]:
    """The table: for each tick the action of each rank, `None` where it is idle; without updates."""
    tick_of = ticks(schedule)
    table: list[list[Action | None]] = [[None] * schedule.ranks for _ in range(1 + max(tick_of.values()))]
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind is not Kind.U:
                table[tick_of[action]][rank] = action
    return table
