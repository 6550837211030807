"""Itemised estimate of a whole train step's bytes of device and host memory, from its traced program.

The step is traced for the platform's mesh, so the program is the one that would run, with the plan's rematerialization,
microbatches, chunked loss, precision and placements. The bytes of arguments (state, batch) are exact. The live bytes
within the step are computed from the program (`timeline.py`), and multiplied by a factor per kind of platform that was
fitted to compiled programs (`accuracy.json`, which `experiments/benchmarks/fit_accuracy.py --write` regenerates).

Left out: the order of independent operations and the packing of buffers, because nothing is compiled by default.
`compile_block` compiles the piece of the step that needs the most memory (`compile_pieces.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from jaxscale.recipe.kernels import Taken
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import COPY
from jaxscale.state.batches import batch_shapes
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import tree_bytes
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
        device: bytes of device memory of each kind of tensor, at the moment that needs the most.
        host: bytes of host memory of each kind of tensor.
        flop: FLOP of the products of forward and backward pass, recomputation included, all devices together.
        timeline: live bytes through the step, without its arguments.
        arguments: the arguments on the device, the leaves of state and batch.
        notes: lines of text about the choice of the mesh and the decision of the memory rule.
        compiled: names of the pieces of the step whose temporaries a compiler reported.
        state_bytes: bytes of optimizer state per parameter, over all devices.
        wire: traffic of a device over the mesh's slow axis (between replicas); `None` without such an axis.
        kernels: the implementation of each kernel in the traced program.
    """

    plan: Plan
    device: Mapping[str, int]
    host: Mapping[str, int]
    flop: int
    timeline: Timeline = dataclasses.field(repr=False)
    arguments: tuple[Item, ...] = dataclasses.field(repr=False, default=())
    notes: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    state_bytes: float = 0.0
    wire: Traffic | None = None
    kernels: tuple[Taken, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, all kinds together."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device, all kinds together."""
        return sum(self.host.values())

    @property
    def moments(self) -> tuple[dict[str, int], ...]:
        """Live bytes by kind, arguments included, at each moment of the step; a loop's body appears once."""
        argument_bytes_by_kind = bytes_by_kind(self.arguments)
        return tuple(argument_bytes_by_kind | moment.by_kind for moment in self.timeline.moments)

    @property
    def turn(self) -> int:
        """Index of the first moment of the backward pass."""
        moments = self.timeline.moments
        return next((index for index, moment in enumerate(moments) if moment.is_backward), len(moments))

    @property
    def kept_bytes(self) -> int:
        """The most bytes of kept activations at any moment."""
        return max((moment.by_kind.get("kept activations", 0) for moment in self.timeline.moments), default=0)

    @property
    def alive(self) -> tuple[Item, ...]:
        """Arrays alive at the peak, arguments included, the largest first."""
        return tuple(sorted((*self.arguments, *self.timeline.items), key=lambda item: -item.bytes))

    def __str__(self) -> str:
        lines = [f"{'':18}{'device':>12}{'host':>12}"]
        for kind in KINDS:
            byte_counts = (self.device.get(kind, 0), self.host.get(kind, 0))
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
        experiment: what to train.
        platform: platform to run on, such as "tpu v5e:4x4"; its devices need not be present.
        plan: the plan; the experiment's by default.
        compile_block: compile the piece of the step that needs the most memory (the passes of one block, or the loss)
            for the platform, and use the compiled bytes of its temporaries.
        make: function that returns the experiment, called in the process that compiles; required if the experiment
            does not pickle.

    Raises:
        UserError: the plan is not valid for the model, the batch or the platform, or `compile_block` is set and the
            platform has no compiler.
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step = described_step(experiment, platform, plan)
    measure = None
    if compile_block:
        make = make or partial(dataclasses.replace, experiment)  # a function that pickles
        measure = partial(piece_bytes, make, platform, step.plan)
    return of_step(step, batch_shapes(experiment), platform, measure)


def of_step(step: TrainStep, batch: Any, platform: Platform, measure: Callable[[Piece], int] | None = None) -> Estimate:
    """Estimate the bytes of a train step.

    Args:
        step: the train step, built for the platform's devices or for a description of them.
        batch: arrays or shapes of a global batch.
        platform: platform that the step would run on.
        measure: function that compiles a piece of the step and returns the bytes of its temporaries.

    Raises:
        UserError: `measure` is given, and the step has no pieces to compile.
    """
    trace = traced_step(step, batch, platform)
    program, placements = trace.program, trace.placements
    bytes_of_piece: dict[Piece, int | None] = dict.fromkeys(pieces_of(program))
    if measure is not None and not bytes_of_piece:
        raise UserError("compile-block: the model's blocks do not run in a loop; compile the whole step with --verify")
    step_timeline = timeline(program, placements, trace.compiler, bytes_of_piece)
    while measure is not None and (piece := step_timeline.peak.piece) is not None and bytes_of_piece[piece] is None:
        bytes_of_piece[piece] = measure(piece)
        step_timeline = timeline(program, placements, trace.compiler, bytes_of_piece)
    device_items, host_items = _argument_items(trace, batch)
    device_bytes_by_kind = bytes_by_kind((*device_items, *step_timeline.items))
    compiled_pieces = tuple(piece.name for piece in bytes_of_piece if bytes_of_piece[piece] is not None)
    packing_bytes = round(step_timeline.bytes * (accuracy.factors(platform.chip.kind).packing - 1))
    if packing_bytes and not compiled_pieces:
        device_bytes_by_kind["packing"] = packing_bytes
    host_bytes_by_kind = bytes_by_kind(host_items)
    if host_bytes_by_kind:
        # XLA may hold two copies: one that it reads and one that it writes
        host_bytes_by_kind["second copy"] = (COPY - 1) * sum(host_bytes_by_kind.values())
    if kept_on_host_bytes := _kept_on_host_bytes(program, placements):
        host_bytes_by_kind["kept activations"] = kept_on_host_bytes
    if platform.chip.kind != "cpu":
        # a checkpoint is copied to the host and written in the background
        host_bytes_by_kind["checkpoint"] = sum(item.bytes for item in device_items + host_items if item.kind != "batch")
    return Estimate(
        plan=step.plan,
        device=device_bytes_by_kind,
        host=host_bytes_by_kind,
        flop=trace.flop,
        timeline=step_timeline,
        arguments=device_items,
        notes=step.parts.lines,
        compiled=compiled_pieces,
        state_bytes=tree_bytes(step.layout.abstract.optimizer) / step.parameters,
        wire=slow_axis_traffic(step, platform),
        kernels=step.kernels,
    )


def _kept_on_host_bytes(program: FlatProgram, placements: Placements) -> int:
    """Bytes per device of the activations that loops store in host memory for the backward pass of one microbatch."""
    host_bytes = 0
    for index, operation in enumerate(program.operations):
        if operation.loop_body is None:
            continue
        host_bytes += sum(
            placements.bytes_of(program.avals[value], placements.dims[value], in_host=True)
            for value in operation.outputs
            if value not in program.outputs
        )
        if has_both_passes(operation.loop_body):
            host_bytes += _kept_on_host_bytes(operation.loop_body, placements.loop_placements[index])
    return host_bytes


def _argument_items(trace: TracedStep, batch: Any) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The arguments in device memory, then those in host memory; each is named after its leaf of state or batch."""
    device_items, host_items = [], []
    kind_of_group = {"params": "parameters", "optimizer": "optimizer state", "extra/in_flight": "stash"}
    kind_of_group |= {"extra/reduce": "residuals", "extra/outer": "outer state"}
    for value, (path, leaf) in zip(trace.program.inputs, trace.leaves, strict=False):
        group, _, leaf_name = path.partition("/")
        if group == "extra":
            extra_name, _, leaf_name = leaf_name.partition("/")
            group = f"extra/{extra_name}"
        kind = kind_of_group.get(group, "batch" if group in batch else "model state")
        item = Item(leaf_name or path, kind, trace.placements.bytes_of(leaf, trace.placements.dims[value]))
        is_on_host = getattr(leaf.sharding, "memory_kind", None) == "pinned_host"
        (host_items if is_on_host else device_items).append(item)
    return tuple(device_items), tuple(host_items)
