"""Chains: stages in sequence, plans of what to keep and what to recompute, and the cost of a plan.

A plan is data, a tuple of nodes: `Save(i, option)` runs stage i and keeps the values of that option until its backward
pass; `Remat(nodes)` runs its stages keeping only the input of the first, and runs them again, under its nodes, for
their backward pass. `simulate` walks a plan and returns seconds, bytes and the forward runs of each stage: the
definition that the solvers are tested against. This module has the plans that need no costs: `revolve`, optimal for
alike stages and a number of slots (Griewank and Walther 2000, Algorithm 799), and `periodic` (Chen et al. 2016,
arXiv:1604.06174). The plan for unlike stages and a budget in bytes is in `memory/rotor.py`.

Left out: plans that keep a value beyond the segment that computes it (non-persistent schedules), which nested
`jax.checkpoint` cannot express.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jaxscale.errors import UserError
from jaxscale.values import check_types


def _not_negative(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 0:
            raise UserError(f"{name}: got {getattr(value, name)}, expected 0 or more")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to keep a stage from its forward pass to its backward pass.

    Args:
        kept_bytes: kept besides the stage's input and output, which are always kept.
        extra_seconds: of recomputing, in the backward pass, the values that were not kept.
        working_bytes: further bytes while the backward pass of the stage runs.
        name: shown in messages and reports.
    """

    kept_bytes: int = 0
    extra_seconds: float = 0.0
    working_bytes: int = 0
    name: str = "all"

    def __post_init__(self) -> None:
        check_types(self)
        _not_negative(self, "kept_bytes", "extra_seconds", "working_bytes")


@dataclasses.dataclass(frozen=True)
class Stage:
    """The cost of one stage of a chain, per device and microbatch.

    Args:
        forward_seconds: of its forward pass.
        backward_seconds: of its backward pass if all values were kept.
        output_bytes: of its output, `passed_bytes` included. A gradient has the bytes of its value.
        options: ways to keep it.
        working_bytes: further bytes while the forward pass of the stage runs.
        passed_bytes: of the input arrays that its output contains unchanged (the skips of a U-Net): they take memory
            once. They form a stack: a stage passes on the arrays that earlier stages passed on longest.

    Example:
        >>> Stage(1.0, 2.0, 8, (Option(40, name="all"), Option(8, 0.5, name="matrix products"))).options[1].name
        'matrix products'
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    options: tuple[Option, ...] = (Option(),)
    working_bytes: int = 0
    passed_bytes: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        _not_negative(self, "forward_seconds", "backward_seconds", "output_bytes", "working_bytes", "passed_bytes")
        if not self.options:
            raise UserError("a stage without options: give at least one way to keep it, Option()")
        if self.passed_bytes > self.output_bytes:
            raise UserError(
                f"passed_bytes: got {self.passed_bytes}, expected at most the {self.output_bytes} of the output"
            )


@dataclasses.dataclass(frozen=True)
class Save:
    """Run a stage and keep the values that its backward pass needs.

    Args:
        stage: its index, from 0.
        option: how to keep it, an index into its options.
    """

    stage: int
    option: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        _not_negative(self, "stage", "option")


@dataclasses.dataclass(frozen=True)
class Remat:
    """Run neighbouring stages keeping only the first one's input; run them again, by `nodes`, for their backward pass.

    Args:
        nodes: plan of these stages.
    """

    nodes: "tuple[Save | Remat, ...]"

    def __post_init__(self) -> None:
        check_types(self)
        if not self.nodes:
            raise UserError("a segment of no stages: give Remat at least one node")


Nodes = tuple[Save | Remat, ...]
"""A plan of a chain, or of a part of it."""


@dataclasses.dataclass(frozen=True)
class ChainCost:
    """The cost of a plan of a chain.

    Args:
        seconds: of the forward and the backward pass.
        peak_bytes: most live bytes at any time, the chain's input included.
        kept_bytes: most bytes kept for a backward pass at any time, the chain's input included: inputs of stages, and
            the values that stages keep. Excluded are gradients, the working memory of the running stage, and the
            output of the last stage of a list, which its backward pass reads at once.
        forwards: number of forward runs of stages; L without recomputation.
        peak_stage: the stage that runs at the peak.
    """

    seconds: float
    peak_bytes: int
    kept_bytes: int
    forwards: int
    peak_stage: int


def saves(nodes: Nodes) -> Iterator[Save]:
    """The leaves of a plan, from the first stage to the last."""
    for node in nodes:
        if isinstance(node, Save):
            yield node
        else:
            yield from saves(node.nodes)


def times_run(nodes: Nodes) -> list[int]:
    """Number of forward runs of each stage: one, plus one for every segment around it.

    Example:
        >>> times_run((Remat((Save(0), Remat((Save(1),)))), Save(2)))
        [2, 3, 1]
    """
    return [
        runs
        for node in nodes
        for runs in ([1] if isinstance(node, Save) else [1 + inner_runs for inner_runs in times_run(node.nodes)])
    ]


def check_nodes(nodes: Nodes, stages: int) -> None:
    """Raise unless a plan has each stage of a chain once, in order.

    Raises:
        UserError: the plan is for another chain.
    """
    numbers = [save.stage for save in saves(nodes)]
    if numbers != list(range(stages)):
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        raise UserError(
            f"a plan of {len(numbers)} stages ({shown}) for a chain of {stages}: expected each of them once, in order; "
            "make the plan again for this model"
        )


def simulate(nodes: Nodes, stages: Sequence[Stage], input_bytes: int) -> ChainCost:
    """Walk a plan through a forward and a backward pass.

    Args:
        nodes: the plan.
        stages: of the chain.
        input_bytes: of the first stage's input.

    Raises:
        UserError: the plan is for another chain, or refers to an option that a stage does not have.

    Example:
        >>> alike = [Stage(1.0, 2.0, 1)] * 4
        >>> simulate(revolve(4, 2), alike, 1)
        ChainCost(seconds=16.0, peak_bytes=6, kept_bytes=3, forwards=8, peak_stage=3)
    """
    check_nodes(nodes, len(stages))
    for save in saves(nodes):
        if save.option >= len(stages[save.stage].options):
            raise UserError(
                f"option {save.option} of stage {save.stage}, which has {len(stages[save.stage].options)}: "
                "make the plan again for these stages"
            )
    walk = _Walk(tuple(stages), input_bytes)
    walk.backward(nodes, stages[-1].output_bytes)
    return ChainCost(walk.seconds, walk.peak, walk.most, walk.forwards, walk.peak_stage)


class _Walk:
    """Live and kept bytes while a plan runs. The input of a list of nodes counts as live while the list runs."""

    def __init__(self, stages: tuple[Stage, ...], input_bytes: int) -> None:
        self.stages = stages
        self.bytes = [input_bytes, *(stage.output_bytes for stage in stages)]
        self.live = self.held = self.most = input_bytes
        self.seconds, self.peak, self.forwards, self.peak_stage = 0.0, 0, 0, 0

    def reach(self, more: int, stage: int) -> None:
        """Record a peak of `more` bytes besides the live ones, while a stage runs."""
        if self.live + more > self.peak:
            self.peak, self.peak_stage = self.live + more, stage

    def hold(self, more: int) -> None:
        """Add `more` bytes to those kept for a backward pass; a negative number releases them."""
        self.held += more
        self.most = max(self.most, self.held)

    def new(self, start: int, stop: int) -> int:
        """Bytes of the input of stage `stop` that are not part of the input of stage `start`."""
        return self.bytes[stop] - min(stage.passed_bytes for stage in self.stages[start:stop])

    def forward(self, stage: int) -> None:
        """A stage runs forward."""
        self.seconds += self.stages[stage].forward_seconds
        self.forwards += 1

    def forward_only(self, start: int, stop: int) -> None:
        """Run stages keeping nothing but the input of the first and the output of the last."""
        for index in range(start, stop):
            input_bytes = self.new(start, index) if index > start else 0
            self.reach(input_bytes + self.new(index, index + 1) + self.stages[index].working_bytes, index)
            self.forward(index)

    def backward(self, nodes: Nodes, gradient: int) -> None:
        """Run nodes forward and backward, with a gradient of `gradient` bytes for their output."""
        if not nodes:
            return
        node, tail = nodes[0], nodes[1:]
        if isinstance(node, Save):
            stage = self.stages[node.stage]
            option = stage.options[node.option]
            kept_bytes = option.kept_bytes + self.new(node.stage, node.stage + 1)
            self.reach(gradient + kept_bytes + stage.working_bytes, node.stage)
            self.forward(node.stage)
            held_bytes = kept_bytes if tail else option.kept_bytes
            self.live += kept_bytes
            self.hold(held_bytes)
            self.backward(tail, gradient)
            self.hold(-held_bytes)
            gradients = self.bytes[node.stage + 1] + self.bytes[node.stage] - stage.passed_bytes
            self.reach(gradients + option.working_bytes, node.stage)
            self.live -= kept_bytes
            self.seconds += stage.backward_seconds + option.extra_seconds
            return
        inner_stages = [save.stage for save in saves(node.nodes)]
        start, stop = inner_stages[0], inner_stages[-1] + 1
        self.live += gradient
        self.forward_only(start, stop)
        self.live -= gradient
        if tail:
            boundary = self.new(start, stop)
            self.live += boundary
            self.hold(boundary)
            self.backward(tail, gradient)
            self.hold(-boundary)
            self.live -= boundary
        self.backward(node.nodes, self.bytes[stop])


def keep_all(stages: int) -> Nodes:
    """The plan that keeps every stage by its first option and recomputes nothing."""
    return tuple(Save(stage) for stage in range(stages))


def keep_inputs(stages: int) -> Nodes:
    """The plan that keeps the input of each stage, and runs each a second time."""
    return tuple(Remat((Save(stage),)) for stage in range(stages))


def square_root(stages: int) -> int:
    """The K that minimizes ceil(L / K) + K: the period of the rule `sqrt` for L stages.

    Example:
        >>> square_root(16), square_root(32)
        (4, 6)
    """
    return min(range(1, stages + 1), key=lambda k: (math.ceil(stages / k) + k, abs(k - math.sqrt(stages))))


def periodic(stages: int, every: int) -> Nodes:
    """The plan that keeps the input of every K-th stage, and all of the last segment, whose backward pass comes first.

    Args:
        stages: L.
        every: K.

    Example:
        >>> periodic(3, 2)
        (Remat(nodes=(Save(stage=0, option=0), Save(stage=1, option=0))), Save(stage=2, option=0))
    """
    if every < 1:
        raise UserError(f"periodic: got {every}, expected a whole number of stages >= 1")
    *segments, last = [keep_all(stages)[start : start + every] for start in range(0, stages, every)]
    return (*map(Remat, segments), *last)


def revolve_cost(stages: int, slots: int) -> int:
    """Least number of repeated forward passes of stages: r L - C(s + r, r - 1), C(s + r, r) >= L.

    Args:
        stages: L, alike.
        slots: s, states (inputs of stages) kept at a time, the chain's input among them, and beside them that of the
            stage at work.

    Example:
        >>> revolve_cost(32, 4), revolve_cost(16, 3), revolve_cost(8, 2)
        (75, 33, 14)
    """
    _check_slots(stages, slots)
    repeats = 0
    while math.comb(slots + repeats, repeats) < stages:
        repeats += 1
    return repeats * stages - math.comb(slots + repeats, repeats - 1) if repeats else 0


def revolve(stages: int, slots: int) -> Nodes:
    """The plan of least forward passes for alike stages, one of which at a time keeps what its backward pass needs.

    Args:
        stages: L.
        slots: states (inputs of stages) kept at a time, the chain's input among them, and beside them that of the
            stage at work.

    Example:
        >>> revolve(2, 1)
        (Remat(nodes=(Save(stage=0, option=0),)), Save(stage=1, option=0))

    References:
        Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000.
    """
    _check_slots(stages, slots)
    return _revolve(0, stages, slots)


def _revolve(first: int, count: int, slots: int) -> Nodes:
    """`revolve` for the stages from `first` on."""
    if count == 1:
        return (Save(first),)
    head = count - 1 if slots == 1 else _head(count, slots)
    return (Remat(_revolve(first, head, slots)), *_revolve(first + head, count - head, max(slots - 1, 1)))


@functools.lru_cache(maxsize=4096)
def _head(count: int, slots: int) -> int:
    """Number of stages to run before the next state is kept."""
    return min(range(1, count), key=lambda k: k + revolve_cost(k, slots) + revolve_cost(count - k, slots - 1))


def _check_slots(stages: int, slots: int) -> None:
    if stages < 1 or slots < 1:
        raise UserError(f"revolve: got {stages} stages and {slots} slots, expected at least one of each")
