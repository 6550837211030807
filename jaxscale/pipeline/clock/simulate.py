"""Simulation of a schedule on one of two machines: its time, its idle time, and its activations in memory.

`dataflow`: a rank runs an action as soon as it is free and the inputs have arrived, like separate programs that send
messages to one another; the formulas in the papers are for this machine.

`neighbour`: one program on all ranks (SPMD), in ticks (`pipeline/ticks.py`): `pipeline/run/execute.py`. At the end of a
tick with any message, a rank exchanges messages with both neighbours on the ring and waits for them; a tick without
messages has no exchange. If forwards and backwards share a tick, all ranks wait for the longer of the two.

Left out: the slowdown of computations by messages beside them, the gradient reduction and the update at the end of a
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

MachineModel = Literal["neighbour", "dataflow"]
"""How ranks wait for one another: the two machines above."""
Span = tuple[float, float]
"""(start, end) in seconds."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The times of a schedule's actions.

    Args:
        schedule: the schedule.
        costs: costs of its passes and messages.
        machine: how ranks wait for one another; "measured" if the times are those of a real run (`measured.py`).
        spans: start and end of each action in seconds, in the order of `schedule.orders`.

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

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds from the first start to the last end on any rank: the makespan."""
        return max(rank_spans[-1][1] for rank_spans in self.spans)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(end - start for start, end in rank_spans) for rank_spans in self.spans)

    @functools.cached_property
    def period(self) -> float | None:
        """Seconds from one update to the next in the steady state of an asynchronous schedule, otherwise `None`.

        It is measured between the first stage's forwards in the second half of the schedule. They do not depend on
        later actions, so neither filling nor draining counts.
        """
        versions = self.schedule.versions
        if versions is None:
            return None
        group, updates = versions.group, self.schedule.microbatches // versions.group
        starts = {
            action.microbatch: start
            for order, spans in zip(self.schedule.orders, self.spans, strict=True)
            for action, (start, _) in zip(order, spans, strict=True)
            if action.kind is Kind.F and action.stage == 0
        }
        late_updates = updates // 2  # number of updates that the period is measured over
        if not late_updates:
            return self.seconds / updates
        last_group_start = (updates - 1) * group  # the first microbatch of the last update
        seconds = (starts[last_group_start] - starts[last_group_start - late_updates * group]) / late_updates
        # a period shorter than a rank's busy time per update: too few updates to reach the steady state
        return seconds if seconds * updates >= max(self.busy) * (1 - 1e-9) else self.seconds / updates

    @property
    def seconds_per_microbatch(self) -> float:
        """Makespan divided by the microbatches; for an asynchronous schedule, the seconds in the steady state."""
        if self.period is not None and self.schedule.versions is not None:
            return self.period / self.schedule.versions.group
        return self.seconds / self.schedule.microbatches

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time in the makespan, or in the steady state if the schedule is asynchronous.

        1 - sum(busy) / (ranks * seconds)
        """
        ranks, work = self.schedule.ranks, sum(self.busy)
        if self.period is not None and self.schedule.versions is not None:
            updates = self.schedule.microbatches // self.schedule.versions.group
            return 1 - work / updates / (ranks * self.period)
        return 1 - work / (ranks * self.seconds)

    @property
    def bubble_own_span(self) -> float:
        """Share of idle time between each rank's first start and last end: the zero-bubble papers' definition.

        Ranks begin and end at different times; the next step, if it follows at once, would fill the time before and
        after.
        """
        own_seconds = sum(rank_spans[-1][1] - rank_spans[0][0] for rank_spans in self.spans)
        return 1 - sum(self.busy) / own_seconds

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank idles between its first start and its last end."""
        return tuple(spans[-1][1] - spans[0][0] - busy for spans, busy in zip(self.spans, self.busy, strict=True))

    @property
    def live(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once; one is held from its F until its B or W is done."""
        return self.schedule.live

    @property
    def live_shares(self) -> tuple[float, ...]:
        """`live` in multiples of one rank's share of the model, to compare interleaved schedules."""
        share = self.schedule.ranks / self.schedule.stages
        return tuple(count * share for count in self.live)

    @functools.cached_property
    def live_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds for its backwards, including the bytes kept from I to W."""
        stash_bytes = self.costs.stash or (0,) * self.schedule.stages
        pending_bytes = self.costs.pending or (0,) * self.schedule.stages
        peaks = []
        for rank in range(self.schedule.ranks):
            stages = self.schedule.stages_of(rank)
            activation_bytes = [stash_bytes[stage] for stage in stages] + [pending_bytes[stage] for stage in stages]
            count_tuples = self.schedule.activation_counts(rank)
            peaks.append(max(sum(map(operator.mul, counts, activation_bytes), 0.0) for counts in count_tuples))
        return tuple(peaks)

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.seconds:.6g}, bubble {self.bubble:.1%} ({self.machine})"


def simulate(schedule: Schedule, costs: Costs, machine: MachineModel = "neighbour") -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: the actions of each rank, in order.
        costs: seconds of passes and messages.
        machine: `neighbour`, one program on all ranks like this package's executor, or `dataflow`, separate programs.

    Raises:
        UserError: the costs have a wrong number of stages or links, or, on `neighbour`, a message goes to a rank
            that is not a neighbour.
    """
    costs.check(schedule)
    starts = {"dataflow": _dataflow_starts, "neighbour": _neighbour_starts}[machine](schedule, costs)
    spans_by_rank = []
    for order in schedule.orders:
        spans = ((starts[action], starts[action] + costs.seconds(action.kind, action.stage)) for action in order)
        spans_by_rank.append(tuple(spans))
    return Simulation(schedule, costs, machine, tuple(spans_by_rank))


def _dataflow_starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Return the second at which each action starts if ranks wait for their inputs alone."""
    free_at = [0.0] * schedule.ranks
    starts, ends = {}, {}
    for action in ticks(schedule):  # in the order of ticks, inputs come first
        rank = schedule.rank(action)
        start = free_at[rank]
        for source in schedule.inputs(action):
            links = links_between(schedule.rank(source), rank, schedule.ranks)
            start = max(start, ends[source] + sum(costs.links[link] for link in links if costs.links))
        starts[action] = start
        free_at[rank] = ends[action] = start + costs.seconds(action.kind, action.stage)
    return starts


def _neighbour_starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Return the second at which each action starts if ranks exchange messages with both neighbours."""
    table = TickTable(schedule)
    seconds = [costs.seconds(*key) for key in table.passes]
    starts = table.starts(seconds, costs.links or (0.0,) * schedule.ranks)
    return {action: starts[row][schedule.rank(action)] for action, row in table.row_of.items()}
