"""An asynchronous schedule as a stream: a table without end, stored as its beginning and one period.

An asynchronous pipeline does not drain between updates, so its table must not end with a training step. Microbatches
enter at a steady pace; after a beginning in which the last stages wait, the rows repeat, with other microbatches. The
rows follow the rules of `tables.py`. They also have columns for versions of weights: the slot that a forward reads or a
backward linearises at, and the slot that an update writes. An update is part of its backward's tick.

Values take slots in turn (`versions.ring_slots`), so that the slots of the rows repeat too.
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
from jaxscale.pipeline.versions import lives, ring_slots, uses

COLUMNS = ("kind", "microbatch", "updates", "x", "g", "kept", "from_left", "from_right", "reads", "writes")
"""Columns of a row: the action's kind and microbatch, whether an update follows, and slots.

The slots are of the input message, incoming gradient and stash (`x`, `g`, `kept`), of the messages that arrive
(`from_left`, `from_right`), and of the weights that the action reads and its update writes (`reads`, `writes`)."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """The table of an asynchronous schedule.

    Args:
        name: name of the schedule.
        stash: what a stage keeps from a forward to its backward.
        rows: int32 (ticks, columns, ranks): `beginning` ticks, then one period; columns as in `COLUMNS`.
        beginning: ticks before the rows repeat.
        turns: number of microbatches in a period; in the next period the column `microbatch` is larger by this number.
        pace: number of ticks between the entries of two microbatches.
        group: number of microbatches per update.
        delays: for each stage, the number of updates between a forward and the update with its gradient.
        newest: whether a backward linearises at the newest weights, although its forward may have read older ones.
        messages: number of slots for messages; one more slot, after the last, stands for no message.
        kept: number of slots for the stashes of forwards.
        versions: number of slots for versions of the weights.
        tail: number of ticks from the entry of a microbatch to its last backward, both included.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> [stream(METHODS[name], 4, 8 if name == "2bw" else 1).versions for name in ("pipedream", "2bw", "pipemare")]
        [4, 2, 1]
        >>> stream(METHODS["pipedream"], 4).delays
        (3, 2, 1, 0)
    """

    name: str
    stash: Stash
    rows: np.ndarray
    beginning: int
    turns: int
    pace: int
    group: int
    delays: tuple[int, ...]
    newest: bool
    messages: int
    kept: int
    versions: int
    tail: int

    @property
    def ranks(self) -> int:
        """Number of devices on the pipe axis."""
        return self.rows.shape[2]

    @property
    def carried(self) -> int:
        """Number of microbatches that are still in the pipe when another one enters."""
        return (self.tail - 1) // self.pace


def stream(method: Method, ranks: int, microbatches: int = 1, stash: Stash = "input") -> Stream:
    """Make the stream of an asynchronous method.

    Args:
        method: an asynchronous one (`Method.steps`).
        ranks: p, number of ranks.
        microbatches: number of microbatches per update.
        stash: what a stage keeps from a forward to its backward.

    Raises:
        UserError: the method is synchronous, a stage s is not on rank s, or the rows do not become periodic.
    """
    if not method.steps:
        raise UserError(f"schedule {method.name} is synchronous, expected an asynchronous one")
    short_run = _TimedRun(method.schedule(ranks, microbatches, updates=4 + 4 * ranks // microbatches), stash)
    turns = math.lcm(short_run.slots["x"], short_run.slots["g"], short_run.slots["versions"] * microbatches)
    # number of microbatches that enter in the long run
    entry_count = 4 * ranks + 2 * microbatches + 2 * turns
    long_run = _TimedRun(method.schedule(ranks, microbatches, updates=-(-entry_count // microbatches)), stash)
    rows, period = long_run.rows(), turns * long_run.pace
    # ticks in which microbatches still enter
    later_rows = rows[period : long_run.pace * entry_count]
    shifted_rows = rows[: len(later_rows)].copy()
    shifted_rows[:, COLUMNS.index("microbatch")] += turns * (shifted_rows[:, COLUMNS.index("kind")] != 0)
    differences = np.flatnonzero((shifted_rows != later_rows).any((1, 2)))
    beginning = int(differences[-1]) + 1 if len(differences) else 0
    if long_run.slots != short_run.slots or beginning > len(later_rows) - period:
        raise UserError(f"schedule {method.name}: its rows do not repeat after {period} ticks, expected a steady state")
    return Stream(
        name=method.name,
        stash=stash,
        rows=rows[: beginning + period],
        beginning=beginning,
        turns=turns,
        pace=long_run.pace,
        group=microbatches,
        delays=long_run.delays(),
        newest=long_run.newest,
        messages=long_run.slots["x"] + long_run.slots["g"],
        kept=long_run.slots["x"],
        versions=long_run.slots["versions"],
        tail=long_run.tail(),
    )


class _TimedRun:
    """A schedule whose microbatches enter at a steady pace, with its ticks and slots.

    Args:
        schedule: an asynchronous schedule with stage s on rank s.
        stash: what a stage keeps from a forward to its backward.
    """

    def __init__(self, schedule: Schedule, stash: Stash) -> None:
        if schedule.routes != (tuple(range(schedule.ranks)),):
            raise UserError(f"schedule {schedule.name}: got routes {schedule.routes}, expected stage s on rank s")
        assert schedule.versions is not None
        self._schedule, self._uses = schedule, uses(schedule)
        self.newest = schedule.versions.backward == "newest"
        self.pace = max(sum(action.kind is not Kind.U for action in order) for order in schedule.orders)
        self.pace //= schedule.microbatches
        self._tick_of = ticks(schedule, pace=self.pace)
        # the intervals, and then the number of slots, of the values of each (column, stage)
        intervals: defaultdict[tuple[str, int], list[Interval]] = defaultdict(list)
        self._lives = lifetimes(schedule, self._tick_of, stash)
        for life in self._lives:
            intervals[life.column, life.stage].append(life.interval)
        slot_counts = {name: ring_slots(stage_intervals) for name, stage_intervals in intervals.items()}
        # the number of slots for messages to the stage with their stashes, for incoming gradients, and for versions
        self.slots = {
            "x": max(slots for (column, _), slots in slot_counts.items() if column in ("x", "residual")),
            "g": max((slots for (column, _), slots in slot_counts.items() if column == "g"), default=1),
            "versions": max(map(ring_slots, lives(schedule, self._tick_of).values())),
        }

    def rows(self) -> np.ndarray:
        """Return int32 (ticks, columns, ranks): the table of the whole run."""
        tick_count = 1 + max(self._tick_of.values())
        columns = {name: np.zeros((tick_count, self._schedule.ranks), np.int32) for name in COLUMNS}
        no_slot = self.slots["x"] + self.slots["g"]
        columns["from_left"][:] = columns["from_right"][:] = no_slot
        for action, use in self._uses.items():
            stage, microbatch = action.stage, action.microbatch
            cell: dict[str, int] = {
                "kind": CODES[action.kind],
                "microbatch": microbatch,
                "x": microbatch % self.slots["x"],
                "g": self.slots["x"] + microbatch % self.slots["g"],
                "kept": microbatch % self.slots["x"],
                "reads": use.reads % self.slots["versions"],
                "updates": use.makes is not None,
                "writes": (use.makes or 0) % self.slots["versions"],
            }
            for name, number in cell.items():
                columns[name][self._tick_of[action], stage] = number
        for life in self._lives:
            if life.column == "x":
                columns["from_left"][life.first, life.stage] = life.microbatch % self.slots["x"]
            elif life.column == "g":
                columns["from_right"][life.first, life.stage] = self.slots["x"] + life.microbatch % self.slots["g"]
        return np.stack([columns[name] for name in COLUMNS], 1)

    def delays(self) -> tuple[int, ...]:
        """Return the `delays` of the `Stream`, measured at each stage's last update."""
        delays = dict.fromkeys(range(self._schedule.stages), 0)
        for action, use in self._uses.items():
            if use.makes is not None:
                forward = Action(Kind.F, action.stage, action.microbatch)
                delays[action.stage] = use.makes - 1 - self._uses[forward].reads
        return tuple(delays.values())

    def tail(self) -> int:
        """Return the `tail` of the `Stream`: ticks from the entry of a microbatch to its last backward, inclusive."""
        # ticks from the entry of each microbatch to each of its backwards, only the first counted
        tick_counts = (tick - self.pace * a.microbatch for a, tick in self._tick_of.items() if a.kind is Kind.B)
        return 1 + max(tick_counts)
