"""Simulation of a schedule on one of two machines: its time, its idle time, and its activations in memory.

`dataflow`: a rank runs an action as soon as it is free and the inputs have arrived, like separate programs that send
messages to one another; the formulas in the papers are for this machine.

`neighbour`: one program on all ranks (SPMD), in ticks (`pipeline/ticks.py`): `pipeline/run/execute.py`. At the end of a
tick with any message, a rank exchanges messages with both neighbours on the ring and waits for them; a tick without
messages has no exchange. Where forwards share ticks with backwards, all ranks wait for the longer.

Left out: the slowdown of computations by messages beside them, the gradient reduction and the update at the end of a
synchronous step, and differences between microbatches.

References:
    Qi, Wan, Huang and Lin 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241): the bubble of a rank's own span.
"""

import dataclasses
import functools
from typing import Literal

from jaxscale.errors import UserError
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.schedule import Action, Kind, Schedule
from jaxscale.pipeline.ticks import ticks

Machine = Literal["neighbour", "dataflow"]
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The times of a schedule's actions.

    Args:
        schedule: the schedule.
        costs: of its passes.
        machine: how ranks wait for one another; "measured": times of a real run (`measured.py`).
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
    machine: Machine | Literal["measured"]
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def seconds(self) -> float:
        """From the first start to the last end, on any rank."""
        return max(order[-1][1] for order in self.spans)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(end - start for start, end in order) for order in self.spans)

    @functools.cached_property
    def period(self) -> float | None:
        """Seconds from one update to the next in the steady state of an asynchronous schedule, `None` of others.

        Measured between the first stage's forwards in the second half of the schedule: they do not depend on later
        actions, so neither filling nor draining counts.
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
        count = updates // 2
        if not count:
            return self.seconds / updates
        last = (updates - 1) * group
        seconds = (starts[last] - starts[last - count * group]) / count
        # a period below a rank's busy time shows that too few updates have reached no steady state
        return seconds if seconds * updates >= max(self.busy) * (1 - 1e-9) else self.seconds / updates

    @property
    def seconds_per_microbatch(self) -> float:
        """Makespan over microbatches; for an asynchronous schedule, in the steady state."""
        if self.period is not None and self.schedule.versions is not None:
            return self.period / self.schedule.versions.group
        return self.seconds / self.schedule.microbatches

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time: of the makespan; for an asynchronous schedule, of the steady state.

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

        Ranks begin and end at different times; a step that follows at once would fill the time before and after.
        """
        spans = sum(order[-1][1] - order[0][0] for order in self.spans)
        return 1 - sum(self.busy) / spans

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank idles between its first start and its last end."""
        return tuple(order[-1][1] - order[0][0] - busy for order, busy in zip(self.spans, self.busy, strict=True))

    @property
    def live(self) -> tuple[int, ...]:
        """Activations that each rank holds at most: of one stage and microbatch, from F until B or W is done."""
        return self.schedule.live

    @property
    def live_shares(self) -> tuple[float, ...]:
        """`live` in multiples of one rank's share of the model, to compare interleaved schedules."""
        share = self.schedule.ranks / self.schedule.stages
        return tuple(count * share for count in self.live)

    @functools.cached_property
    def live_bytes(self) -> tuple[float, ...]:
        """Most bytes that each rank holds for its backwards, with those from I to W."""
        stash = self.costs.stash or (0,) * self.schedule.stages
        pending = self.costs.pending or (0,) * self.schedule.stages
        peaks = []
        for order in self.schedule.orders:
            live = peak = 0.0
            for action in order:
                live += {Kind.F: stash[action.stage], Kind.I: pending[action.stage]}.get(action.kind, 0)
                peak = max(peak, live)
                if action.kind in (Kind.B, Kind.W):
                    live -= stash[action.stage] + (pending[action.stage] if action.kind is Kind.W else 0)
            peaks.append(peak)
        return tuple(peaks)

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.seconds:.6g}, bubble {self.bubble:.1%} ({self.machine})"


def simulate(schedule: Schedule, costs: Costs, machine: Machine = "neighbour") -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: the actions of each rank, in order.
        costs: seconds of passes and messages.
        machine: `neighbour` as our executor, `dataflow` as separate programs.

    Raises:
        UserError: costs of a wrong number of stages; a message that a neighbour exchange cannot carry.
    """
    return Network(schedule).run(costs, machine)


class Network:
    """A schedule ready to be simulated under many costs: its dependences are computed once.

    Args:
        schedule: the actions of each rank, in order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        tick_of = ticks(schedule)
        cells = [(tick_of[action], rank, action) for rank, order in enumerate(schedule.orders) for action in order]
        index_of = {action: index for index, (_, _, action) in enumerate(cells)}
        self._order_lengths = [len(order) for order in schedule.orders]
        self._rank = [rank for _, rank, _ in cells]
        self._passes = [(action.kind, action.stage) for _, _, action in cells]
        self._rows: list[list[int]] = [[] for _ in range(1 + max(tick_of.values()))]
        self._sends = [False] * len(self._rows)
        self._inputs: list[list[tuple[int, tuple[int, ...]]]] = []
        self._unreachable: tuple[Action, Action] | None = None
        for index, (tick, rank, action) in enumerate(cells):
            self._rows[tick].append(index)
            inputs = []
            for input_action in schedule.inputs(action):
                source = index_of[input_action]
                path = _shortest_path(self._rank[source], rank, schedule.ranks)
                if path:
                    self._sends[cells[source][0]] = True
                if len(path) > 1 and self._unreachable is None:
                    self._unreachable = (input_action, action)
                inputs.append((source, path))
            self._inputs.append(inputs)

    def run(self, costs: Costs, machine: Machine = "neighbour") -> Simulation:
        """As `simulate`."""
        costs.check(self.schedule)
        pass_seconds = {key: costs.seconds(*key) for key in set(self._passes)}
        links = costs.links or (0.0,) * self.schedule.ranks
        starts = {"dataflow": self._dataflow, "neighbour": self._neighbour}[machine](pass_seconds, links)
        spans = [(start, start + pass_seconds[key]) for start, key in zip(starts, self._passes, strict=True)]
        orders, begin = [], 0
        for count in self._order_lengths:
            orders.append(tuple(spans[begin : begin + count]))
            begin += count
        return Simulation(self.schedule, costs, machine, tuple(orders))

    def _dataflow(self, pass_seconds: dict[tuple[Kind, int], float], links: tuple[float, ...]) -> list[float]:
        free_at = [0.0] * self.schedule.ranks
        starts, ends = [0.0] * len(self._passes), [0.0] * len(self._passes)
        for row in self._rows:  # in the order of ticks inputs come first
            for index in row:
                rank = self._rank[index]
                start = free_at[rank]
                for source, path in self._inputs[index]:
                    arrival = ends[source] + sum(links[link] for link in path)
                    start = max(start, arrival)
                starts[index] = start
                free_at[rank] = ends[index] = start + pass_seconds[self._passes[index]]
        return starts

    def _neighbour(self, pass_seconds: dict[tuple[Kind, int], float], links: tuple[float, ...]) -> list[float]:
        if self._unreachable is not None:
            source, target = self._unreachable
            raise UserError(
                f"schedule {self.schedule.name}: {target} on rank {self.schedule.rank(target)} needs {source} of rank "
                f"{self.schedule.rank(source)}, which is no neighbour on the ring of {self.schedule.ranks}; place "
                "neighbouring stages on neighbouring ranks (separate programs could send it: the dataflow machine)"
            )
        ranks = self.schedule.ranks
        times = [0.0] * ranks
        starts = [0.0] * len(self._passes)
        for row, sends in zip(self._rows, self._sends, strict=True):
            for index in row:
                rank = self._rank[index]
                starts[index] = times[rank]
                times[rank] += pass_seconds[self._passes[index]]
            if sends:
                times = [
                    max(times[rank], times[rank - 1] + links[rank - 1], times[(rank + 1) % ranks] + links[rank])
                    for rank in range(ranks)
                ]
        return starts


def _shortest_path(source: int, target: int, ranks: int) -> tuple[int, ...]:
    """The links that a message crosses, the shorter way around the ring; of equal ways, not over the closing link."""
    right, left = (target - source) % ranks, (source - target) % ranks
    if right < left or (right == left and source < target):
        return tuple((source + step) % ranks for step in range(right))
    return tuple((source - 1 - step) % ranks for step in range(left))
