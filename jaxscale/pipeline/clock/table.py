"""The table of a schedule on the `neighbour` machine: a row for each tick, followed by rows for the tick's updates.

This module does not import numpy, so that charts start fast. `clock.py` times the same table for many costs at once.
"""

import functools
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.orders import Action, Kind, Schedule
from jaxscale.pipeline.ticks import ticks


class TickTable:
    """For each row: the pass of each rank, and whether neighbors wait for each other's messages at its end.

    Args:
        schedule: the actions of each rank, in order.

    Raises:
        UserError: the schedule has a message between ranks that are not neighbors on the ring.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> table = TickTable(METHODS["gpipe"].schedule(2, 1))
        >>> [(kind.value, stage) for kind, stage in table.passes], table.rows, table.has_message
        ([('B', 0), ('B', 1), ('F', 0), ('F', 1)], [[2, 4], [4, 3], [4, 1], [0, 4]], [True, False, True, False])
    """

    passes: tuple[tuple[Kind, int], ...]
    """(kind, stage) of every pass that occurs."""
    rows: list[list[int]]
    """For each row and rank, the index of the rank's pass in `passes`; `len(passes)` if the rank is idle."""
    has_message: list[bool]
    """For each row, whether any message is sent at its end."""
    row_of: dict[Action, int]
    """The index of the row of each action."""
    crossings: tuple[tuple[int, int], ...]
    """(stage, link) of each message that a stage sends to the next over a link; link r joins ranks r and r + 1."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.passes = tuple(sorted({(action.kind, action.stage) for order in schedule.orders for action in order}))
        tick_of = ticks(schedule)
        # for each action, its moment: (tick, number of successive updates of the rank up to and including the action)
        moment_of: dict[Action, tuple[int, int]] = {}
        for order in schedule.orders:
            update_count = 0
            for action in order:
                update_count = update_count + 1 if action.kind is Kind.U else 0
                moment_of[action] = tick_of[action], update_count
        row_of_moment = {moment: row for row, moment in enumerate(sorted(set(moment_of.values())))}
        last_row_of_tick = {tick: row for (tick, _), row in row_of_moment.items()}
        self.row_of = {action: row_of_moment[moment] for action, moment in moment_of.items()}
        index_of_pass = {kind_and_stage: index for index, kind_and_stage in enumerate(self.passes)}
        self.rows = [[len(self.passes)] * schedule.ranks for _ in row_of_moment]
        self.has_message = [False] * len(row_of_moment)
        crossings = set()
        for rank, order in enumerate(schedule.orders):
            for action in order:
                self.rows[self.row_of[action]][rank] = index_of_pass[action.kind, action.stage]
                for input_action in schedule.inputs(action):
                    links = links_between(schedule.rank(input_action), rank, schedule.ranks)
                    if len(links) > 1:
                        raise UserError(
                            f"schedule {schedule.name}: {action} on rank {rank} needs {input_action} from rank "
                            f"{schedule.rank(input_action)}, which is not a neighbor on the ring of {schedule.ranks} "
                            "ranks. The executor sends to neighbors only: place successive stages on neighboring "
                            "ranks. The simulator's dataflow machine can send to any rank"
                        )
                    if links:
                        self.has_message[last_row_of_tick[tick_of[input_action]]] = True
                        if action.kind is Kind.F:
                            crossings.add((input_action.stage, *links))
        self.crossings = tuple(sorted(crossings))

    def starts(self, pass_seconds: Sequence[float], link_seconds: Sequence[float]) -> list[list[float]]:
        """Return, for each row, the time in seconds at which each rank begins the row.

        Args:
            pass_seconds: seconds of each pass of `self.passes`.
            link_seconds: seconds of a message between ranks r and r + 1, for each r.
        """
        padded_pass_seconds, rank_count = [*pass_seconds, 0.0], self.schedule.ranks  # an idle rank takes 0 seconds
        times, starts = [0.0] * rank_count, []
        for pass_indices, has_message in zip(self.rows, self.has_message, strict=True):
            starts.append(times)
            times = [
                time + padded_pass_seconds[pass_index] for time, pass_index in zip(times, pass_indices, strict=True)
            ]
            if has_message:
                left_arrivals = [times[rank - 1] + link_seconds[rank - 1] for rank in range(rank_count)]
                right_arrivals = [times[(rank + 1) % rank_count] + link_seconds[rank] for rank in range(rank_count)]
                times = list(map(max, times, left_arrivals, right_arrivals))
        return starts


@functools.cache
def links_between(source_rank: int, target_rank: int, rank_count: int) -> tuple[int, ...]:
    """Return the links that a message crosses, in order, in the shorter direction around the ring.

    If both directions are equally long, the message avoids the link between the last rank and rank 0.

    Example:
        >>> links_between(0, 2, 6), links_between(0, 4, 6), links_between(3, 3, 6)
        ((0, 1), (5, 4), ())
    """
    right_steps, left_steps = (target_rank - source_rank) % rank_count, (source_rank - target_rank) % rank_count
    if right_steps < left_steps or (right_steps == left_steps and source_rank < target_rank):
        return tuple((source_rank + step) % rank_count for step in range(right_steps))
    return tuple((source_rank - 1 - step) % rank_count for step in range(left_steps))
