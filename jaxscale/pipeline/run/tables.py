"""Tables: a schedule as arrays of integers, with a row for each tick and a column for each rank, for the executor.

The steps of a tick (`lifetimes.py`) must be the same for every table and every executor: with other steps, results are
silently wrong. An action's message goes to both neighbours, or stays if the next stage is on the same rank.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Kind
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.lifetimes import Stash, allocate_by_rank, lifetimes
from jaxscale.pipeline.ticks import ticks

IDLE = 0  # in place of the code of a kind
CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}
"""The integer that stands for each kind in a table; 0 stands for idle."""

MESSAGES = ("from_left", "from_right", "to_self")
"""Origins of a message: the rank before, the rank after, and this rank itself."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule in ticks and slots.

    Args:
        schedule: the schedule that the tables follow.
        stash: what a stage keeps from a forward to its backward; the lifetimes of slots depend on it.
        columns: int32 arrays (ticks, ranks) by name. `kind`, `stage`, `chunk` and `microbatch` describe the action.
            `x`, `g`, `residual` and `cut` are the slots of its input message, its incoming gradient, its forward's
            stash, and the values from I to W. `from_left`, `from_right` and `to_self` are the slots that messages
            from these origins enter at the start of the tick; the number `messages` stands for no message.
        travels: for each origin of messages from other ranks, bool (ticks,): whether any rank receives such a message
            at the end of the tick. Origins without messages are left out.
        messages: number of slots for messages.
        residuals: number of slots for the stashes of forwards.
        cuts: number of slots for the values from I to W.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> one_f_one_b, gpipe = (tabulate(METHODS[name].schedule(4, 32)) for name in ("1f1b", "gpipe"))
        >>> one_f_one_b.ticks, one_f_one_b.residuals, gpipe.residuals
        (70, 4, 32)
    """

    schedule: Schedule
    stash: Stash
    columns: Mapping[str, np.ndarray]
    travels: Mapping[str, np.ndarray]
    messages: int
    residuals: int
    cuts: int

    @property
    def ticks(self) -> int:
        """Number of ticks, one for each row of the table."""
        return len(self.columns["kind"])

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
        """The codes of kinds that occur, including that of idle, in ascending order."""
        return tuple(np.unique(self.columns["kind"]).tolist())

    def meets(self, way: str) -> bool:
        """Return whether any message has this origin."""
        return bool((self.columns[way] < self.messages).any())


def tabulate(schedule: Schedule, stash: Stash = "input", *, forward_only: bool = False) -> Tables:
    """Make the tables of a synchronous schedule.

    Args:
        schedule: a synchronous schedule.
        stash: "input" keeps the input message of a stage until its backward is done; "residuals" until its forward is.
        forward_only: whether to leave out all actions but forwards, for evaluation.

    Raises:
        UserError: the schedule is asynchronous, or neighbouring stages are on ranks that are not neighbours.
    """
    if schedule.versions is not None:
        raise UserError(
            f"schedule {schedule.name} updates weights inside the schedule, expected one that updates at the end"
        )
    tick_of = ticks(schedule, forward_only=forward_only)
    lives = lifetimes(schedule, tick_of, stash)
    message_lives = [life for life in lives if life.column in ("x", "g")]
    message_slots, message_count = allocate_by_rank(schedule, message_lives)
    residual_slots, residual_count = allocate_by_rank(schedule, [life for life in lives if life.column == "residual"])
    cut_slots, cut_count = allocate_by_rank(schedule, [life for life in lives if life.column == "cut"])
    row_count, ranks = 1 + max(tick_of.values()), schedule.ranks
    column_names = ("kind", "stage", "chunk", "microbatch", "x", "g", "residual", "cut")
    columns = {name: np.zeros((row_count, ranks), np.int32) for name in column_names}
    columns |= {way: np.full((row_count, ranks), message_count, np.int32) for way in MESSAGES}
    for action, tick in tick_of.items():
        stage, microbatch = action.stage, action.microbatch
        rank, chunk = schedule.place(schedule.route[microbatch], stage)
        cell = {
            "kind": CODES[action.kind],
            "stage": stage,
            "chunk": chunk,
            "microbatch": microbatch,
            "x": message_slots.get(("x", stage, microbatch), 0),
            "g": 0 if action.kind is Kind.F else message_slots.get(("g", stage, microbatch), 0),
            "residual": residual_slots["residual", stage, microbatch],
            "cut": cut_slots.get(("cut", stage, microbatch), 0),
        }
        for name, number in cell.items():
            columns[name][tick, rank] = number
    travels = {way: np.zeros(row_count, bool) for way in MESSAGES}
    for life in message_lives:
        route = schedule.routes[schedule.route[life.microbatch]]
        rank, sender = route[life.stage], route[life.stage + (-1 if life.column == "x" else 1)]
        way = _find_way(schedule, sender, rank, goes_right=life.column == "x")
        assert columns[way][life.first, rank] == message_count, (schedule.name, way, life.first, rank)
        columns[way][life.first, rank] = message_slots[life.name]
        travels[way][life.first - 1] = way != "to_self"
    travels = {way: flags for way, flags in travels.items() if flags.any()}
    return Tables(schedule, stash, columns, travels, message_count, residual_count, cut_count)


def _find_way(schedule: Schedule, sender: int, rank: int, *, goes_right: bool) -> str:
    """Return the origin of a message, seen from the rank that receives it.

    On a ring of two ranks, each is left and right of the other. In that case `goes_right` decides, which is true for
    messages to the next stage.
    """
    if sender == rank:
        return "to_self"
    is_after, is_before = (sender + 1) % schedule.ranks == rank, (sender - 1) % schedule.ranks == rank
    if not (is_after or is_before):
        raise UserError(
            f"schedule {schedule.name} sends from rank {sender} to rank {rank}: expected neighbours on a ring of "
            f"{schedule.ranks}. Place neighbouring stages on neighbouring ranks"
        )
    if is_after and is_before:
        return "from_left" if goes_right else "from_right"
    return "from_left" if is_after else "from_right"
