"""The messages (SEND and RECV) of a lowered schedule: PyTorch's form of a schedule with explicit communication.

`0SEND_F3` follows the forward of microbatch 3 on stage 0. `1RECV_F3`, on the rank of stage 1, comes before the forward
on stage 1. `SEND_B` and `RECV_B` transfer gradients to the previous stage. Stages on the same rank send no messages to
each other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxscale.pipeline.action import GRADIENT, Action, Kind
from jaxscale.pipeline.check import Fault
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.ticks import ticks


class Message(NamedTuple):
    """One end of a message: its SEND or its RECV.

    Args:
        verb: SEND or RECV.
        kind: F for activations, B for gradients.
        stage: stage at this end of the message.
        microbatch: index of the microbatch.
    """

    verb: str
    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}_{self.kind}{self.microbatch}"


def _message_ends(schedule: Schedule, action: Action) -> list[tuple[int, Message, Action]]:
    """Return (rank, message, adjacent action) of the SEND and of the RECV of an action's result.

    The SEND belongs right after the action itself, and the RECV before the action that reads the result. The list is
    empty if no other rank reads the result.
    """
    kind, stage, microbatch = action
    if kind is Kind.F and stage + 1 < schedule.stages:
        kind_letter, reader = "F", Action(Kind.F, stage + 1, microbatch)
    elif kind in GRADIENT and stage > 0:
        kind_letter, reader = "B", schedule.gradient(stage - 1, microbatch)
    else:
        return []
    source_rank, target_rank = schedule.rank(action), schedule.rank(reader)
    if source_rank == target_rank:
        return []
    send, receive = (
        Message(verb, kind_letter, end_action.stage, microbatch)
        for verb, end_action in (("SEND", action), ("RECV", reader))
    )
    return [(source_rank, send, action), (target_rank, receive, reader)]


def check_messages(
    schedule: Schedule, located_messages: Iterable[tuple[int, int, Message]], column_of: Mapping[Action, int]
) -> None:
    """Check the messages of a schedule in a CSV file.

    Every result that another rank needs must have one SEND, after the action that computes the result, and one RECV,
    before the action that reads the result. There must be no other messages.

    Args:
        schedule: the actions of the ranks.
        located_messages: (rank, column, message) of every message in the file.
        column_of: the column of each action in the file.

    Raises:
        Fault: a message is missing, occurs twice or is misplaced; the error names the rank and the column.
    """
    name = schedule.name
    rank_and_action_of: dict[Message, tuple[int, Action]] = {}  # the rank of each message, and the action next to it
    for order in schedule.orders:
        for action in order:
            for rank, message, adjacent_action in _message_ends(schedule, action):
                rank_and_action_of[message] = rank, adjacent_action
    column_of_message: dict[Message, int] = {}
    for rank, column, message in located_messages:
        if message not in rank_and_action_of:
            raise Fault(name, f"{message} carries no result to another rank", rank, column)
        expected_rank, action = rank_and_action_of[message]
        if expected_rank != rank:
            raise Fault(name, f"{message} belongs on rank {expected_rank}", rank, column)
        if message in column_of_message:
            raise Fault(name, f"{message} occurs twice, first in cell {column_of_message[message]}", rank, column)
        column_of_message[message] = column
        is_send = message.verb == "SEND"
        if (column > column_of[action]) != is_send:
            wrong_side = "before" if is_send else "after"
            raise Fault(name, f"{message} comes {wrong_side} {action} (cell {column_of[action]})", rank, column)
    for message, (rank, action) in rank_and_action_of.items():
        if message not in column_of_message:
            reason = "which another rank waits for" if message.verb == "SEND" else "which this rank needs"
            raise Fault(name, f"lacks {message}, the message of {action}, {reason}", rank)


def lowered_cells(schedule: Schedule) -> list[list[str]]:
    """Return, for each rank, the cells of the lowered form: actions, messages, UNSHARD, REDUCE_GRAD and RESHARD.

    A SEND directly follows its action, and the RECV comes as early as the message can arrive.
    """
    cell_rows = [[f"{stage}UNSHARD" for stage in schedule.stages_of(rank)] for rank in range(schedule.ranks)]
    ending_kinds = (Kind.B, Kind.W)  # the kinds that end a backward
    # for each (rank, stage), the number of backwards that have not ended yet
    remaining_counts = Counter(
        (rank, action.stage)
        for rank, order in enumerate(schedule.orders)
        for action in order
        if action.kind in ending_kinds
    )
    for action in ticks(schedule):
        rank = schedule.rank(action)
        cell_rows[rank].append(str(action))
        for message_rank, message, _ in _message_ends(schedule, action):
            cell_rows[message_rank].append(str(message))
        if action.kind in ending_kinds:
            remaining_counts[rank, action.stage] -= 1
            if not remaining_counts[rank, action.stage]:
                cell_rows[rank] += [f"{action.stage}REDUCE_GRAD", f"{action.stage}RESHARD"]
    return cell_rows
