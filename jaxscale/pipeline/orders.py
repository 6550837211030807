"""Schedule: the ordered actions of each device of a pipeline, as data that checks itself.

A schedule has no times: an action runs after its inputs and after the actions that precede it on its device. So the
checks (`check.py`), the simulator (`clock/simulate.py`), the charts (`charts/draw.py`) and the executor
(`run/execute.py`) all use the same `Schedule`. Schedules from PyTorch's CSV (`csv.py`) and named schedules
(`schedules/`) have this type too. `ticks.py` computes the ticks of a schedule's actions.
"""

import dataclasses
import functools
from typing import Literal

from jaxscale.errors import UserError
from jaxscale.pipeline import check
from jaxscale.pipeline.action import GRADIENT, Action, Kind
from jaxscale.values.drawn import drawn

__all__ = ["Action", "Kind", "Schedule", "Versions"]


@dataclasses.dataclass(frozen=True)
class Versions:
    """The weights that an asynchronous schedule computes with. Version n of a stage is its weights after n updates.

    Args:
        group: number of microbatches per update: 1 in PipeDream and PipeMare, M in 2BW.
        backward: the weights at which a backward differentiates its stage. "forward": the weights that the forward of
            the same microbatch read; "newest": the newest weights of the stage.
        lag: a forward in group g (counted from 0) reads version max(0, g - lag). `None`: it reads the newest version of
            its stage.
    """

    group: int
    backward: Literal["forward", "newest"]
    lag: int | None = None

    def __post_init__(self) -> None:
        if self.group < 1:
            raise UserError(f"weight versions: got {self.group} microbatches per update, expected 1 or more")
        if self.lag is not None and self.lag < 0:
            raise UserError(f"weight versions: got a lag of {self.lag} updates, expected 0 or more")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. The constructor refuses an invalid schedule.

    Args:
        name: name of the schedule.
        orders: the actions of each rank, in order.
        stages: number of stages of the network.
        microbatches: m, number of microbatches; their indices start at 0.
        routes: `routes[r][stage]` is the rank that runs the stage for the microbatches of route r; only bidirectional
            schedules have several routes.
        route: for each microbatch, the index of its route in `routes`.
        versions: the weights that an asynchronous schedule computes with. `None`: the schedule is synchronous, and the
            weights are updated once, after the schedule.
        cycle: the kinds of successive ticks of a lock-step schedule; the cycle repeats. In such a schedule, all actions
            of a tick have the same kind. `None`: a tick may have several kinds.
        bound: for each rank, the most activations that the rank may hold; an activation belongs to one stage and one
            microbatch. `None`: no limit.

    Raises:
        check.Fault: an action is missing, occurs twice, is on the wrong rank or waits forever, or a rank holds more
            activations than its bound; the error names the rank and the cell.

    Example:
        >>> orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
        >>> acts = tuple(tuple(Action.parse(cell) for cell in row) for row in orders)
        >>> schedule = Schedule("mine", acts, stages=2, microbatches=2, routes=((0, 1),), route=(0, 0))
        >>> schedule.ranks, schedule.chunks, schedule.live, schedule.place(0, 1)
        (2, 1, (2, 1), (1, 0))
        >>> [str(action) for action in schedule.inputs(Action.parse("0B1"))]
        ['0F1', '1B1']
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int
    routes: tuple[tuple[int, ...], ...]
    route: tuple[int, ...]
    versions: Versions | None = None
    cycle: tuple[Kind, ...] | None = None
    bound: tuple[int, ...] | None = None

    _repr_html_ = drawn

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches>"

    def __post_init__(self) -> None:
        check.check_shape(self)
        check.check_actions(self)
        check.check_updates(self)
        check.check_progress(self)
        check.check_stash(self)

    @property
    def ranks(self) -> int:
        """Number of devices on the pipe axis."""
        return len(self.orders)

    @functools.cached_property
    def chunks(self) -> int:
        """The most chunks that any rank holds; a chunk is the weights of one stage."""
        return max(len(stages) for stages in self._stages_of_ranks)

    @functools.cached_property
    def _stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages that it runs: first its stages on the first route, then those on other routes."""
        stage_sets: list[dict[int, None]] = [{} for _ in range(self.ranks)]  # the keys are ordered sets
        for route in self.routes:
            for stage, rank in enumerate(route):
                stage_sets[rank][stage] = None
        return tuple(map(tuple, stage_sets))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs. The stage at index c has its weights in the rank's chunk c."""
        return self._stages_of_ranks[rank]

    def place(self, route: int, stage: int) -> tuple[int, int]:
        """Return the rank of a stage for the microbatches of route `route`, and the index of its chunk on this rank."""
        rank = self.routes[route][stage]
        return rank, self._stages_of_ranks[rank].index(stage)

    def rank(self, action: Action) -> int:
        """Return the rank that runs an action."""
        return self.routes[self.route[action.microbatch]][action.stage]

    @functools.cached_property
    def split(self) -> bool:
        """Whether any backward is split into an input gradient and a weight gradient."""
        return any(action.kind is Kind.I for order in self.orders for action in order)

    @functools.cached_property
    def fused(self) -> frozenset[tuple[int, int]]:
        """The pairs (stage, microbatch) whose backward is one action, B, instead of two, I and W."""
        return frozenset((a.stage, a.microbatch) for order in self.orders for a in order if a.kind is Kind.B)

    def gradient(self, stage: int, microbatch: int) -> Action:
        """Return the action that computes a stage's input gradient: B or, if the backward is split, I."""
        return Action(Kind.B if (stage, microbatch) in self.fused else Kind.I, stage, microbatch)

    def inputs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results an action needs; none for an update, which follows the order of its rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            return (Action(Kind.F, stage - 1, microbatch),) if stage else ()
        if action.kind in GRADIENT:
            forward = Action(Kind.F, stage, microbatch)
            return (forward, self.gradient(stage + 1, microbatch)) if stage + 1 < self.stages else (forward,)
        return (Action(Kind.I, stage, microbatch),) if action.kind is Kind.W else ()

    @functools.cached_property
    def live(self) -> tuple[int, ...]:
        """For each rank, the most activations that it holds at once; each is held from F until B (or W) is done."""
        # the first half of a tuple of counts: the activations between F and the end of B (or W)
        return tuple(
            max((sum(counts[: len(counts) // 2]) for counts in self.activation_counts(rank)), default=0)
            for rank in range(self.ranks)
        )

    def activation_counts(self, rank: int) -> set[tuple[int, ...]]:
        """Return the distinct tuples of activation counts that occur during the actions of a rank.

        The first half of a tuple has, for each stage of the rank, the number of activations between F and the end of B
        or W. The second half has, for each stage, the number of activations between I and the end of W.
        """
        index_of_stage = {stage: index for index, stage in enumerate(self.stages_of(rank))}
        current_counts = [0] * (2 * len(index_of_stage))
        distinct_counts = set()
        for action in self.orders[rank]:
            index = index_of_stage[action.stage]
            if action.kind is Kind.F:
                current_counts[index] += 1
            elif action.kind is Kind.I:
                current_counts[index + len(index_of_stage)] += 1
            distinct_counts.add(tuple(current_counts))
            if action.kind in (Kind.B, Kind.W):
                current_counts[index] -= 1
                current_counts[index + len(index_of_stage)] -= action.kind is Kind.W
        return distinct_counts
