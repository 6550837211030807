"""Itemized estimate of a whole train step's bytes of device and host memory, from its traced program.

The step is traced for the platform's mesh, so the program is the one that would run, with the plan's rematerialization,
microbatches, chunked loss, precision and placements. The bytes of arguments (state, batch) are exact. The live bytes
within the step are computed from the program (`timeline.py`) and multiplied by a factor, fitted to compiled programs
for each kind of platform or for a chip (`accuracy.json`, which `fit_accuracy.py --write` and `fit_cases.py --fit` of
`experiments/benchmarks/` regenerate).

Left out: the order of independent operations and the packing of buffers, because nothing is compiled by default.
`compile_block` compiles the piece of the step that needs the most memory (`compile_pieces.py`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jaxscale.compiler.gpu_target import hides_latency
from jaxscale.errors import UserError
from jaxscale.planning import accuracy
from jaxscale.planning.compile_pieces import Piece, piece_bytes, pieces_of
from jaxscale.planning.network_traffic import Traffic, slow_axis_traffic
from jaxscale.planning.program import TracedStep, described_step, traced_step
from jaxscale.planning.timeline import Item, Timeline, bytes_by_kind, timeline
from jaxscale.platforms.platform import Platform
from jaxscale.programs.flat import FlatProgram
from jaxscale.programs.kinds import has_both_passes
from jaxscale.programs.placements import Placements
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.kernels import KernelChoice
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import HOST_BYTES_FACTOR
from jaxscale.sharding.partition import dim_axes
from jaxscale.state.batches import batch_shapes
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import named_leaves, tree_bytes
from jaxscale.values.units import size

KINDS = (
    "parameters", "optimizer state", "residuals", "outer state", "model state", "batch", "compute copy",
    "kept activations", "stash", "loss", "gradients", "gathered weights", "transients", "packing", "second copy",
    "checkpoint",
)  # fmt: skip
"""Kinds of tensor, in the order in which tables list them."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated memory of a train step, per device.

    Args:
        plan: the plan, with a resolved mesh.
        device_bytes_by_kind: bytes of device memory of each kind of tensor, at the peak of the step.
        host_bytes_by_kind: bytes of host memory of each kind of tensor.
        flop: FLOP of the matrix products in both passes, including recomputation, summed over all devices.
        timeline: live bytes through the step, without the step's arguments.
        argument_items: the step's arguments in device memory, which are leaves of state and batch.
        notes: lines of text about the choice of the mesh and the decision of the memory rule.
        compiled_piece_names: names of the step's pieces that were compiled to obtain the bytes of their temporaries.
        state_bytes_per_parameter: bytes of optimizer state over all devices, divided by the number of parameters.
        slow_axis_traffic: traffic of a device over the mesh's slow axis (between replicas); `None` if the mesh has
            one replica.
        kernels: the implementation of each kernel in the traced program.
        is_partly_trained: whether some parameters are not trained; no errors are recorded for such estimates.
        step_kind: kind of the step, by which errors are recorded.
        chip_kind: kind of the platform's chips: "tpu", "gpu" or "cpu".
    """

    plan: Plan
    device_bytes_by_kind: Mapping[str, int]
    host_bytes_by_kind: Mapping[str, int]
    flop: int
    timeline: Timeline = dataclasses.field(repr=False)
    argument_items: tuple[Item, ...] = dataclasses.field(repr=False, default=())
    notes: tuple[str, ...] = ()
    compiled_piece_names: tuple[str, ...] = ()
    state_bytes_per_parameter: float = 0.0
    slow_axis_traffic: Traffic | None = None
    kernels: tuple[KernelChoice, ...] = ()
    is_partly_trained: bool = False
    step_kind: accuracy.StepKind = "any"
    chip_kind: str = "cpu"

    @property
    def margin(self) -> float:
        """The least difference between estimate and limit that decides whether a step fits, as a share of the limit."""
        return accuracy.margin(
            self.chip_kind,
            self.step_kind,
            is_compiled=bool(self.compiled_piece_names),
            is_partly_trained=self.is_partly_trained,
        )

    @property
    def known_accuracy(self) -> accuracy.Accuracy | None:
        """The recorded errors of estimates of the same kind as this one; `None` if none are recorded."""
        if self.is_partly_trained:
            return None
        if self.compiled_piece_names:
            return accuracy.recorded_accuracy(self.chip_kind, is_compiled=True)
        return accuracy.held_out_accuracy(self.chip_kind, self.step_kind)

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory per device, summed over all kinds."""
        return sum(self.device_bytes_by_kind.values())

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory per device, summed over all kinds."""
        return sum(self.host_bytes_by_kind.values())

    @property
    def moments(self) -> tuple[dict[str, int], ...]:
        """The live bytes by kind, including arguments, at each moment of the step; a loop's body appears once."""
        argument_bytes_by_kind = bytes_by_kind(self.argument_items)
        return tuple(argument_bytes_by_kind | moment.bytes_by_kind for moment in self.timeline.moments)

    @property
    def backward_start(self) -> int:
        """The index of the first moment of the backward pass; the number of moments if there is no backward pass."""
        moments = self.timeline.moments
        return next((index for index, moment in enumerate(moments) if moment.is_backward), len(moments))

    @property
    def kept_bytes(self) -> int:
        """The largest number of bytes of kept activations at any moment."""
        return max((moment.bytes_by_kind.get("kept activations", 0) for moment in self.timeline.moments), default=0)

    @property
    def live_items(self) -> tuple[Item, ...]:
        """The arrays alive at the peak, including arguments, the largest first."""
        return tuple(sorted((*self.argument_items, *self.timeline.peak_items), key=lambda item: -item.bytes))

    def __str__(self) -> str:
        lines = [f"{'':18}{'device':>12}{'host':>12}"]
        for kind in KINDS:
            byte_counts = (self.device_bytes_by_kind.get(kind, 0), self.host_bytes_by_kind.get(kind, 0))
            if any(byte_counts):
                lines.append(f"{kind:18}" + "".join(f"{size(count) if count else '':>12}" for count in byte_counts))
        lines.append(f"{'total':18}{size(self.device_bytes):>12}{size(self.host_bytes):>12}")
        return "\n".join(lines)


def estimate(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    compile_block: bool = False,
    make: Callable[[], Experiment] | None = None,
) -> Estimate:
    """Estimate the bytes of an experiment's train step on a platform, by kind of tensor.

    Args:
        experiment: the experiment to plan for.
        platform: platform to run on, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan of the step; the experiment's plan by default.
        compile_block: whether to compile the piece of the step that needs the most memory (the passes of one block, or
            the loss) for the platform, and to use the bytes of temporaries that the compiler reports.
        make: function that returns the experiment, called in the process that compiles; required if the experiment
            is not picklable.

    Raises:
        UserError: the plan is not valid for the model, the batch or the platform; or `compile_block` is set, but the
            platform has no compiler.
    """
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step = described_step(experiment, parsed_platform, plan)
    measure = None
    if compile_block:
        make = make or partial(dataclasses.replace, experiment)  # a picklable function
        measure = partial(piece_bytes, make, parsed_platform, step.plan)
    return of_step(step, batch_shapes(experiment), parsed_platform, measure)


def of_step(step: TrainStep, batch: Any, platform: Platform, measure: Callable[[Piece], int] | None = None) -> Estimate:
    """Estimate the bytes of a train step.

    Args:
        step: the train step, built for the platform's devices or for a description of them.
        batch: arrays or shapes of a global batch.
        platform: platform that the step would run on.
        measure: function that compiles a piece of the step and returns the bytes of its temporaries; by default,
            nothing is compiled.

    Raises:
        UserError: `measure` is given, but the step has no pieces to compile.
    """
    trace = traced_step(step, batch, platform)
    program, placements = trace.program, trace.placements
    bytes_by_piece: dict[Piece, int | None] = dict.fromkeys(pieces_of(program))
    if measure is not None and not bytes_by_piece:
        raise UserError("compile-block: the model's blocks do not run in a loop; compile the whole step with --verify")
    end_items = tuple(_new_weight_items(step, placements, platform))
    step_timeline = timeline(program, placements, trace.compiler, bytes_by_piece, end_items)
    while measure is not None and (piece := step_timeline.peak.piece) is not None and bytes_by_piece[piece] is None:
        bytes_by_piece[piece] = measure(piece)
        step_timeline = timeline(program, placements, trace.compiler, bytes_by_piece, end_items)
    device_items, host_items = _argument_items(trace, batch)
    device_bytes_by_kind = bytes_by_kind((*device_items, *step_timeline.peak_items))
    compiled_piece_names = tuple(piece.name for piece, byte_count in bytes_by_piece.items() if byte_count is not None)
    packing_bytes = round(step_timeline.peak_bytes * (accuracy.factors(platform.chip).packing - 1))
    if packing_bytes and not compiled_piece_names:
        device_bytes_by_kind["packing"] = packing_bytes
    host_bytes_by_kind = bytes_by_kind(host_items)
    if host_bytes_by_kind:
        # XLA may hold two copies: one that it reads and one that it writes
        host_bytes_by_kind["second copy"] = (HOST_BYTES_FACTOR - 1) * sum(host_bytes_by_kind.values())
    if kept_on_host_bytes := _kept_on_host_bytes(program, placements):
        host_bytes_by_kind["kept activations"] = kept_on_host_bytes
    if platform.chip.kind != "cpu":
        # a checkpoint is copied to the host and written in the background
        host_bytes_by_kind["checkpoint"] = sum(item.bytes for item in device_items + host_items if item.kind != "batch")
    windows = getattr(step.experiment.model, "windows", (None,))
    step_kind = accuracy.kind_of(
        platform.chip,
        step.plan,
        step.experiment.optimizer,
        slices=platform.slices,
        has_regular_blocks=bool(bytes_by_piece) and len(set(windows)) == 1,
    )
    return Estimate(
        plan=step.plan,
        device_bytes_by_kind=device_bytes_by_kind,
        host_bytes_by_kind=host_bytes_by_kind,
        flop=trace.flop,
        timeline=step_timeline,
        argument_items=device_items,
        notes=step.parts.lines,
        compiled_piece_names=compiled_piece_names,
        state_bytes_per_parameter=tree_bytes(step.layout.abstract.optimizer) / step.parameters,
        slow_axis_traffic=slow_axis_traffic(step, platform),
        kernels=step.kernels,
        is_partly_trained=step.experiment.train is not None,
        step_kind=step_kind,
        chip_kind=platform.chip.kind,
    )


def _kept_on_host_bytes(program: FlatProgram, placements: Placements) -> int:
    """Return the bytes per device of activations that loops keep in host memory for a microbatch's backward pass."""
    kept_bytes = 0
    for index, operation in enumerate(program.operations):
        if operation.loop_body is None:
            continue
        kept_bytes += sum(
            placements.bytes_of(program.avals[value], placements.by_value[value], in_host=True)
            for value in operation.outputs
            if value not in program.outputs
        )
        if has_both_passes(operation.loop_body):
            kept_bytes += _kept_on_host_bytes(operation.loop_body, placements.loop_placements[index])
    return kept_bytes


def _new_weight_items(step: TrainStep, placements: Placements, platform: Platform) -> Iterator[Item]:
    """Yield the new weights of blocks that are in memory beside the old weights when a step ends.

    Under ZeRO 1 and 2 in float32, weights are whole between steps, and each device updates its shards of them. On GPUs
    of compute capability 9.0 and more, XLA gathers the new weights of all blocks before it overwrites the old ones, so
    the shards, the new and the old weights are in memory at once. Tables are gathered apart. The rule was inferred
    from six compiled steps, and did not hold in one for an A100. Left out: pipelines.
    """
    if platform.chip.kind != "gpu" or not hides_latency(platform.chip):
        return
    if step.plan.zero not in (1, 2) or step.plan.pipeline is not None or step.plan.offload.masters:
        return
    for name, leaf in named_leaves(step.layout.abstract.params).items():
        weight_placement = step.layout.placements[name]
        if weight_placement.master != weight_placement.state and step.pure_model.is_stacked(name):
            for part, spec in (("new shard", weight_placement.state), ("new", weight_placement.master)):
                byte_count = placements.bytes_of(leaf, dim_axes(spec, leaf.ndim))
                yield Item(f"{name}, {part}", "gathered weights", byte_count)


def _argument_items(trace: TracedStep, batch: Any) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return the step's arguments in device memory and those in host memory, named by their leaf of state or batch."""
    device_items, host_items = [], []
    kind_by_group = {"params": "parameters", "optimizer": "optimizer state", "extra/in_flight": "stash"}
    kind_by_group |= {"extra/reduce": "residuals", "extra/outer": "outer state"}
    for value, (path, leaf) in zip(trace.program.inputs, trace.paths_and_leaves, strict=False):
        group, _, leaf_name = path.partition("/")
        if group == "extra":
            extra_name, _, leaf_name = leaf_name.partition("/")
            group = f"extra/{extra_name}"
        kind = kind_by_group.get(group, "batch" if group in batch else "model state")
        item = Item(leaf_name or path, kind, trace.placements.bytes_of(leaf, trace.placements.by_value[value]))
        is_on_host = getattr(leaf.sharding, "memory_kind", None) == "pinned_host"
        (host_items if is_on_host else device_items).append(item)
    return tuple(device_items), tuple(host_items)
