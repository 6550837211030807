"""Tables: a schedule as integers, one row a tick and one column a rank, for the executor.

Rules of a tick, the same for every table and every executor (an executor with other rules is silently wrong):
(1) messages of the tick before enter their slots, (2) operands are read, (3) the action runs, (4) its message leaves
for both neighbours, or stays if the next stage is on the same rank. So a message made in tick t is in its slot from
tick t+1, and a slot read for the last time in tick t may be overwritten in tick t+1.

Slots are allocated ahead (`registers.py`), so memory follows the schedule: 1F1B holds p-s messages, GPipe m.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import GRADIENT, Action, Kind
from jaxscale.pipeline.run.registers import allocate
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.ticks import ticks

Stash = Literal["input", "residuals"]
"""Kept from a forward to its backward: the stage's input, or the residuals that the backward reads."""

IDLE = 0
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}
"""The integer of each kind in a table; 0 is idle."""

MESSAGES = ("from_left", "from_right", "to_self")
"""Origins of a message: the rank before, the rank after, this rank's own last action."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule in ticks and slots.

    Args:
        schedule: their source.
        stash: kept from a forward to its backward; the lifetimes of slots depend on it.
        columns: int32 arrays (ticks, ranks). `kind`, `stage`, `chunk`, `microbatch` of the action; the slots it reads
            or writes: `x` the input message, `g` the incoming gradient, `residual` the stash of its forward, `cut` the
            values from I to W; the slots that messages enter at the start of the tick: `from_left`, `from_right`,
            `to_self` (`messages`, one past the last, stands for none).
        right: (ticks,) whether any message travels to the next rank at the end of the tick.
        left: the same, to the rank before.
        messages: slots for messages.
        residuals: slots for the stashes of forwards.
        cuts: slots for the values from I to W.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> one_f_one_b, gpipe = (tabulate(METHODS[name].schedule(4, 32)) for name in ("1f1b", "gpipe"))
        >>> one_f_one_b.ticks, one_f_one_b.residuals, gpipe.residuals
        (70, 4, 32)
    """

    schedule: Schedule
    stash: Stash
    columns: Mapping[str, np.ndarray]
    right: np.ndarray
    left: np.ndarray
    messages: int
    residuals: int
    cuts: int

    @property
    def ticks(self) -> int:
        """Rows of the table."""
        return len(self.right)

    @property
    def backward(self) -> bool:
        """Whether any gradient is computed; false in evaluation."""
        return bool((self.columns["kind"] > CODES[Kind.F]).any())

    @property
    def lockstep(self) -> bool:
        """Whether every tick is of one kind on all ranks that work."""
        return all(len(set(row) - {IDLE}) <= 1 for row in self.columns["kind"].tolist())

    @property
    def kinds(self) -> tuple[int, ...]:
        """The codes that occur, idle among them, in order."""
        return tuple(np.unique(self.columns["kind"]).tolist())

    def meets(self, way: str) -> bool:
        """Whether any message has this origin."""
        return bool((self.columns[way] < self.messages).any())


def tabulate(schedule: Schedule, stash: Stash = "input", *, forward_only: bool = False) -> Tables:
    """The tables of a synchronous schedule.

    Args:
        schedule: valid, as every `Schedule` is.
        stash: "input" keeps the input message of a stage until its backward is done; "residuals" until its forward is.
        forward_only: only the forwards, for evaluation.

    Raises:
        UserError: an asynchronous schedule; neighbouring stages on ranks that are no neighbours.
    """
    if schedule.versions is not None:
        raise UserError(
            f"schedule {schedule.name} updates weights inside the schedule; expected one that updates at the end"
        )
    tick_of = _forward_ticks(schedule) if forward_only else ticks(schedule)
    rows, ranks = 1 + max(tick_of.values()), schedule.ranks
    messages, residuals, cuts = (_Pool(ranks) for _ in range(3))
    arrivals: list[tuple[int, int, tuple[str, int, int], str]] = []
    for action, tick in tick_of.items():
        rank = schedule.rank(action)
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            last_tick = tick if forward_only else max(tick_of[backward] for backward in _backwards(schedule, action))
            residuals.live(rank, tick, last_tick, (stage, microbatch))
            source, name, last_read = stage - 1, "x", last_tick if stash == "input" else tick
        elif action.kind in GRADIENT:
            last_tick = max(tick_of[backward] for backward in _backwards(schedule, action))
            if action.kind is Kind.I:
                cuts.live(rank, tick, last_tick, (stage, microbatch))
            source, name, last_read = stage + 1, "g", last_tick if stash == "input" else tick
        else:
            continue
        if not 0 <= source < schedule.stages:
            continue
        sender = Action(Kind.F, source, microbatch) if name == "x" else schedule.gradient(source, microbatch)
        arrival = tick_of[sender] + 1
        way = _way(schedule, schedule.rank(sender), rank, right=name == "x")
        messages.live(rank, arrival, last_read, (name, stage, microbatch))
        arrivals.append((arrival, rank, (name, stage, microbatch), way))
    for pool in (messages, residuals, cuts):
        pool.allocate()
    names = ("kind", "stage", "chunk", "microbatch", "x", "g", "residual", "cut")
    columns = {name: np.zeros((rows, ranks), np.int32) for name in names}
    columns |= {way: np.full((rows, ranks), messages.slots, np.int32) for way in MESSAGES}
    right, left = np.zeros(rows, bool), np.zeros(rows, bool)
    for tick, rank, name, way in arrivals:
        assert columns[way][tick, rank] == messages.slots, (schedule.name, way, tick, rank)
        columns[way][tick, rank] = messages.slot(rank, name)
        right[tick - 1] |= way == "from_left"
        left[tick - 1] |= way == "from_right"
    for action, tick in tick_of.items():
        stage, microbatch = action.stage, action.microbatch
        rank, chunk = schedule.place(schedule.route[microbatch], stage)
        cell = {
            "kind": CODES[action.kind],
            "stage": stage,
            "chunk": chunk,
            "microbatch": microbatch,
            "x": messages.slot(rank, ("x", stage, microbatch)),
            "g": 0 if action.kind is Kind.F else messages.slot(rank, ("g", stage, microbatch)),
            "residual": residuals.slot(rank, (stage, microbatch)),
            "cut": cuts.slot(rank, (stage, microbatch)),
        }
        for name, value in cell.items():
            columns[name][tick, rank] = value
    return Tables(schedule, stash, columns, right, left, messages.slots, residuals.slots, cuts.slots)


class _Pool:
    """Lifetimes on each rank, then their slots."""

    def __init__(self, ranks: int) -> None:
        self._lives: list[list[tuple[int, int, Hashable]]] = [[] for _ in range(ranks)]
        self._slots_of: list[Mapping[Hashable, int]] = []
        self.slots = 0

    def live(self, rank: int, first: int, last: int, name: Hashable) -> None:
        """A value is written in tick `first` and read in tick `last` for the last time."""
        self._lives[rank].append((first, last + 1, name))

    def allocate(self) -> None:
        """Allocate the slots of all ranks; every rank has as many as the one that needs most."""
        for lives in self._lives:
            slots, count = allocate(lives)
            self._slots_of.append(slots)
            self.slots = max(self.slots, count)

    def slot(self, rank: int, name: Hashable) -> int:
        """The slot of a value, 0 for one that does not exist (the first stage has no input message)."""
        return self._slots_of[rank].get(name, 0)


def _backwards(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    gradient = schedule.gradient(action.stage, action.microbatch)
    if gradient.kind is Kind.B:
        return (gradient,)
    return gradient, Action(Kind.W, action.stage, action.microbatch)


def _way(schedule: Schedule, sender: int, rank: int, *, right: bool) -> str:
    """The origin of a message at its rank; two ranks are left and right of each other, so `right` decides."""
    if sender == rank:
        return "to_self"
    after, before = (sender + 1) % schedule.ranks == rank, (sender - 1) % schedule.ranks == rank
    if not (after or before):
        raise UserError(
            f"schedule {schedule.name} sends from rank {sender} to rank {rank}: expected neighbours on a ring of "
            f"{schedule.ranks}; place neighbouring stages on neighbouring ranks"
        )
    if after and before:
        return "from_left" if right else "from_right"
    return "from_left" if after else "from_right"


def _forward_ticks(schedule: Schedule) -> dict[Action, int]:
    """The tick of each forward in a table of forwards alone."""
    orders = [[action for action in order if action.kind is Kind.F] for order in schedule.orders]
    tick_of: dict[Action, int] = {}
    tick = 0
    while any(orders):
        ready = [order for order in orders if order and all(source in tick_of for source in schedule.inputs(order[0]))]
        tick_of |= {order.pop(0): tick for order in ready}
        tick += 1
    return tick_of
