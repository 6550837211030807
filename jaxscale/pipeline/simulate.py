"""How long a schedule takes, how much of it is idle, and what waits in memory meanwhile, under one of two machines.

`dataflow`: a rank does an action as soon as it is free and the inputs have arrived. So run separate programs that send
messages to one another; the formulas in the papers are of this machine.

`neighbour`: one program on all ranks (SPMD), as `execute.py` runs it, in ticks (`ticks.py`). At the end of a tick in
which anybody sends, a rank exchanges messages with both neighbours on the ring and waits for them; a tick of which
nothing is sent ends without. Where forwards share ticks with backwards, everybody waits for the longer.

Left out: what a message takes from the computation beside it, the gradient reduction and the update at the end of a
synchronous step, and differences between microbatches.

References:
    Qi, Wan, Huang and Lin 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241): the bubble of a rank's own span.
"""

import dataclasses
import functools
from typing import Literal

from jaxscale.errors import UserError
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.schedule import Action, Kind, Schedule
from jaxscale.pipeline.ticks import ticks

Machine = Literal["neighbour", "dataflow"]
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A schedule with a clock.

    Args:
        schedule: what ran.
        costs: what its passes took.
        machine: how ranks wait for one another; "measured": as they did (`measured.py`).
        spans: start and end of each action in seconds, in the order of `schedule.orders`.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["1f1b"].schedule(4, 8)
        >>> plain, ours = (simulate(schedule, Costs.alike(schedule), machine) for machine in ("dataflow", "neighbour"))
        >>> plain.seconds, f"{plain.bubble:.4f}", ours.seconds, plain.live
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

        Told from when the first stage begins its forwards, in the second half of the schedule: what comes later does
        not reach back to them, so neither filling nor draining counts.
        """
        versions = self.schedule.versions
        if versions is None:
            return None
        group, updates = versions.group, self.schedule.microbatches // versions.group
        first = {
            action.microbatch: start
            for order, spans in zip(self.schedule.orders, self.spans, strict=True)
            for action, (start, _) in zip(order, spans, strict=True)
            if action.kind is Kind.F and action.stage == 0
        }
        counted = updates // 2
        if not counted:
            return self.seconds / updates
        last = (updates - 1) * group
        found = (first[last] - first[last - counted * group]) / counted
        # too few updates, and no steady state has been reached: no rank can do its work faster than without a pause
        return found if found * updates >= max(self.busy) * (1 - 1e-9) else self.seconds / updates

    @property
    def seconds_per_microbatch(self) -> float:
        """The makespan over the microbatches; of an asynchronous schedule in the steady state."""
        if self.period is not None and self.schedule.versions is not None:
            return self.period / self.schedule.versions.group
        return self.seconds / self.schedule.microbatches

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle: of the makespan; of the steady state where weights are updated inside.

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

        Ranks begin and end at different times, and a step that follows at once would fill what this leaves out.
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
        """The same as multiples of the activations of one rank's share of the model, for comparing interleaved ones."""
        share = self.schedule.ranks / self.schedule.stages
        return tuple(count * share for count in self.live)

    @functools.cached_property
    def live_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank holds at most for its backward passes; what I leaves for W beside them."""
        stash = self.costs.stash or (0,) * self.schedule.stages
        pending = self.costs.pending or (0,) * self.schedule.stages
        peaks = []
        for order in self.schedule.orders:
            held = peak = 0.0
            for action in order:
                held += {Kind.F: stash[action.stage], Kind.I: pending[action.stage]}.get(action.kind, 0)
                peak = max(peak, held)
                if action.kind in (Kind.B, Kind.W):
                    held -= stash[action.stage] + (pending[action.stage] if action.kind is Kind.W else 0)
            peaks.append(peak)
        return tuple(peaks)

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.seconds:.6g}, bubble {self.bubble:.1%} ({self.machine})"


def simulate(schedule: Schedule, costs: Costs, machine: Machine = "neighbour") -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: what each rank does, in order.
        costs: seconds of passes and messages.
        machine: `neighbour` as our executor runs it, `dataflow` as separate programs would.

    Raises:
        UserError: costs of another number of stages; a message that a neighbour exchange cannot carry.
    """
    return Network(schedule).run(costs, machine)


class Network:
    """A schedule made ready to be simulated under many costs: who waits for whom, found once.

    Args:
        schedule: what each rank does, in order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        at = ticks(schedule)
        placed = [(at[action], rank, action) for rank, order in enumerate(schedule.orders) for action in order]
        number = {action: index for index, (_, _, action) in enumerate(placed)}
        self._ends_of_orders = [len(order) for order in schedule.orders]
        self._rank = [rank for _, rank, _ in placed]
        self._pass = [(action.kind, action.stage) for _, _, action in placed]
        self._rows: list[list[int]] = [[] for _ in range(1 + max(at.values()))]
        self._sends = [False] * len(self._rows)
        self._inputs: list[list[tuple[int, tuple[int, ...]]]] = []
        self._far: tuple[Action, Action] | None = None
        for index, (tick, rank, action) in enumerate(placed):
            self._rows[tick].append(index)
            inputs = []
            for needed in schedule.inputs(action):
                source = number[needed]
                way = _way(self._rank[source], rank, schedule.ranks)
                if way:
                    self._sends[placed[source][0]] = True
                if len(way) > 1 and self._far is None:
                    self._far = (needed, action)
                inputs.append((source, way))
            self._inputs.append(inputs)

    def run(self, costs: Costs, machine: Machine = "neighbour") -> Simulation:
        """As `simulate`."""
        costs.check(self.schedule)
        takes = {one: costs.seconds(*one) for one in set(self._pass)}
        links = costs.links or (0.0,) * self.schedule.ranks
        starts = {"dataflow": self._dataflow, "neighbour": self._neighbour}[machine](takes, links)
        spans = [(start, start + takes[one]) for start, one in zip(starts, self._pass, strict=True)]
        orders, first = [], 0
        for count in self._ends_of_orders:
            orders.append(tuple(spans[first : first + count]))
            first += count
        return Simulation(self.schedule, costs, machine, tuple(orders))

    def _dataflow(self, takes: dict[tuple[Kind, int], float], links: tuple[float, ...]) -> list[float]:
        free = [0.0] * self.schedule.ranks
        starts, ends = [0.0] * len(self._pass), [0.0] * len(self._pass)
        for row in self._rows:  # in the order of ticks what is needed comes first
            for index in row:
                rank = self._rank[index]
                start = free[rank]
                for source, way in self._inputs[index]:
                    there = ends[source] + sum(links[link] for link in way)
                    start = max(start, there)
                starts[index] = start
                free[rank] = ends[index] = start + takes[self._pass[index]]
        return starts

    def _neighbour(self, takes: dict[tuple[Kind, int], float], links: tuple[float, ...]) -> list[float]:
        if self._far is not None:
            source, target = self._far
            raise UserError(
                f"schedule {self.schedule.name}: {target} on rank {self.schedule.rank(target)} needs {source} of rank "
                f"{self.schedule.rank(source)}, which is no neighbour on the ring of {self.schedule.ranks}; place "
                "neighbouring stages on neighbouring ranks (separate programs could send it: the dataflow machine)"
            )
        ranks = self.schedule.ranks
        now = [0.0] * ranks
        starts = [0.0] * len(self._pass)
        for row, sends in zip(self._rows, self._sends, strict=True):
            for index in row:
                rank = self._rank[index]
                starts[index] = now[rank]
                now[rank] += takes[self._pass[index]]
            if sends:
                now = [
                    max(now[rank], now[rank - 1] + links[rank - 1], now[(rank + 1) % ranks] + links[rank])
                    for rank in range(ranks)
                ]
        return starts


def _way(source: int, target: int, ranks: int) -> tuple[int, ...]:
    """The links that a message crosses, the shorter way around the ring; of equals the one that does not close it."""
    right, left = (target - source) % ranks, (source - target) % ranks
    if right < left or (right == left and source < target):
        return tuple((source + step) % ranks for step in range(right))
    return tuple((source - 1 - step) % ranks for step in range(left))
