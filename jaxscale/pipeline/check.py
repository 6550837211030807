"""Checks that a schedule is valid: every pass once, on its rank, after its inputs, within the memory."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind

if TYPE_CHECKING:
    from jaxscale.pipeline.schedule import Schedule


Place = tuple[int, int]
"""(rank, cell): the place of an action in the order of its rank, both from 0."""


class Fault(UserError):
    """An error in a schedule, with its place.

    Args:
        schedule: its name.
        reason: the message; `{0}`, `{1}`, ... stand for the cells of `places`.
        rank: the rank of the error, or `None`.
        cell: its index in that rank's order; `None` if an action is missing.
        places: further places in the message.
    """

    def __init__(
        self,
        schedule: str,
        reason: str,
        rank: int | None = None,
        cell: int | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        location = "" if rank is None else f", rank {rank}" + ("" if cell is None else f", cell {cell}")
        text = reason.format(*(number for _, number in places)) if places else reason
        super().__init__(f"schedule {schedule}{location}: {text}")
        self.schedule, self.reason, self.rank, self.cell, self.places = schedule, reason, rank, cell, tuple(places)

    def renumbered(self, cells: Sequence[Sequence[int]]) -> "Fault":
        """The same fault with other cell numbers: `cells[rank][cell]`."""
        cell = None if self.rank is None or self.cell is None else cells[self.rank][self.cell]
        places = [(rank, cells[rank][cell]) for rank, cell in self.places]
        return Fault(self.schedule, self.reason, self.rank, cell, places)


def shape(schedule: "Schedule") -> None:
    """Check that the numbers fit: routes over existing ranks, a route for each microbatch, a stage for each rank.

    Raises:
        Fault: if they do not.
    """
    name, ranks = schedule.name, len(schedule.orders)
    if ranks < 1 or schedule.stages < 1 or schedule.microbatches < 1:
        counts = f"{ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        raise Fault(name, f"got {counts}, expected 1 or more of each")
    if len(schedule.route) != schedule.microbatches:
        raise Fault(name, f"got the route of {len(schedule.route)} microbatches, expected {schedule.microbatches}")
    for number, route in enumerate(schedule.routes):
        if len(route) != schedule.stages:
            raise Fault(name, f"route {number} names the ranks of {len(route)} stages, expected {schedule.stages}")
        for stage, rank in enumerate(route):
            if not 0 <= rank < ranks:
                raise Fault(name, f"stage {stage} is on rank {rank}, expected 0 to {ranks - 1}")
    for microbatch, number in enumerate(schedule.route):
        if not 0 <= number < len(schedule.routes):
            raise Fault(name, f"microbatch {microbatch} takes route {number}, of {len(schedule.routes)}")
    for rank in range(ranks):
        if not any(rank in route for route in schedule.routes):
            raise Fault(name, "holds no stage: fewer stages than devices", rank)
    if schedule.bound is not None and len(schedule.bound) != ranks:
        raise Fault(name, f"bounds the activations of {len(schedule.bound)} ranks, expected {ranks}")


def _cells(schedule: "Schedule") -> Iterator[tuple[int, int, Action]]:
    """(rank, cell, action) of every action of a schedule."""
    for rank, order in enumerate(schedule.orders):
        for cell, action in enumerate(order):
            yield rank, cell, action


def actions(schedule: "Schedule") -> None:
    """Check every forward once, every backward once as B or as I and W, each on the rank of its route.

    Raises:
        Fault: with the rank and the cell.
    """
    name, stages, microbatches = schedule.name, schedule.stages, schedule.microbatches
    cells: dict[Action, int] = {}
    for rank, cell, action in _cells(schedule):
        if not 0 <= action.microbatch < microbatches:
            raise Fault(name, f"{action} is of a microbatch that does not exist: there are {microbatches}", rank, cell)
        if not 0 <= action.stage < stages:
            raise Fault(name, f"{action} is of a stage that does not exist: there are {stages}", rank, cell)
        if schedule.rank(action) != rank:
            raise Fault(name, f"{action} belongs on rank {schedule.rank(action)}", rank, cell)
        if action in cells:
            first = [(rank, cells[action])]
            raise Fault(name, f"{action} occurs twice, first in cell {{0}}", rank, cell, first)
        if schedule.cycle is not None and action.kind not in schedule.cycle:
            raise Fault(name, f"{action} is of a kind that no tick has", rank, cell)
        cells[action] = cell
    for stage in range(stages):
        for microbatch in range(microbatches):
            forward, fused, inner, weight = (Action(kind, stage, microbatch) for kind in Kind if kind is not Kind.U)
            rank = schedule.rank(forward)
            if forward not in cells:
                raise Fault(name, f"lacks {forward}, the forward of microbatch {microbatch} on stage {stage}", rank)
            halves = [action for action in (inner, weight) if action in cells]
            if fused in cells and halves:
                raise Fault(name, f"{halves[0]} is already part of {fused}", rank, cells[halves[0]])
            if fused not in cells and not halves:
                raise Fault(name, f"lacks {fused} (or {inner} and {weight}), its backward", rank)
            if len(halves) == 1:
                missing = weight if inner in cells else inner
                raise Fault(name, f"{halves[0]} occurs without {missing}", rank, cells[halves[0]])


def updates(schedule: "Schedule") -> None:
    """Check that an asynchronous schedule updates each stage after each group of microbatches with their gradients, and
    that the weights of a forward exist by then if `Versions.lag` sets their age; other schedules have no updates.

    Raises:
        Fault: with the rank and the cell.
    """
    name, versions = schedule.name, schedule.versions
    if versions is None:
        for rank, cell, action in _cells(schedule):
            if action.kind is Kind.U:
                raise Fault(name, f"{action} updates the weights of a synchronous schedule", rank, cell)
        return
    group = versions.group
    if schedule.microbatches % group:
        raise Fault(name, f"{schedule.microbatches} microbatches are no multiple of the {group} of an update")
    backwards: dict[int, int] = dict.fromkeys(range(schedule.stages), 0)
    newest = dict(backwards)
    for rank, cell, action in _cells(schedule):
        kind, stage, microbatch = action
        version = newest[stage]
        if kind is Kind.U:
            expected = version * group + group - 1
            if microbatch != expected or backwards[stage] != expected + 1:
                reason = f"{action} stands where {backwards[stage]} microbatches are done, expected {stage}U{expected}"
                raise Fault(name, f"{reason} after the backward of microbatch {expected}", rank, cell)
            newest[stage] += 1
        elif kind is Kind.F and versions.lag is not None:
            oldest = max(0, microbatch // group - versions.lag)
            if version < oldest:
                raise Fault(name, f"{action} reads the weights after {oldest} updates; {version} are done", rank, cell)
        elif kind in (Kind.B, Kind.W):
            if microbatch // group != version:
                raise Fault(name, f"{action} is not of the microbatches of update {version}", rank, cell)
            backwards[stage] += 1
    for stage, count in newest.items():
        if count != schedule.microbatches // group:
            missing = Action(Kind.U, stage, (count + 1) * group - 1)
            raise Fault(name, f"lacks {missing}, the update of stage {stage}", schedule.routes[0][stage])


def progress(schedule: "Schedule") -> None:
    """Check that the orders can run: no action waits for ever.

    Raises:
        Fault: with the rank and the cell of an action that waits for itself, and the circle of waits.
    """
    orders = schedule.orders
    done: set[Action] = set()
    position = [0] * len(orders)
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            missing = next((source for source in schedule.inputs(action) if source not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            position[rank] += 1
            ready += waiting.pop(action, [])
    stuck_ranks = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
    if not stuck_ranks:
        return
    blockers = {rank: action for action, ranks in waiting.items() for rank in ranks}
    chain, rank = [], stuck_ranks[0]
    while rank not in chain:
        chain.append(rank)
        rank = schedule.rank(blockers[rank])
    circle = chain[chain.index(rank) :]
    stuck_action = orders[rank][position[rank]]
    if len(circle) == 1:
        input_place = [(rank, orders[rank].index(blockers[rank]))]
        reason = f"{stuck_action} stands before {blockers[rank]} (cell {{0}}), which it needs"
        raise Fault(schedule.name, reason, rank, position[rank], input_place)
    links = [
        f"rank {rank} waits in cell {{{i}}} ({orders[rank][position[rank]]}) for {blockers[rank]}"
        for i, rank in enumerate(circle)
    ]
    reason = f"{stuck_action} waits for ever: " + "; ".join(links)
    raise Fault(schedule.name, reason, rank, position[rank], [(rank, position[rank]) for rank in circle])


def stash(schedule: "Schedule") -> None:
    """Check that no rank holds more activations than its bound.

    Raises:
        Fault: with the rank.
    """
    for rank, bound in enumerate(schedule.bound or ()):
        if schedule.live[rank] > bound:
            raise Fault(schedule.name, f"holds {schedule.live[rank]} activations, expected at most {bound}", rank)
