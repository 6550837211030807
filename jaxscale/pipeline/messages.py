"""Messages of a lowered schedule (PyTorch's form with SEND and RECV): checked, and written.

`0SEND_F3` follows the forward of microbatch 3 on stage 0; `1RECV_F3`, on the rank of stage 1, precedes the forward on
stage 1. `SEND_B` and `RECV_B` take gradients to the stage before. Stages of one rank send no messages to each other.
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
    """A SEND or a RECV, with its stage."""

    verb: Literal["SEND", "RECV"]
    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}_{self.kind}{self.microbatch}"


def _messages_of(schedule: Schedule, action: Action) -> tuple[tuple[int, Message], ...]:
    # (rank, SEND) and (rank, RECV) that take an action's result to another rank
    if action.kind is Kind.F:
        kind, neighbour = "F", action.stage + 1
    elif action.kind in GRADIENT:
        kind, neighbour = "B", action.stage - 1
    else:
        return ()
    if not 0 <= neighbour < schedule.stages:
        return ()
    source, target = schedule.rank(action), schedule.rank(Action(Kind.F, neighbour, action.microbatch))
    if source == target:
        return ()
    send = Message("SEND", kind, action.stage, action.microbatch)
    return (source, send), (target, Message("RECV", kind, neighbour, action.microbatch))


def check_messages(
    schedule: Schedule, messages: Iterable[tuple[int, int, Message]], columns: Mapping[Action, int]
) -> None:
    """Check that every result that another rank needs is sent and received once, between its action and its reader.

    Args:
        schedule: the actions of the ranks.
        messages: (rank, column, message).
        columns: the column of each action.

    Raises:
        Fault: with the rank and the column.
    """
    name = schedule.name
    expected: dict[Message, tuple[int, Action]] = {}
    for order in schedule.orders:
        for action in order:
            pair = _messages_of(schedule, action)
            if pair:
                (source, send), (target, receive) = pair
                forward = action.kind is Kind.F
                reader = Action(Kind.F, receive.stage, action.microbatch)
                expected[send] = source, action
                expected[receive] = target, reader if forward else schedule.gradient(receive.stage, action.microbatch)
    message_columns: dict[Message, int] = {}
    for rank, column, message in messages:
        if message not in expected:
            raise Fault(name, f"{message} carries no result to another rank", rank, column)
        home, action = expected[message]
        if home != rank:
            raise Fault(name, f"{message} belongs on rank {home}", rank, column)
        if message in message_columns:
            raise Fault(name, f"{message} occurs twice, first in cell {message_columns[message]}", rank, column)
        message_columns[message] = column
        is_send = message.verb == "SEND"
        if (column > columns[action]) != is_send:
            word = "before" if is_send else "after"
            raise Fault(name, f"{message} stands {word} {action} (cell {columns[action]})", rank, column)
    for message, (rank, action) in expected.items():
        if message not in message_columns:
            reason = "which another rank waits for" if message.verb == "SEND" else "which it needs"
            raise Fault(name, f"lacks {message}, the message of {action}, {reason}", rank)


def lowered(schedule: Schedule) -> list[list[str]]:
    """The cells of each rank with the messages, and with UNSHARD, REDUCE_GRAD and RESHARD around a stage's work.

    A SEND follows its action at once, and its RECV stands as early as the message can arrive.
    """
    cells: list[list[str]] = [
        [f"{stage}UNSHARD" for stage in schedule.stages_of(rank)] for rank in range(schedule.ranks)
    ]
    remaining = {
        (rank, stage): sum(a.stage == stage and a.kind in (Kind.B, Kind.W) for a in order)
        for rank, order in enumerate(schedule.orders)
        for stage in schedule.stages_of(rank)
    }
    for rank, action in _actions_by_tick(schedule):
        cells[rank].append(str(action))
        for message_rank, message in _messages_of(schedule, action):
            cells[message_rank].append(str(message))
        if action.kind in (Kind.B, Kind.W):
            remaining[rank, action.stage] -= 1
            if not remaining[rank, action.stage]:
                cells[rank] += [f"{action.stage}REDUCE_GRAD", f"{action.stage}RESHARD"]
    return cells


def _actions_by_tick(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for row in rows(schedule):
        yield from ((rank, action) for rank, action in enumerate(row) if action is not None)
