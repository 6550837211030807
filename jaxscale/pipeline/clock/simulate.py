"""Simulation of a schedule on one of two machines: its time, its idle time and its activations in memory.

`dataflow`: the ranks run separate programs that send messages to one another. A rank runs an action as soon as the rank
is free and the action's inputs have arrived. The formulas in the papers are for this machine.

`neighbour`: one program on all ranks (SPMD) that runs in ticks (`pipeline/ticks.py`), like `pipeline/run/execute.py`.
At the end of a tick with any message, every rank exchanges messages with both neighbors on the ring and waits for them.
A tick without messages has no exchange. If some ranks run forwards in a tick and others run backwards, ranks wait for
neighbors whose actions are longer.

Left out: the slowdown of computations while messages are sent, the gradient reduction and the update at the end of a
synchronous step, and differences between microbatches.

References:
    Qi, Wan, Huang and Lin 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241): the bubble of a rank's own span.
"""

import dataclasses
import functools
import operator
from typing import Literal

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.table import TickTable, links_between
from jaxscale.pipeline.orders import Action, Kind, Schedule
from jaxscale.pipeline.ticks import ticks
from jaxscale.values.drawn import drawn

MachineModel = Literal["neighbour", "dataflow"]
"""How ranks wait for one another; the module's docstring describes both machines."""
Span = tuple[float, float]
"""(start, end) in seconds."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The times of a schedule's actions.

    Args:
        schedule: the schedule.
        costs: costs of the passes and messages.
        machine: how ranks wait for one another, or "measured" if the times come from a real run (`measured.py`).
        spans: for each rank, (start, end) of each action in seconds, in the order of `schedule.orders`.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["1f1b"].schedule(4, 8)
        >>> dataflow, spmd = (simulate(schedule, Costs.alike(schedule), name) for name in ("dataflow", "neighbour"))
        >>> dataflow.seconds, f"{dataflow.bubble:.4f}", spmd.seconds, dataflow.live
        (33.0, '0.2727', 40.0, (4, 3, 2, 1))
    """

    schedule: Schedule
    costs: Costs
    machine: MachineModel | Literal["measured"]
    spans: tuple[tuple[Span, ...], ...]

    _repr_html_ = drawn

    @functools.cached_property
    def seconds(self) -> float:
        """The makespan: seconds from the start of the first action to the end of the last action of all ranks."""
        return max(rank_spans[-1][1] for rank_spans in self.spans)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the total seconds of its actions."""
        return tuple(sum(end - start for start, end in rank_spans) for rank_spans in self.spans)

    @functools.cached_property
    def period(self) -> float | None:
        """Seconds from one update to the next in the steady state; `None` for a synchronous schedule.

        The period is measured between forwards of the first stage, as a mean over the second half of the schedule.
        These forwards do not depend on later actions, so the period includes neither filling nor draining.
        """
        versions = self.schedule.versions
        if versions is None:
            return None
        group_size, update_count = versions.group, self.schedule.microbatches // versions.group
        # start of the first stage's forward of each microbatch
        start_of_microbatch = {
            action.microbatch: start
            for order, spans in zip(self.schedule.orders, self.spans, strict=True)
            for action, (start, _) in zip(order, spans, strict=True)
            if action.kind is Kind.F and action.stage == 0
        }
        measured_update_count = update_count // 2  # number of updates over which the mean is taken
        if not measured_update_count:
            return self.seconds / update_count
        last_group_microbatch = (update_count - 1) * group_size  # the first microbatch of the last update
        period = (
            start_of_microbatch[last_group_microbatch]
            - start_of_microbatch[last_group_microbatch - measured_update_count * group_size]
        ) / measured_update_count
        # a period shorter than a rank's busy time per update: too few updates to reach the steady state
        return period if period * update_count >= max(self.busy) * (1 - 1e-9) else self.seconds / update_count

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds per microbatch: the mean over the makespan or, in an asynchronous schedule, in the steady state."""
        if self.period is not None and self.schedule.versions is not None:
            return self.period / self.schedule.versions.group
        return self.seconds / self.schedule.microbatches

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle: 1 - sum(busy) / (ranks * seconds).

        For an asynchronous schedule, the bubble is the idle share in the steady state.
        """
        rank_count, busy_seconds = self.schedule.ranks, sum(self.busy)
        if self.period is not None and self.schedule.versions is not None:
            update_count = self.schedule.microbatches // self.schedule.versions.group
            return 1 - busy_seconds / update_count / (rank_count * self.period)
        return 1 - busy_seconds / (rank_count * self.seconds)

    @property
    def bubble_own_span(self) -> float:
        """Idle share of the time between each rank's first start and last end, as in the zero-bubble papers.

        Ranks begin and end at different times. If a rank begins the next step without waiting for other ranks, the
        neighboring steps fill the time before its first start and after its last end.
        """
        span_seconds = sum(rank_spans[-1][1] - rank_spans[0][0] for rank_spans in self.spans)
        return 1 - sum(self.busy) / span_seconds

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the idle seconds between its first start and its last end."""
        return tuple(
            spans[-1][1] - spans[0][0] - busy_seconds for spans, busy_seconds in zip(self.spans, self.busy, strict=True)
        )

    @property
    def live(self) -> tuple[int, ...]:
        """For each rank, the most activations that it holds at once; each is held from F until B (or W) is done."""
        return self.schedule.live

    @property
    def live_shares(self) -> tuple[float, ...]:
        """For each rank, `live` in units of the activations of a rank's share of the model.

        These numbers can be compared between schedules with different numbers of stages per rank.
        """
        stage_share = self.schedule.ranks / self.schedule.stages
        return tuple(count * stage_share for count in self.live)

    @functools.cached_property
    def live_bytes(self) -> tuple[float, ...]:
        """For each rank, the most bytes that it holds for its backwards, including the bytes kept from I to W."""
        stash_bytes = self.costs.stash or (0,) * self.schedule.stages
        pending_bytes = self.costs.pending or (0,) * self.schedule.stages
        peak_bytes = []
        for rank in range(self.schedule.ranks):
            stages = self.schedule.stages_of(rank)
            bytes_per_activation = [stash_bytes[stage] for stage in stages] + [pending_bytes[stage] for stage in stages]
            all_counts = self.schedule.activation_counts(rank)
            peak_bytes.append(max(sum(map(operator.mul, counts, bytes_per_activation), 0.0) for counts in all_counts))
        return tuple(peak_bytes)

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.seconds:.6g}, bubble {self.bubble:.1%} ({self.machine})"

    def __repr__(self) -> str:
        return f"<Simulation of {self}>"


def simulate(schedule: Schedule, costs: Costs, machine: MachineModel = "neighbour") -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: the actions of each rank, in order.
        costs: seconds of passes and messages.
        machine: `neighbour`, one program on all ranks like this package's executor, or `dataflow`, separate programs.

    Raises:
        UserError: the costs have a wrong number of stages or links, or a message on the machine `neighbour` goes to a
            rank that is not a neighbor.
    """
    costs.check(schedule)
    start_of_action = {"dataflow": _dataflow_starts, "neighbour": _neighbour_starts}[machine](schedule, costs)
    spans_by_rank = []
    for order in schedule.orders:
        spans = (
            (start_of_action[action], start_of_action[action] + costs.seconds(action.kind, action.stage))
            for action in order
        )
        spans_by_rank.append(tuple(spans))
    return Simulation(schedule, costs, machine, tuple(spans_by_rank))


def _dataflow_starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Return the start of each action in seconds, if a rank waits only for the inputs of its actions."""
    free_seconds = [0.0] * schedule.ranks  # the time in seconds from which each rank is free
    start_of_action, end_of_action = {}, {}
    for action in ticks(schedule):  # in the order of ticks, inputs come first
        rank = schedule.rank(action)
        start = free_seconds[rank]
        for input_action in schedule.inputs(action):
            links = links_between(schedule.rank(input_action), rank, schedule.ranks)
            start = max(start, end_of_action[input_action] + sum(costs.links[link] for link in links if costs.links))
        start_of_action[action] = start
        free_seconds[rank] = end_of_action[action] = start + costs.seconds(action.kind, action.stage)
    return start_of_action


def _neighbour_starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Return the start of each action in seconds, if ranks exchange messages with both neighbors."""
    table = TickTable(schedule)
    pass_seconds = [costs.seconds(*kind_and_stage) for kind_and_stage in table.passes]
    starts_of_rows = table.starts(pass_seconds, costs.links or (0.0,) * schedule.ranks)
    return {action: starts_of_rows[row][schedule.rank(action)] for action, row in table.row_of.items()}
