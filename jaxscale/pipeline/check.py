"""Checks that a schedule is valid: every pass occurs once, on its rank and after its inputs, and memory suffices."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Action, Kind

if TYPE_CHECKING:
    from jaxscale.pipeline.orders import Schedule


Place = tuple[int, int]
"""(rank, cell) of an action: its rank, and its index in the order of that rank; both count from 0."""


class Fault(UserError):
    """An error in a schedule, with the rank and the cell of the wrong action.

    Args:
        schedule: name of the schedule.
        reason: text of the message; `{0}`, `{1}`, ... stand for the cells of `mentions`.
        rank: rank of the wrong action; `None` if the error concerns no particular rank.
        cell: index of the wrong action in the order of its rank; `None` if an action is missing.
        mentions: (rank, cell) of each other action that the message mentions.
    """

    def __init__(
        self,
        schedule: str,
        reason: str,
        rank: int | None = None,
        cell: int | None = None,
        mentions: Sequence[Place] = (),
    ) -> None:
        location_text = "" if rank is None else f", rank {rank}" + ("" if cell is None else f", cell {cell}")
        text = reason.format(*(mentioned_cell for _, mentioned_cell in mentions)) if mentions else reason
        super().__init__(f"schedule {schedule}{location_text}: {text}")
        self.schedule, self.reason, self.rank, self.cell, self.mentions = schedule, reason, rank, cell, tuple(mentions)

    def renumbered(self, new_indices: Sequence[Sequence[int]]) -> "Fault":
        """Return the same fault with its cells renumbered: cell c of rank r becomes `new_indices[r][c]`."""
        new_cell = None if self.rank is None or self.cell is None else new_indices[self.rank][self.cell]
        new_mentions = [(rank, new_indices[rank][cell]) for rank, cell in self.mentions]
        return Fault(self.schedule, self.reason, self.rank, new_cell, new_mentions)


def check_shape(schedule: "Schedule") -> None:
    """Check that every route has a rank for each stage, that every microbatch has a route, and every rank a stage.

    Raises:
        Fault: a count is wrong; the message gives the expected count.
    """
    name, rank_count = schedule.name, len(schedule.orders)
    if rank_count < 1 or schedule.stages < 1 or schedule.microbatches < 1:
        counts_text = f"{rank_count} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        raise Fault(name, f"got {counts_text}, expected 1 or more of each")
    if len(schedule.route) != schedule.microbatches:
        raise Fault(name, f"got routes for {len(schedule.route)} microbatches, expected {schedule.microbatches}")
    for route_index, route in enumerate(schedule.routes):
        if len(route) != schedule.stages:
            raise Fault(name, f"route {route_index} has the ranks of {len(route)} stages, expected {schedule.stages}")
        for stage, rank in enumerate(route):
            if not 0 <= rank < rank_count:
                raise Fault(name, f"stage {stage} is on rank {rank}, expected a rank from 0 to {rank_count - 1}")
    for microbatch, route_index in enumerate(schedule.route):
        if not 0 <= route_index < len(schedule.routes):
            last_index = len(schedule.routes) - 1
            raise Fault(name, f"microbatch {microbatch} is on route {route_index}, expected 0 to {last_index}")
    for rank in range(rank_count):
        if not any(rank in route for route in schedule.routes):
            raise Fault(name, "holds no stage, expected one or more: there are fewer stages than devices", rank)
    if schedule.bound is not None and len(schedule.bound) != rank_count:
        raise Fault(name, f"got a bound of activations for {len(schedule.bound)} ranks, expected {rank_count}")


def _located_actions(schedule: "Schedule") -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, cell, action) for every action of a schedule."""
    for rank, order in enumerate(schedule.orders):
        for cell, action in enumerate(order):
            yield rank, cell, action


def check_actions(schedule: "Schedule") -> None:
    """Check that every forward and every backward (B, or I and W) occurs once and is on its rank.

    The rank of an action follows from its stage and from the route of its microbatch.

    Raises:
        Fault: an action is missing, occurs twice or is misplaced; the error names the rank and the cell.
    """
    name, stage_count, microbatch_count = schedule.name, schedule.stages, schedule.microbatches
    cell_of_action: dict[Action, int] = {}
    for rank, cell, action in _located_actions(schedule):
        if not 0 <= action.microbatch < microbatch_count:
            raise Fault(name, f"{action} is of an unknown microbatch, expected 0 to {microbatch_count - 1}", rank, cell)
        if not 0 <= action.stage < stage_count:
            raise Fault(name, f"{action} is of an unknown stage, expected 0 to {stage_count - 1}", rank, cell)
        if schedule.rank(action) != rank:
            raise Fault(name, f"{action} belongs on rank {schedule.rank(action)}", rank, cell)
        if action in cell_of_action:
            first_place = (rank, cell_of_action[action])
            raise Fault(name, f"{action} occurs twice, first in cell {{0}}", rank, cell, [first_place])
        if schedule.cycle is not None and action.kind not in schedule.cycle:
            raise Fault(
                name, f"{action} is of a kind that is not in the cycle, expected {'/'.join(schedule.cycle)}", rank, cell
            )
        cell_of_action[action] = cell
    for stage in range(stage_count):
        for microbatch in range(microbatch_count):
            forward, fused_backward, input_half, weight_half = (Action(kind, stage, microbatch) for kind in KINDS)
            rank = schedule.rank(forward)
            if forward not in cell_of_action:
                raise Fault(name, f"lacks {forward}, the forward of microbatch {microbatch} on stage {stage}", rank)
            present_halves = [action for action in (input_half, weight_half) if action in cell_of_action]
            if fused_backward in cell_of_action and present_halves:
                raise Fault(
                    name,
                    f"{present_halves[0]} is already part of {fused_backward}",
                    rank,
                    cell_of_action[present_halves[0]],
                )
            if fused_backward not in cell_of_action and not present_halves:
                raise Fault(
                    name, f"lacks the backward of {forward}: {fused_backward}, or {input_half} and {weight_half}", rank
                )
            if len(present_halves) == 1:
                missing_half = weight_half if input_half in cell_of_action else input_half
                raise Fault(
                    name, f"{present_halves[0]} occurs without {missing_half}", rank, cell_of_action[present_halves[0]]
                )


def check_updates(schedule: "Schedule") -> None:
    """Check the updates of an asynchronous schedule; a synchronous schedule must have no updates.

    Each stage must be updated after the backwards of each group of microbatches, and before its next backward. If
    `Versions.lag` sets the version of the weights that a forward reads, this version must exist before the forward.

    Raises:
        Fault: an update is missing or misplaced, or a version is read too early; the error names the rank and the cell.
    """
    name, versions = schedule.name, schedule.versions
    if versions is None:
        for rank, cell, action in _located_actions(schedule):
            if action.kind is Kind.U:
                raise Fault(name, f"{action} updates the weights of a synchronous schedule", rank, cell)
        return
    group_size = versions.group
    if schedule.microbatches % group_size:
        raise Fault(
            name, f"got {schedule.microbatches} microbatches, expected a multiple of the {group_size} per update"
        )
    # by stage: the number of backwards so far, and the newest version of the weights
    backward_counts: dict[int, int] = dict.fromkeys(range(schedule.stages), 0)
    newest_versions = dict(backward_counts)
    for rank, cell, action in _located_actions(schedule):
        kind, stage, microbatch = action
        newest_version = newest_versions[stage]
        if kind is Kind.U:
            group_end = newest_version * group_size + group_size - 1
            if microbatch != group_end or backward_counts[stage] != group_end + 1:
                reason = f"{action} comes after {backward_counts[stage]} backwards, expected {stage}U{group_end}"
                raise Fault(name, f"{reason} after the backward of microbatch {group_end}", rank, cell)
            newest_versions[stage] += 1
        elif kind is Kind.F and versions.lag is not None:
            read_version = max(0, microbatch // group_size - versions.lag)
            if newest_version < read_version:
                reason = f"{action} reads weights after {read_version} updates, but {newest_version} updates are done"
                raise Fault(name, reason, rank, cell)
        elif kind in (Kind.B, Kind.W):
            if microbatch // group_size != newest_version:
                raise Fault(
                    name,
                    f"{action} belongs to update {microbatch // group_size}, expected {newest_version}",
                    rank,
                    cell,
                )
            backward_counts[stage] += 1
    for stage, update_count in newest_versions.items():
        if update_count != schedule.microbatches // group_size:
            missing_update = Action(Kind.U, stage, (update_count + 1) * group_size - 1)
            raise Fault(name, f"lacks {missing_update}, the update of stage {stage}", schedule.routes[0][stage])


def check_progress(schedule: "Schedule") -> None:
    """Check that no action waits forever.

    Raises:
        Fault: there is a deadlock: some ranks wait for one another in a circle. The message names, for each of them,
            the action that waits and the action that it waits for.
    """
    orders = schedule.orders
    done_actions: set[Action] = set()
    next_cells, ready_ranks = [0] * len(orders), list(range(len(orders)))
    waiting_ranks: dict[Action, list[int]] = {}  # by the action that they wait for
    while ready_ranks:
        rank = ready_ranks.pop()
        order = orders[rank]
        while next_cells[rank] < len(order):
            action = order[next_cells[rank]]
            missing_input = next(
                (input_action for input_action in schedule.inputs(action) if input_action not in done_actions), None
            )
            if missing_input is not None:
                waiting_ranks.setdefault(missing_input, []).append(rank)
                break
            done_actions.add(action)
            next_cells[rank] += 1
            ready_ranks += waiting_ranks.pop(action, [])
    stuck_ranks = [rank for rank, order in enumerate(orders) if next_cells[rank] < len(order)]
    if not stuck_ranks:
        return
    blocker_of_rank = {rank: action for action, blocked_ranks in waiting_ranks.items() for rank in blocked_ranks}
    visited_ranks, rank = [], stuck_ranks[0]
    while rank not in visited_ranks:
        visited_ranks.append(rank)
        rank = schedule.rank(blocker_of_rank[rank])
    circle_ranks = visited_ranks[visited_ranks.index(rank) :]
    stuck_action = orders[rank][next_cells[rank]]
    if len(circle_ranks) == 1:
        input_place = (rank, orders[rank].index(blocker_of_rank[rank]))
        reason = f"{stuck_action} comes before {blocker_of_rank[rank]} (cell {{0}}), which it needs"
        raise Fault(schedule.name, reason, rank, next_cells[rank], [input_place])
    wait_texts = [
        f"rank {rank} waits in cell {{{i}}} ({orders[rank][next_cells[rank]]}) for {blocker_of_rank[rank]}"
        for i, rank in enumerate(circle_ranks)
    ]
    reason = f"{stuck_action} waits forever: " + ", ".join(wait_texts)
    raise Fault(schedule.name, reason, rank, next_cells[rank], [(rank, next_cells[rank]) for rank in circle_ranks])


def check_stash(schedule: "Schedule") -> None:
    """Check that no rank holds more activations than `Schedule.bound` allows.

    Raises:
        Fault: a rank holds more activations than its bound; the error names the rank.
    """
    for rank, max_activations in enumerate(schedule.bound or ()):
        if schedule.live[rank] > max_activations:
            reason = f"holds {schedule.live[rank]} activations, expected at most {max_activations}"
            raise Fault(schedule.name, reason, rank)
