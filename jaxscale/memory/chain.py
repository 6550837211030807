"""Chains: stages in sequence, plans of what to keep and what to recompute, and the cost of a plan.

A plan is data, a tuple of nodes: `Save(i, option)` runs stage i and keeps the values of this option until the stage's
backward pass; `Remat(nodes)` runs the stages of its nodes, keeps only the first stage's input, and runs the stages
again, as the nodes specify, for their backward pass. `simulate` walks through a plan and returns its seconds, bytes and
number of forward runs; tests compare the solvers with `simulate`.

This module has the plans that need no costs. `revolve` (Griewank and Walther 2000, Algorithm 799) is optimal for
identical stages and a number of slots; each slot keeps the input of one stage. `periodic` is by Chen et al. 2016
(arXiv:1604.06174). The plan for different stages and a budget in bytes is in `memory/rotor_table.py`.

Left out: plans that keep a value beyond the segment that computes it (non-persistent schedules), which nested
`jax.checkpoint` cannot express.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jaxscale.errors import UserError
from jaxscale.values import check_types


def _check_not_negative(record: object, *field_names: str) -> None:
    """Raise an error if one of the named fields of a dataclass is negative."""
    for field_name in field_names:
        if getattr(record, field_name) < 0:
            raise UserError(f"{field_name}: got {getattr(record, field_name)}, expected 0 or more")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to keep values of a stage from its forward pass to its backward pass.

    Args:
        kept_bytes: bytes kept in addition to the stage's input and output, which are always kept.
        extra_seconds: seconds to recompute, in the backward pass, the values that were not kept.
        working_bytes: additional bytes in use while the backward pass of the stage runs.
        name: name of the option, for messages and reports.
    """

    kept_bytes: int = 0
    extra_seconds: float = 0.0
    working_bytes: int = 0
    name: str = "all"

    def __post_init__(self) -> None:
        check_types(self)
        _check_not_negative(self, "kept_bytes", "extra_seconds", "working_bytes")


@dataclasses.dataclass(frozen=True)
class Stage:
    """The cost of one stage of a chain, per device and microbatch.

    Args:
        forward_seconds: seconds of the stage's forward pass.
        backward_seconds: seconds of the stage's backward pass if all values are kept.
        output_bytes: bytes of the output, `passed_bytes` included. The gradient of the output has as many bytes.
        options: ways to keep the stage's values for its backward pass.
        working_bytes: additional bytes in use while the forward pass of the stage runs.
        passed_bytes: bytes of the input arrays that the output contains unchanged (the skip connections of a U-Net).
            These arrays take memory only once. A stage that passes on fewer bytes than the stage before it drops the
            arrays that were added last.

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
        _check_not_negative(
            self, "forward_seconds", "backward_seconds", "output_bytes", "working_bytes", "passed_bytes"
        )
        if not self.options:
            raise UserError(
                "stage: got no options, expected at least one `Option` (what to keep of the stage's values)"
            )
        if self.passed_bytes > self.output_bytes:
            raise UserError(
                f"passed_bytes: got {self.passed_bytes}, expected at most the {self.output_bytes} bytes of the output"
            )


@dataclasses.dataclass(frozen=True)
class Save:
    """Run a stage and keep the values that its backward pass needs.

    Args:
        stage: index of the stage, from 0.
        option: index of the stage's option under which its values are kept.
    """

    stage: int
    option: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        _check_not_negative(self, "stage", "option")


@dataclasses.dataclass(frozen=True)
class Remat:
    """Run neighboring stages, keep only the first stage's input, and run the stages again for their backward pass.

    Args:
        nodes: plan of the second run of the stages.
    """

    nodes: "tuple[Save | Remat, ...]"

    def __post_init__(self) -> None:
        check_types(self)
        if not self.nodes:
            raise UserError("Remat: got no nodes, expected at least one `Save` or `Remat`")


Nodes = tuple[Save | Remat, ...]
"""A plan of a whole chain, or of some neighboring stages of a chain."""


@dataclasses.dataclass(frozen=True)
class ChainCost:
    """The cost of a plan of a chain.

    Args:
        seconds: seconds of the forward and the backward pass.
        peak_bytes: largest number of live bytes at any time, the chain's input included.
        kept_bytes: largest number of bytes kept for a backward pass at any time: the chain's input, inputs of stages,
            and the values that stages keep. It excludes gradients, the working memory of the running stage, and the
            output of the last stage in a list of nodes, because that stage's backward pass follows immediately.
        forwards: number of forward runs of stages; without recomputation, the number of stages.
        peak_stage: index of the stage that runs when the live bytes are largest.
    """

    seconds: float
    peak_bytes: int
    kept_bytes: int
    forwards: int
    peak_stage: int


def save_nodes(nodes: Nodes) -> Iterator[Save]:
    """Yield the `Save` nodes of a plan, nested ones included, from the first stage to the last."""
    for node in nodes:
        if isinstance(node, Save):
            yield node
        else:
            yield from save_nodes(node.nodes)


def times_run(nodes: Nodes) -> list[int]:
    """Return the number of forward runs of each stage, in order.

    A stage runs once, and once more for each `Remat` that contains the stage.

    Example:
        >>> times_run((Remat((Save(0), Remat((Save(1),)))), Save(2)))
        [2, 3, 1]
    """
    run_counts: list[int] = []
    for node in nodes:
        run_counts += [1] if isinstance(node, Save) else [1 + count for count in times_run(node.nodes)]
    return run_counts


def check_nodes(nodes: Nodes, stage_count: int) -> None:
    """Raise an error unless a plan contains each stage of a chain once, in order.

    Raises:
        UserError: the plan is for another chain.
    """
    stage_indices = [save.stage for save in save_nodes(nodes)]
    if stage_indices != list(range(stage_count)):
        shown_indices = ", ".join(map(str, stage_indices[:8])) + (", ..." if len(stage_indices) > 8 else "")
        raise UserError(
            f"got a plan of {len(stage_indices)} stages ({shown_indices}) for a chain of {stage_count}: expected each "
            "stage once, in order; make the plan again for this model"
        )


def simulate(nodes: Nodes, stages: Sequence[Stage], input_bytes: int) -> ChainCost:
    """Return the cost of a plan, computed by a walk through its forward and backward passes.

    Args:
        nodes: the plan of the chain.
        stages: costs of the chain's stages.
        input_bytes: bytes of the first stage's input.

    Raises:
        UserError: the plan is for another chain, or it refers to an option that a stage does not have.

    Example:
        >>> stages = [Stage(1.0, 2.0, 1)] * 4
        >>> simulate(revolve(4, 2), stages, 1)
        ChainCost(seconds=16.0, peak_bytes=6, kept_bytes=3, forwards=8, peak_stage=3)
    """
    check_nodes(nodes, len(stages))
    for save in save_nodes(nodes):
        if save.option >= len(stages[save.stage].options):
            raise UserError(
                f"plan: got option {save.option} for stage {save.stage}, expected at most "
                f"{len(stages[save.stage].options) - 1}, the stage's last option: make the plan again for these stages"
            )
    walk = _Walk(tuple(stages), input_bytes)
    walk.run(nodes, stages[-1].output_bytes)
    return ChainCost(walk.seconds, walk.peak_bytes, walk.most_held_bytes, walk.forward_run_count, walk.peak_stage)


class _Walk:
    """Counters of seconds, live bytes and held bytes (those kept for a backward pass) while a plan runs.

    The input of a list of nodes is live while the list runs.

    Attributes:
        stages: costs of the chain's stages.
        edge_bytes: bytes of each stage's input, then of the last stage's output.
        live_bytes: bytes that are live now; `peak_bytes` is their maximum so far, reached while stage `peak_stage` ran.
        held_bytes: bytes held now; `most_held_bytes` is their maximum so far.
        seconds: seconds so far.
        forward_run_count: number of forward runs so far.
    """

    def __init__(self, stages: tuple[Stage, ...], input_bytes: int) -> None:
        self.stages = stages
        self.edge_bytes = [input_bytes, *(stage.output_bytes for stage in stages)]
        self.live_bytes = self.held_bytes = self.most_held_bytes = input_bytes
        self.seconds, self.peak_bytes, self.forward_run_count, self.peak_stage = 0.0, 0, 0, 0

    def update_peak(self, added_bytes: int, stage_index: int) -> None:
        """Update the peak if the live bytes plus the `added_bytes` of a running stage exceed the peak so far."""
        if self.live_bytes + added_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_stage = self.live_bytes + added_bytes, stage_index

    def hold(self, added_bytes: int) -> None:
        """Add to the held bytes; a negative number releases bytes."""
        self.held_bytes += added_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def new_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the input of stage `stop` that are not part of the input of stage `start`."""
        return self.edge_bytes[stop] - min(stage.passed_bytes for stage in self.stages[start:stop])

    def count_forward(self, stage_index: int) -> None:
        """Count one forward run of a stage, and its seconds."""
        self.seconds += self.stages[stage_index].forward_seconds
        self.forward_run_count += 1

    def run_forward(self, start: int, stop: int) -> None:
        """Run stages `start` to `stop` - 1 forward; keep only the first stage's input and the last stage's output."""
        for index in range(start, stop):
            input_bytes = self.new_bytes(start, index) if index > start else 0
            self.update_peak(input_bytes + self.new_bytes(index, index + 1) + self.stages[index].working_bytes, index)
            self.count_forward(index)

    def run(self, nodes: Nodes, gradient_bytes: int) -> None:
        """Run nodes forward and backward; the gradient of the last node's output takes `gradient_bytes`."""
        if not nodes:
            return
        node, later_nodes = nodes[0], nodes[1:]
        if isinstance(node, Save):
            stage = self.stages[node.stage]
            option = stage.options[node.option]
            kept_bytes = option.kept_bytes + self.new_bytes(node.stage, node.stage + 1)
            self.update_peak(gradient_bytes + kept_bytes + stage.working_bytes, node.stage)
            self.count_forward(node.stage)
            stage_held_bytes = kept_bytes if later_nodes else option.kept_bytes
            self.live_bytes += kept_bytes
            self.hold(stage_held_bytes)
            self.run(later_nodes, gradient_bytes)
            self.hold(-stage_held_bytes)
            # the gradients of the stage's output and of its input
            stage_gradient_bytes = self.edge_bytes[node.stage + 1] + self.edge_bytes[node.stage] - stage.passed_bytes
            self.update_peak(stage_gradient_bytes + option.working_bytes, node.stage)
            self.live_bytes -= kept_bytes
            self.seconds += stage.backward_seconds + option.extra_seconds
            return
        segment_stages = [save.stage for save in save_nodes(node.nodes)]
        start, stop = segment_stages[0], segment_stages[-1] + 1
        self.live_bytes += gradient_bytes
        self.run_forward(start, stop)
        self.live_bytes -= gradient_bytes
        if later_nodes:
            output_bytes = self.new_bytes(start, stop)
            self.live_bytes += output_bytes
            self.hold(output_bytes)
            self.run(later_nodes, gradient_bytes)
            self.hold(-output_bytes)
            self.live_bytes -= output_bytes
        self.run(node.nodes, self.edge_bytes[stop])


def keep_all(stages: int) -> Nodes:
    """Return the plan that keeps the values of each stage under its first option and recomputes nothing."""
    return tuple(Save(stage) for stage in range(stages))


def keep_inputs(stages: int) -> Nodes:
    """Return the plan that keeps only the input of each stage and runs each stage a second time."""
    return tuple(Remat((Save(stage),)) for stage in range(stages))


def square_root(stages: int) -> int:
    """Return the K that minimizes ceil(L / K) + K for L stages.

    The memory rule `sqrt` divides a chain into segments of K stages.

    Example:
        >>> square_root(16), square_root(32)
        (4, 6)
    """
    return min(range(1, stages + 1), key=lambda k: (math.ceil(stages / k) + k, abs(k - math.sqrt(stages))))


def periodic(stages: int, every: int) -> Nodes:
    """Return the plan that keeps the input of every K-th stage and all values of the last segment.

    The last segment is the first one to run backward, so it does not run again.

    Args:
        stages: number of stages.
        every: K, the number of stages in a segment.

    Example:
        >>> periodic(3, 2)
        (Remat(nodes=(Save(stage=0, option=0), Save(stage=1, option=0))), Save(stage=2, option=0))
    """
    if every < 1:
        raise UserError(f"periodic: got {every}, expected a whole number of stages >= 1")
    *segments, last_segment = [keep_all(stages)[start : start + every] for start in range(0, stages, every)]
    return (*map(Remat, segments), *last_segment)


def revolve_cost(stages: int, slots: int) -> int:
    """Return the least number of repeated forward runs.

    The number is r L - C(s + r, r - 1) for the least r with C(s + r, r) >= L, where C(n, k) is a binomial coefficient.

    Args:
        stages: L, the number of identical stages.
        slots: s, the number of stage inputs kept at a time. The chain's input counts; the input of the running stage
            does not.

    Example:
        >>> revolve_cost(32, 4), revolve_cost(16, 3), revolve_cost(8, 2)
        (75, 33, 14)
    """
    _check_slots(stages, slots)
    repeat_count = 0
    while math.comb(slots + repeat_count, repeat_count) < stages:
        repeat_count += 1
    return repeat_count * stages - math.comb(slots + repeat_count, repeat_count - 1) if repeat_count else 0


def revolve(stages: int, slots: int) -> Nodes:
    """Return the plan with the fewest forward runs for identical stages, of which only one at a time keeps its values.

    Args:
        stages: number of stages.
        slots: number of stage inputs kept at a time. The chain's input counts; the input of the running stage does not.

    Example:
        >>> revolve(2, 1)
        (Remat(nodes=(Save(stage=0, option=0),)), Save(stage=1, option=0))

    References:
        Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000.
    """
    _check_slots(stages, slots)
    return _revolve(0, stages, slots)


def _revolve(first_stage: int, stage_count: int, slot_count: int) -> Nodes:
    """Return the plan of `revolve` for `stage_count` stages from the index `first_stage` on."""
    if stage_count == 1:
        return (Save(first_stage),)
    head_count = stage_count - 1 if slot_count == 1 else _head_count(stage_count, slot_count)
    tail_nodes = _revolve(first_stage + head_count, stage_count - head_count, max(slot_count - 1, 1))
    return (Remat(_revolve(first_stage, head_count, slot_count)), *tail_nodes)


@functools.lru_cache(maxsize=4096)
def _head_count(stage_count: int, slot_count: int) -> int:
    """Return the number of stages to run before the next stage input is kept; `slot_count` is at least 2."""
    return min(
        range(1, stage_count),
        key=lambda k: k + revolve_cost(k, slot_count) + revolve_cost(stage_count - k, slot_count - 1),
    )


def _check_slots(stage_count: int, slot_count: int) -> None:
    """Raise an error unless the numbers of stages and slots are both at least one."""
    if stage_count < 1 or slot_count < 1:
        raise UserError(f"revolve: got {stage_count} stages and {slot_count} slots, expected at least one of each")
