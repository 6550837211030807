"""Tables: a schedule as arrays of integers for the executor, with a row for each tick and a column for each rank.

Every table and every executor must follow the steps of a tick that `lifetimes.py` describes; otherwise results are
silently wrong. A message goes to a neighbor on the ring of ranks, or stays on its rank if the stage that reads it is
there.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Kind
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.lifetimes import Stash, allocate_by_rank, lifetimes
from jaxscale.pipeline.ticks import ticks

IDLE = 0  # the code of an idle rank
CODES = {kind: code for code, kind in enumerate(KINDS, start=1)}
"""The integer that stands for each kind in a table."""

ORIGINS = ("from_left", "from_right", "to_self")
"""Origins of a message that a rank receives: the previous rank, the next rank, and the rank itself."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule in ticks and slots.

    Args:
        schedule: the schedule that the tables follow.
        stash: what a stage keeps from a forward to its backward. The lifetimes of slots depend on this.
        columns: int32 arrays (ticks, ranks) by name. `kind`, `stage`, `chunk` and `microbatch` describe the action.
            `x`, `g`, `residual` and `cut` are the slots of the action's input message, its incoming gradient, the stash
            of its forward, and the values that are kept from I to W. `from_left`, `from_right` and `to_self` are the
            slots into which messages from these origins go at the start of the tick; `message_slot_count` stands for no
            message.
        travel_flags: for each origin of messages from other ranks, bool (ticks,): whether any rank receives a message
            from this origin at the end of the tick. Origins without messages are left out.
        message_slot_count: number of slots for messages.
        stash_slot_count: number of slots for the stashes of forwards.
        cut_slot_count: number of slots for the values that are kept from I to W.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> one_f_one_b, gpipe = (tabulate(METHODS[name].schedule(4, 32)) for name in ("1f1b", "gpipe"))
        >>> one_f_one_b.tick_count, one_f_one_b.stash_slot_count, gpipe.stash_slot_count
        (70, 4, 32)
    """

    schedule: Schedule
    stash: Stash
    columns: Mapping[str, np.ndarray]
    travel_flags: Mapping[str, np.ndarray]
    message_slot_count: int
    stash_slot_count: int
    cut_slot_count: int

    @property
    def tick_count(self) -> int:
        """Number of ticks, which is the number of rows of each column."""
        return len(self.columns["kind"])

    @property
    def has_backward(self) -> bool:
        """Whether the schedule has backwards; false in evaluation."""
        return bool((self.columns["kind"] > CODES[Kind.F]).any())

    @property
    def is_lockstep(self) -> bool:
        """Whether all actions of each tick have the same kind."""
        return all(len(set(row) - {IDLE}) <= 1 for row in self.columns["kind"].tolist())

    @property
    def kind_codes(self) -> tuple[int, ...]:
        """The codes of the kinds that occur, in ascending order, including `IDLE` if a rank is idle in any tick."""
        return tuple(np.unique(self.columns["kind"]).tolist())

    def has_messages(self, origin: str) -> bool:
        """Return whether any message has this origin."""
        return bool((self.columns[origin] < self.message_slot_count).any())


def tabulate(schedule: Schedule, stash: Stash = "input", *, forward_only: bool = False) -> Tables:
    """Make the tables of a synchronous schedule.

    Args:
        schedule: a synchronous schedule.
        stash: "input": a stage keeps its input message until its backward is done. "residuals": a stage keeps its input
            message until its forward is done.
        forward_only: whether the tables have only forwards, for evaluation.

    Raises:
        UserError: the schedule is asynchronous, or two successive stages are on ranks that are not neighbors.
    """
    if schedule.versions is not None:
        raise UserError(
            f"schedule {schedule.name} updates weights inside the schedule, expected a synchronous schedule"
        )
    tick_of = ticks(schedule, forward_only=forward_only)
    lives = lifetimes(schedule, tick_of, stash)
    message_lives = [life for life in lives if life.column in ("x", "g")]
    # slot of each value by its name, and number of slots
    message_slot_of, message_slot_count = allocate_by_rank(schedule, message_lives)
    stash_lives = [life for life in lives if life.column == "residual"]
    stash_slot_of, stash_slot_count = allocate_by_rank(schedule, stash_lives)
    cut_slot_of, cut_slot_count = allocate_by_rank(schedule, [life for life in lives if life.column == "cut"])
    tick_count, rank_count = 1 + max(tick_of.values()), schedule.ranks
    column_names = ("kind", "stage", "chunk", "microbatch", "x", "g", "residual", "cut")
    columns = {name: np.zeros((tick_count, rank_count), np.int32) for name in column_names}
    columns |= {origin: np.full((tick_count, rank_count), message_slot_count, np.int32) for origin in ORIGINS}
    for action, tick in tick_of.items():
        stage, microbatch = action.stage, action.microbatch
        rank, chunk = schedule.place(schedule.route[microbatch], stage)
        entry_by_column = {
            "kind": CODES[action.kind],
            "stage": stage,
            "chunk": chunk,
            "microbatch": microbatch,
            "x": message_slot_of.get(("x", stage, microbatch), 0),
            "g": 0 if action.kind is Kind.F else message_slot_of.get(("g", stage, microbatch), 0),
            "residual": stash_slot_of["residual", stage, microbatch],
            "cut": cut_slot_of.get(("cut", stage, microbatch), 0),
        }
        for name, entry in entry_by_column.items():
            columns[name][tick, rank] = entry
    all_travel_flags = {origin: np.zeros(tick_count, bool) for origin in ORIGINS}
    for life in message_lives:
        route = schedule.routes[schedule.route[life.microbatch]]
        rank, sender_rank = route[life.stage], route[life.stage + (-1 if life.column == "x" else 1)]
        origin = _message_origin(schedule, sender_rank, rank, is_activation=life.column == "x")
        assert columns[origin][life.first_tick, rank] == message_slot_count, (schedule.name, origin, life, rank)
        columns[origin][life.first_tick, rank] = message_slot_of[life.name]
        all_travel_flags[origin][life.first_tick - 1] = origin != "to_self"
    travel_flags = {origin: flags for origin, flags in all_travel_flags.items() if flags.any()}
    return Tables(schedule, stash, columns, travel_flags, message_slot_count, stash_slot_count, cut_slot_count)


def _message_origin(schedule: Schedule, sender_rank: int, receiver_rank: int, *, is_activation: bool) -> str:
    """Return the origin of a message from `sender_rank`, as `receiver_rank` sees it.

    On a ring of two ranks, each rank is both the left and the right neighbor of the other rank. On such a ring,
    activations come from the left, and gradients come from the right.
    """
    if sender_rank == receiver_rank:
        return "to_self"
    is_after, is_before = (
        (sender_rank + 1) % schedule.ranks == receiver_rank,
        (sender_rank - 1) % schedule.ranks == receiver_rank,
    )
    if not (is_after or is_before):
        raise UserError(
            f"schedule {schedule.name} sends from rank {sender_rank} to rank {receiver_rank}: expected neighbors on a "
            f"ring of {schedule.ranks}. Place successive stages on neighboring ranks"
        )
    if is_after and is_before:
        return "from_left" if is_activation else "from_right"
    return "from_left" if is_after else "from_right"
