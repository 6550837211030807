"""Messages of a lowered schedule, PyTorch's form that tells what is sent and received: checked, and written.

`0SEND_F3` follows the forward of microbatch 3 on stage 0, `1RECV_F3` stands before that on stage 1, on the rank of
stage 1; `SEND_B`, `RECV_B` take gradients to the stage before. Between stages of one rank nothing is sent.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from jaxscale.pipeline.action import GRADIENT, Action, Kind
from jaxscale.pipeline.check import Fault
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.ticks import rows


@dataclasses.dataclass(frozen=True)
class Message:
    """A SEND or a RECV, with the stage that does it."""

    verb: Literal["SEND", "RECV"]
    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}_{self.kind}{self.microbatch}"


def _messages_of(schedule: Schedule, action: Action) -> tuple[tuple[int, Message], ...]:
    # the SEND and the RECV, with their ranks, that take an action's result to another rank
    if action.kind is Kind.F:
        kind, other = "F", action.stage + 1
    elif action.kind in GRADIENT:
        kind, other = "B", action.stage - 1
    else:
        return ()
    if not 0 <= other < schedule.stages:
        return ()
    source, target = schedule.rank(action), schedule.rank(Action(Kind.F, other, action.microbatch))
    if source == target:
        return ()
    sent = Message("SEND", kind, action.stage, action.microbatch)
    return (source, sent), (target, Message("RECV", kind, other, action.microbatch))


def check_messages(
    schedule: Schedule, messages: Iterable[tuple[int, int, Message]], columns: Mapping[Action, int]
) -> None:
    """Every result that another rank needs is sent and received once, after it is made and before it is needed.

    Args:
        schedule: what the ranks compute.
        messages: (rank, column, message).
        columns: the column of each action.

    Raises:
        Fault: with the rank and the column.
    """
    name = schedule.name
    wanted: dict[Message, tuple[int, Action]] = {}
    for order in schedule.orders:
        for action in order:
            pair = _messages_of(schedule, action)
            if pair:
                (source, sent), (target, received) = pair
                forward = action.kind is Kind.F
                user = Action(Kind.F, received.stage, action.microbatch)
                wanted[sent] = source, action
                wanted[received] = target, user if forward else schedule.gradient(received.stage, action.microbatch)
    seen: dict[Message, int] = {}
    for rank, column, message in messages:
        if message not in wanted:
            raise Fault(name, f"{message} takes nothing to another rank", rank, column)
        there, action = wanted[message]
        if there != rank:
            raise Fault(name, f"{message} belongs on rank {there}", rank, column)
        if message in seen:
            raise Fault(name, f"{message} is there twice, first in cell {seen[message]}", rank, column)
        seen[message] = column
        after = message.verb == "SEND"
        if (column > columns[action]) != after:
            word = "before" if after else "after"
            raise Fault(name, f"{message} stands {word} {action} (cell {columns[action]})", rank, column)
    for message, (rank, action) in wanted.items():
        if message not in seen:
            reason = "which another rank waits for" if message.verb == "SEND" else "which it needs"
            raise Fault(name, f"lacks {message}, the message of {action}, {reason}", rank)


def lowered(schedule: Schedule) -> list[list[str]]:
    """The cells of each rank with the messages, and with UNSHARD, REDUCE_GRAD and RESHARD around a stage's work.

    A message is sent as soon as it is there, and its RECV stands as early as the receiver may ask for it.
    """
    cells: list[list[str]] = [
        [f"{stage}UNSHARD" for stage in schedule.stages_of(rank)] for rank in range(schedule.ranks)
    ]
    left = {
        (rank, stage): sum(a.stage == stage and a.kind in (Kind.B, Kind.W) for a in order)
        for rank, order in enumerate(schedule.orders)
        for stage in schedule.stages_of(rank)
    }
    for rank, action in _in_time(schedule):
        cells[rank].append(str(action))
        for other, message in _messages_of(schedule, action):
            cells[other].append(str(message))
        if action.kind in (Kind.B, Kind.W):
            left[rank, action.stage] -= 1
            if not left[rank, action.stage]:
                cells[rank] += [f"{action.stage}REDUCE_GRAD", f"{action.stage}RESHARD"]
    return cells


def _in_time(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for row in rows(schedule):
        yield from ((rank, action) for rank, action in enumerate(row) if action is not None)
