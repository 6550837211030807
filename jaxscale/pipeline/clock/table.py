"""The table of a schedule on the neighbour machine: a row for each tick, followed by a row for its updates.

This module needs no numpy, so that charts are drawn at once; `clock.py` times the same table under many costs together.
"""

import functools
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.orders import Action, Kind, Schedule
from jaxscale.pipeline.ticks import ticks


class TickTable:
    """The passes of each row and rank, and the rows after which neighbours wait for each other's messages.

    Args:
        schedule: the actions of each rank, in order.

    Raises:
        UserError: the schedule has a message between ranks that are not neighbours on the ring.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> table = TickTable(METHODS["gpipe"].schedule(2, 1))
        >>> [(kind.value, stage) for kind, stage in table.passes], table.rows, table.sends
        ([('B', 0), ('B', 1), ('F', 0), ('F', 1)], [[2, 4], [4, 3], [4, 1], [0, 4]], [True, False, True, False])
    """

    passes: tuple[tuple[Kind, int], ...]
    """(kind, stage) of every pass that occurs."""
    rows: list[list[int]]
    """For each row and rank the index of its pass in `passes`; `len(passes)` if the rank is idle."""
    sends: list[bool]
    """For each row, whether any message travels at its end."""
    row_of: dict[Action, int]
    """The row of each action."""
    crossings: tuple[tuple[int, int], ...]
    """(stage, link) of each message to the next stage that crosses a link; link r joins ranks r and r + 1."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.passes = tuple(sorted({(action.kind, action.stage) for order in schedule.orders for action in order}))
        tick_of = ticks(schedule)
        # for each action, (tick, number of updates that its rank has done in that tick)
        place_of_action: dict[Action, tuple[int, int]] = {}
        for order in schedule.orders:
            update_count = 0
            for action in order:
                update_count = update_count + 1 if action.kind is Kind.U else 0
                place_of_action[action] = tick_of[action], update_count
        row_numbers = {place: row for row, place in enumerate(sorted(set(place_of_action.values())))}
        last_row_of_tick = {tick: row for (tick, _), row in row_numbers.items()}
        self.row_of = {action: row_numbers[place] for action, place in place_of_action.items()}
        pass_numbers = {key: number for number, key in enumerate(self.passes)}
        self.rows = [[len(self.passes)] * schedule.ranks for _ in row_numbers]
        self.sends = [False] * len(row_numbers)
        crossings = set()
        for rank, order in enumerate(schedule.orders):
            for action in order:
                self.rows[self.row_of[action]][rank] = pass_numbers[action.kind, action.stage]
                for source in schedule.inputs(action):
                    links = links_between(schedule.rank(source), rank, schedule.ranks)
                    if len(links) > 1:
                        raise UserError(
                            f"schedule {schedule.name}: {action} on rank {rank} needs {source} of rank "
                            f"{schedule.rank(source)}, which is no neighbour on the ring of {schedule.ranks} ranks. "
                            "The executor sends to neighbours alone: place neighbouring stages on neighbouring ranks. "
                            "The simulator's dataflow machine sends to any rank"
                        )
                    if links:
                        self.sends[last_row_of_tick[tick_of[source]]] = True
                        if action.kind is Kind.F:
                            crossings.add((source.stage, *links))
        self.crossings = tuple(sorted(crossings))

    def starts(self, pass_seconds: Sequence[float], links: Sequence[float]) -> list[list[float]]:
        """Return, for each row, the second at which each rank begins it.

        Args:
            pass_seconds: seconds of each of `self.passes`.
            links: seconds of a message between ranks r and r + 1.
        """
        padded_seconds, ranks = [*pass_seconds, 0.0], self.schedule.ranks  # an idle rank takes 0 seconds
        times, starts = [0.0] * ranks, []
        for row, sends in zip(self.rows, self.sends, strict=True):
            starts.append(times)
            times = [time + padded_seconds[number] for time, number in zip(times, row, strict=True)]
            if sends:
                times = [
                    max(times[rank], times[rank - 1] + links[rank - 1], times[(rank + 1) % ranks] + links[rank])
                    for rank in range(ranks)
                ]
        return starts


@functools.cache
def links_between(source: int, target: int, ranks: int) -> tuple[int, ...]:
    """Return the links that a message crosses on the shorter way around the ring; equal ways avoid the closing link.

    Example:
        >>> links_between(0, 2, 6), links_between(0, 4, 6), links_between(3, 3, 6)
        ((0, 1), (5, 4), ())
    """
    right_steps, left_steps = (target - source) % ranks, (source - target) % ranks
    if right_steps < left_steps or (right_steps == left_steps and source < target):
        return tuple((source + step) % ranks for step in range(right_steps))
    return tuple((source - 1 - step) % ranks for step in range(left_steps))
