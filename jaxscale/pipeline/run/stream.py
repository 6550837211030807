"""An asynchronous schedule as a stream: a table without end, stored as its ramp and one period.

An asynchronous pipeline does not drain between updates, so its table does not end with a training step. Microbatches
enter at a steady pace. After a ramp, in which the last stages wait, the rows repeat with other microbatches. The rows
follow the rules of `tables.py`. They also have two columns for versions of weights: the slot of the version with which
an action computes, and the slot to which an update writes its new version. An update belongs to the tick of the
backward before it.

Values take the slots in turn (`versions.ring_slot_count`), so that the slots in the rows repeat too.
"""

import dataclasses
import math
from collections import defaultdict

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.method import Method
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.lifetimes import Interval, Stash, lifetimes
from jaxscale.pipeline.run.tables import CODES
from jaxscale.pipeline.ticks import ticks
from jaxscale.pipeline.versions import ring_slot_count, uses, version_lifetimes

COLUMNS = ("kind", "microbatch", "has_update", "x", "g", "stash", "from_left", "from_right", "read_slot", "write_slot")
"""Columns of a row: the kind and microbatch of the action, whether an update follows the action, and slots.

`x`, `g` and `stash` are the slots of the input message, the incoming gradient and the stash. `from_left` and
`from_right` are the slots of the messages that arrive from these neighbors. `read_slot` is the slot of the weights that
the action reads. `write_slot` is the slot of the weights that the update after the action makes."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """The table of an asynchronous schedule.

    Args:
        name: name of the schedule.
        stash: what a stage keeps from a forward to its backward.
        rows: int32 (ticks, columns, ranks): the ticks of the ramp, then one period; columns as in `COLUMNS`.
        ramp_ticks: number of ticks before the rows repeat.
        period_microbatches: number of microbatches in a period. From one period to the next, the entries of the column
            `microbatch` grow by this number.
        pace: number of ticks between the entries of two successive microbatches.
        group_size: number of microbatches per update.
        delays: for each stage, the number of updates between a forward and the update with its gradient.
        has_newest_backward: whether a backward differentiates its stage at the newest weights, although its forward may
            have read older weights.
        message_slot_count: number of slots for messages; one more slot, after the last, stands for no message.
        stash_slot_count: number of slots for the stashes of forwards.
        version_count: number of slots for versions of the weights.
        tail_ticks: number of ticks from the entry of a microbatch to its last backward, including both.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> streams = [stream(METHODS[name], 4, m) for name, m in [("pipedream", 1), ("2bw", 8), ("pipemare", 1)]]
        >>> [asynchronous.version_count for asynchronous in streams]
        [4, 2, 1]
        >>> stream(METHODS["pipedream"], 4).delays
        (3, 2, 1, 0)
    """

    name: str
    stash: Stash
    rows: np.ndarray
    ramp_ticks: int
    period_microbatches: int
    pace: int
    group_size: int
    delays: tuple[int, ...]
    has_newest_backward: bool
    message_slot_count: int
    stash_slot_count: int
    version_count: int
    tail_ticks: int

    @property
    def ranks(self) -> int:
        """Number of devices on the pipe axis."""
        return self.rows.shape[2]

    @property
    def carried_count(self) -> int:
        """Number of microbatches that are still in the pipe when a new microbatch enters."""
        return (self.tail_ticks - 1) // self.pace


def stream(method: Method, ranks: int, microbatches: int = 1, stash: Stash = "input") -> Stream:
    """Make the stream of an asynchronous method.

    Args:
        method: an asynchronous method (`Method.steps`).
        ranks: p, number of ranks.
        microbatches: number of microbatches per update.
        stash: what a stage keeps from a forward to its backward.

    Raises:
        UserError: the method is synchronous, stage s is not on rank s for some s, or the rows do not become periodic.
    """
    if not method.steps:
        raise UserError(f"schedule {method.name} is synchronous, expected an asynchronous schedule")
    short_run = _TimedRun(method.schedule(ranks, microbatches, updates=4 + 4 * ranks // microbatches), stash)
    slot_counts = short_run.slot_counts
    # after this number of microbatches, the slots repeat
    period_microbatches = math.lcm(slot_counts["x"], slot_counts["g"], slot_counts["versions"] * microbatches)
    # number of microbatches that enter in the long run
    entry_count = 4 * ranks + 2 * microbatches + 2 * period_microbatches
    long_run = _TimedRun(method.schedule(ranks, microbatches, updates=-(-entry_count // microbatches)), stash)
    rows, period_ticks = long_run.rows(), period_microbatches * long_run.pace
    # rows from the second period until the last microbatch enters; the rows one period earlier must equal them
    later_rows = rows[period_ticks : long_run.pace * entry_count]
    shifted_rows = rows[: len(later_rows)].copy()
    is_busy = shifted_rows[:, COLUMNS.index("kind")] != 0
    shifted_rows[:, COLUMNS.index("microbatch")] += period_microbatches * is_busy
    different_ticks = np.flatnonzero((shifted_rows != later_rows).any((1, 2)))
    ramp_ticks = int(different_ticks[-1]) + 1 if len(different_ticks) else 0
    if long_run.slot_counts != slot_counts or ramp_ticks > len(later_rows) - period_ticks:
        raise UserError(
            f"schedule {method.name}: its rows do not repeat after {period_ticks} ticks, expected a steady state"
        )
    return Stream(
        name=method.name,
        stash=stash,
        rows=rows[: ramp_ticks + period_ticks],
        ramp_ticks=ramp_ticks,
        period_microbatches=period_microbatches,
        pace=long_run.pace,
        group_size=microbatches,
        delays=long_run.delays(),
        has_newest_backward=long_run.has_newest_backward,
        message_slot_count=slot_counts["x"] + slot_counts["g"],
        stash_slot_count=slot_counts["x"],
        version_count=slot_counts["versions"],
        tail_ticks=long_run.tail_ticks(),
    )


class _TimedRun:
    """The ticks and slots of a schedule whose microbatches enter at a steady pace.

    Args:
        schedule: an asynchronous schedule with stage s on rank s.
        stash: what a stage keeps from a forward to its backward.

    Attributes:
        pace: number of ticks between the entries of two successive microbatches.
        has_newest_backward: as in `Stream`.
        slot_counts: number of slots for input messages and their stashes ("x"), for incoming gradients ("g") and for
            versions of the weights ("versions").
    """

    def __init__(self, schedule: Schedule, stash: Stash) -> None:
        if schedule.routes != (tuple(range(schedule.ranks)),):
            raise UserError(f"schedule {schedule.name}: got routes {schedule.routes}, expected stage s on rank s")
        assert schedule.versions is not None
        self._schedule, self._use_by_action = schedule, uses(schedule)
        self.has_newest_backward = schedule.versions.backward == "newest"
        pass_count = max(sum(action.kind is not Kind.U for action in order) for order in schedule.orders)
        self.pace = pass_count // schedule.microbatches
        self._tick_by_action = ticks(schedule, pace=self.pace)
        # by (column, stage): the intervals of the values in this column, and the number of slots for them
        intervals_by_key: defaultdict[tuple[str, int], list[Interval]] = defaultdict(list)
        self._value_lives = lifetimes(schedule, self._tick_by_action, stash)
        for life in self._value_lives:
            intervals_by_key[life.column, life.stage].append(life.interval)
        slot_count_by_key = {key: ring_slot_count(key_intervals) for key, key_intervals in intervals_by_key.items()}
        self.slot_counts = {
            "x": max(count for (column, _), count in slot_count_by_key.items() if column in ("x", "residual")),
            "g": max((count for (column, _), count in slot_count_by_key.items() if column == "g"), default=1),
            "versions": max(map(ring_slot_count, version_lifetimes(schedule, self._tick_by_action).values())),
        }

    def rows(self) -> np.ndarray:
        """Return the table of the whole run, int32 (ticks, columns, ranks)."""
        tick_count = 1 + max(self._tick_by_action.values())
        columns = {name: np.zeros((tick_count, self._schedule.ranks), np.int32) for name in COLUMNS}
        no_slot = self.slot_counts["x"] + self.slot_counts["g"]
        columns["from_left"][:] = columns["from_right"][:] = no_slot
        for action, use in self._use_by_action.items():
            stage, microbatch = action.stage, action.microbatch
            entry_by_column: dict[str, int] = {
                "kind": CODES[action.kind],
                "microbatch": microbatch,
                "x": microbatch % self.slot_counts["x"],
                "g": self.slot_counts["x"] + microbatch % self.slot_counts["g"],
                "stash": microbatch % self.slot_counts["x"],
                "read_slot": use.reads % self.slot_counts["versions"],
                "has_update": use.makes is not None,
                "write_slot": (use.makes or 0) % self.slot_counts["versions"],
            }
            for name, entry in entry_by_column.items():
                columns[name][self._tick_by_action[action], stage] = entry
        for life in self._value_lives:
            if life.column == "x":
                columns["from_left"][life.first_tick, life.stage] = life.microbatch % self.slot_counts["x"]
            elif life.column == "g":
                gradient_slot = self.slot_counts["x"] + life.microbatch % self.slot_counts["g"]
                columns["from_right"][life.first_tick, life.stage] = gradient_slot
        return np.stack([columns[name] for name in COLUMNS], 1)

    def delays(self) -> tuple[int, ...]:
        """Return, for each stage, the number of updates between a forward and the update with its gradient.

        The number is counted at the last update of the stage, when the pipeline is in its steady state.
        """
        delay_of_stage = dict.fromkeys(range(self._schedule.stages), 0)
        for action, use in self._use_by_action.items():
            if use.makes is not None:
                forward = Action(Kind.F, action.stage, action.microbatch)
                delay_of_stage[action.stage] = use.makes - 1 - self._use_by_action[forward].reads
        return tuple(delay_of_stage.values())

    def tail_ticks(self) -> int:
        """Return the number of ticks from the entry of a microbatch to its last backward, including both."""
        # for each backward, the number of ticks since its microbatch entered
        tick_differences = (
            tick - self.pace * a.microbatch for a, tick in self._tick_by_action.items() if a.kind is Kind.B
        )
        return 1 + max(tick_differences)
