"""Estimate: device and host bytes of a whole train step, itemised, from its traced program.

The step is traced for the platform's mesh as described, so it is the very program that would run: the plan's remat,
microbatches, chunked loss, precision and placements are in it. Arguments (state, batch) are exact; what lives within
the step is found by walking the program (`timeline.py`), times a factor for each kind of platform that was fitted to
compiled programs (`accuracy.json`, which `experiments/benchmarks/fit_accuracy.py --record` regenerates).

Nothing is compiled unless asked for. What only a compiler knows is then left out: the order of independent operations,
and how well buffers pack. `compile_block` asks it about the piece of the step that decides (`piece_compile.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxscale.errors import UserError
from jaxscale.planning import accuracy
from jaxscale.planning.flat import Program
from jaxscale.planning.kinds import both_passes, kinds_of
from jaxscale.planning.pieces import Piece, pieces_of
from jaxscale.planning.placements import Placements
from jaxscale.planning.program import described_step
from jaxscale.planning.timeline import Item, Timeline, timeline
from jaxscale.planning.traced import TracedStep, traced_step
from jaxscale.planning.wire import Wire, wire_of
from jaxscale.platforms.platform import Platform
from jaxscale.sharding.memory_space import COPY
from jaxscale.step.experiment import Experiment
from jaxscale.step.kernels import Taken
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import tree_bytes
from jaxscale.values.units import size

KINDS = (
    "parameters", "optimizer state", "residuals", "outer state", "model state", "batch", "compute copy",
    "kept activations", "stash", "loss", "gradients", "gathered weights", "transients", "packing", "second copy",
    "checkpoint",
)  # fmt: skip
"""Kinds of tensor, in the order of tables."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a train step is expected to need, per device.

    Args:
        platform: text of it.
        plan: with its mesh settled.
        device: bytes of device memory by kind, at the moment that needs the most.
        host: bytes of host memory by kind.
        flop: of the products of forward and backward pass, recomputation included, all devices together.
        timeline: what is alive when, beside the arguments.
        arguments: the state and the batch, leaf by leaf.
        said: how the mesh was chosen and what the memory rule came to, a line each.
        compiled: the pieces of the step whose temporaries are the compiler's word.
        state_bytes: of the optimizer's state per parameter, over all devices.
        wire: what a device sends over the slow axis; `None` without one.
        kernels: which implementation of each kernel the traced program has.
    """

    platform: str
    plan: Plan
    device: Mapping[str, int]
    host: Mapping[str, int]
    flop: int
    timeline: Timeline = dataclasses.field(repr=False)
    arguments: tuple[Item, ...] = dataclasses.field(repr=False, default=())
    said: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    state_bytes: float = 0.0
    wire: Wire | None = None
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
        """Live bytes by kind, the arguments' too, from the first operation to the last; a loop's body once."""
        constant = _by_kind(self.arguments)
        return tuple(constant | moment.by_kind for moment in self.timeline.moments)

    @property
    def turn(self) -> int:
        """Number of the first moment of the backward pass."""
        found = self.timeline.moments
        return next((number for number, moment in enumerate(found) if moment.backward), len(found))

    @property
    def alive(self) -> tuple[Item, ...]:
        """What is alive at the peak, arguments among it, the biggest first."""
        return tuple(sorted((*self.arguments, *self.timeline.items), key=lambda item: -item.bytes))

    def __str__(self) -> str:
        lines = [f"{'':18}{'device':>12}{'host':>12}"]
        for kind in KINDS:
            device, host = self.device.get(kind, 0), self.host.get(kind, 0)
            if device or host:
                lines.append(f"{kind:18}{size(device) if device else '':>12}{size(host) if host else '':>12}")
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
    """Itemised bytes of an experiment's train step on a platform.

    Args:
        experiment: what to train.
        platform: where, such as "tpu v5e:4x4"; it need not be here.
        plan: how; the experiment's own by default.
        compile_block: compile the piece of the step that needs the most memory (the passes of one block, or the loss)
            for the platform, and take the compiler's word for its temporaries.
        make: makes the experiment anew in the process that compiles; needed where the experiment does not pickle.

    Raises:
        UserError: the plan does not fit the model, the batch or the platform; no compiler for `compile_block`.
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step = described_step(experiment, platform, plan)
    measure = None
    if compile_block:
        from jaxscale.planning.piece_compile import piece_bytes

        measure = partial(piece_bytes, make or partial(_same, experiment), platform, step.plan)
    return of_step(step, batch_shapes(experiment), platform, measure)


def of_step(step: TrainStep, batch: Any, platform: Platform, measure: Callable[[Piece], int] | None = None) -> Estimate:
    """The estimate of a step that is built.

    Args:
        step: on the platform's devices, or their description.
        batch: arrays or shapes of a global batch.
        platform: where.
        measure: says how many bytes of temporaries a piece of the step takes, by compiling it.

    Raises:
        UserError: the step has no pieces that could be measured.
    """
    traced = traced_step(step, batch, platform)
    program, placed = traced.program, traced.placed
    pieces: dict[Piece, int | None] = dict.fromkeys(pieces_of(program))
    if measure is not None and not pieces:
        raise UserError("compile-block: the blocks are in no loop; --verify compiles the whole step")
    found = timeline(program, placed, kinds_of, traced.compiler, pieces)
    while measure is not None and (piece := _fullest(found)) is not None and pieces[piece] is None:
        pieces[piece] = measure(piece)
        found = timeline(program, placed, kinds_of, traced.compiler, pieces)
    arguments, host = _arguments(traced, batch)
    device = _by_kind(arguments)
    for item in found.items:
        device[item.kind] = device.get(item.kind, 0) + item.bytes
    compiled = tuple(piece.name for piece, taken in pieces.items() if taken is not None)
    packing = round(found.bytes * (accuracy.factors(platform.chip.kind).packing - 1))
    if packing and not compiled:
        device["packing"] = packing
    there = _by_kind(host)
    if there:
        # XLA may hold what it reads and what it writes at once
        there["second copy"] = (COPY - 1) * sum(there.values())
    if kept := _kept_on_host(program, placed):
        there["kept activations"] = kept
    if platform.chip.kind != "cpu":
        # a checkpoint is copied to the host before it is written behind the run's back
        there["checkpoint"] = sum(item.bytes for item in (*arguments, *host) if item.kind != "batch")
    return Estimate(
        str(platform),
        step.plan,
        device,
        there,
        traced.flop,
        found,
        arguments,
        step.parts.lines,
        compiled,
        tree_bytes(step.layout.abstract.optimizer) / step.parameters,
        wire_of(step, platform),
        step.kernels,
    )


def _fullest(found: Timeline) -> Piece | None:
    """The piece of a step that needs the most memory."""
    return found.moments[found.peak].piece if found.moments else None


def _same(experiment: Experiment) -> Experiment:
    return experiment


def _by_kind(items: tuple[Item, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        found[item.kind] = found.get(item.kind, 0) + item.bytes
    return found


def _kept_on_host(program: Program, placed: Placements) -> int:
    """Bytes per device that loops stack in host memory for the backward pass, of one microbatch."""
    total = 0
    for at, operation in enumerate(program.operations):
        if operation.loop is None:
            continue
        total += sum(
            placed.bytes_of(program.shapes[value], placed.dims[value], host=True)
            for value in operation.outputs
            if value not in program.outputs
        )
        if both_passes(operation.loop):
            total += _kept_on_host(operation.loop, placed.loops[at])
    return total


def _arguments(traced: TracedStep, batch: Any) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The arguments on the device and those in host memory, by the names of their leaves."""
    device, host = [], []
    first = {"params": "parameters", "optimizer": "optimizer state", "extra/in_flight": "stash"}
    first |= {"extra/reduce": "residuals", "extra/outer": "outer state"}
    for value, (name, leaf) in zip(traced.program.inputs, traced.leaves, strict=False):
        root, _, rest = name.partition("/")
        if root == "extra":
            extra, _, rest = rest.partition("/")
            root = f"extra/{extra}"
        kind = first.get(root, "batch" if root in batch else "model state")
        item = Item(rest or name, kind, traced.placed.bytes_of(leaf, traced.placed.dims[value]))
        (host if getattr(leaf.sharding, "memory_kind", None) == "pinned_host" else device).append(item)
    return tuple(device), tuple(host)
