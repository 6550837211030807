"""The tick in which each action of a schedule runs if all ranks go from tick to tick together.

One program on many devices (SPMD) exchanges messages at the end of every tick, so a result arrives one tick later. An
action runs in the first tick in which its rank is free and its inputs have arrived. In a lock-step schedule (`cycle`),
all actions of a tick have the same kind. The kinds of the cycle take turns, and a turn without any action takes no
tick. An update inside a schedule belongs to the tick of the backward before it.
"""

from collections import deque

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.orders import Schedule


def ticks(schedule: Schedule, *, forward_only: bool = False, pace: int = 0) -> dict[Action, int]:
    """Return the tick of each action: the earliest that its inputs and the order of its rank allow.

    Args:
        schedule: the actions of each rank, in order.
        forward_only: whether only the forwards run, for evaluation.
        pace: number of ticks between the entries of two successive microbatches, for a pipeline that never drains. 0:
            microbatches enter as early as possible.

    Returns:
        The tick of each action; ticks count from 0. The dict is sorted by tick, then by rank.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["gpipe"].schedule(2, 2)
        >>> tick_of = ticks(schedule)
        >>> [(str(action), tick_of[action]) for action in schedule.orders[1]]
        [('1F0', 1), ('1F1', 2), ('1B0', 3), ('1B1', 4)]
    """
    queues = [deque(a for a in order if a.kind is Kind.F or not forward_only) for order in schedule.orders]
    cycle = schedule.cycle or (None,)
    tick_of: dict[Action, int] = {}
    tick = turn = 0

    def can_start(action: Action) -> bool:
        """Return whether the microbatch of an action has entered and the action's inputs have arrived."""
        has_entered = action.kind is not Kind.F or action.stage > 0 or tick >= pace * action.microbatch
        return has_entered and all(input_action in tick_of for input_action in schedule.inputs(action))

    while any(queues):
        kind = cycle[turn % len(cycle)]
        turn += 1
        starting_queues = [queue for queue in queues if queue and kind in (None, queue[0].kind) and can_start(queue[0])]
        for queue in starting_queues:
            tick_of[queue.popleft()] = tick
            while queue and queue[0].kind is Kind.U:
                tick_of[queue.popleft()] = tick
        tick += bool(starting_queues) or pace > 0
    return tick_of


def rows(schedule: Schedule) -> list[list[Action | None]]:
    """Return, for each tick, the action of each rank, or `None` if the rank is idle. Updates are left out."""
    tick_of = ticks(schedule)
    table: list[list[Action | None]] = [[None] * schedule.ranks for _ in range(1 + max(tick_of.values()))]
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind is not Kind.U:
                table[tick_of[action]][rank] = action
    return table
