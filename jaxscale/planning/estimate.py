"""Estimate: device and host bytes of a whole train step, itemised, from its traced program; nothing is compiled.

The step is traced for the platform's mesh as described, so it is the very program that would run: the plan's remat,
microbatches, chunked loss, precision and placements are in it. Arguments (state, batch) are exact; what lives within
the step is found by walking the program (`timeline.py`), times a factor for each kind of platform that was fitted to
compiled programs (`accuracy.json`, which `experiments/benchmarks/fit_accuracy.py --record` regenerates).

It leaves out what only a compiler knows: the order of independent operations, and how well buffers pack.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.costs.trace import jaxpr_flop
from jaxscale.planning import accuracy
from jaxscale.planning.flat import Program, flatten
from jaxscale.planning.kinds import both_passes, kinds_of
from jaxscale.planning.placements import Placements, dims_of, place
from jaxscale.planning.program import described_step
from jaxscale.planning.timeline import Compiler, Item, Timeline, timeline
from jaxscale.platforms.platform import Platform
from jaxscale.sharding.memory_space import COPY
from jaxscale.step.build import TrainStep
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.trees import path_name
from jaxscale.values.units import size

KINDS = (
    "parameters", "optimizer state", "model state", "batch", "compute copy", "kept activations", "loss", "gradients",
    "gathered weights", "transients", "packing", "second copy", "checkpoint",
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
    """

    platform: str
    plan: Plan
    device: Mapping[str, int]
    host: Mapping[str, int]
    flop: int
    timeline: Timeline = dataclasses.field(repr=False)
    arguments: tuple[Item, ...] = dataclasses.field(repr=False, default=())
    said: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, all kinds together."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device, all kinds together."""
        return sum(self.host.values())

    def __str__(self) -> str:
        lines = [f"{'':18}{'device':>12}{'host':>12}"]
        for kind in KINDS:
            device, host = self.device.get(kind, 0), self.host.get(kind, 0)
            if device or host:
                lines.append(f"{kind:18}{size(device) if device else '':>12}{size(host) if host else '':>12}")
        lines.append(f"{'total':18}{size(self.device_bytes):>12}{size(self.host_bytes):>12}")
        return "\n".join(lines)


def estimate(experiment: Experiment, platform: Platform | str, plan: Plan | None = None) -> Estimate:
    """Itemised bytes of an experiment's train step on a platform.

    Args:
        experiment: what to train.
        platform: where, such as "tpu v5e:4x4"; it need not be here.
        plan: how; the experiment's own by default.

    Raises:
        UserError: the plan does not fit the model, the batch or the platform.
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step = described_step(experiment, platform, plan)
    return of_step(step, batch_shapes(experiment), platform)


def of_step(step: TrainStep, batch: Any, platform: Platform) -> Estimate:
    """The estimate of a step that is built.

    Args:
        step: on the platform's devices, or their description.
        batch: arrays or shapes of a global batch.
        platform: where.
    """
    import jax

    shapes = step.abstract_batch(batch)
    state = step.layout.abstract
    traced = jax.make_jaxpr(step.step_fn)(state, shapes)
    program = flatten(traced)
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(shapes)]
    given = [dims_of(leaf.sharding, len(leaf.shape)) for leaf in leaves]
    for value, (path, _) in zip(program.inputs, _paths({"state": state, "batch": shapes}), strict=False):
        program.names[value] = path_name(path).removeprefix("params/")
    placed = place(program, given, step.mesh.shape, tiled=platform.chip.kind == "tpu")
    factors = accuracy.factors(platform.chip.kind)
    found = timeline(program, placed, kinds_of, _compiler(platform, step.plan, factors))
    arguments, host = _arguments(program, placed, {"state": state, "batch": shapes})
    device = _by_kind(arguments)
    for item in found.items:
        device[item.kind] = device.get(item.kind, 0) + item.bytes
    packing = round(found.bytes * (factors.packing - 1))
    if packing:
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
    return Estimate(str(platform), step.plan, device, there, jaxpr_flop(traced).total, found, arguments, step.said)


def _compiler(platform: Platform, plan: Plan, factors: accuracy.Factors) -> Compiler:
    """What the platform's compiler fuses into products, as its compiled programs show."""
    fuses: Literal["no", "all", "local"] = "no"
    if platform.chip.kind == "tpu":
        fuses = "local" if platform.topology is not None and len(platform.topology) == 2 else "all"
    return Compiler(fuses, plan.zero > 1, factors.gather)


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


def _paths(given: Any) -> list[Any]:
    """Paths and leaves of the state and the batch, in the order of a program's inputs."""
    import jax

    return [leaf for part in ("state", "batch") for leaf in jax.tree_util.tree_flatten_with_path(given[part])[0]]


def _arguments(program: Program, placed: Placements, given: Any) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The arguments on the device and those in host memory, by the names of their leaves."""
    device, host = [], []
    first = {"params": "parameters", "optimizer": "optimizer state"}
    for value, (path, leaf) in zip(program.inputs, _paths(given), strict=False):
        name = path_name(path)
        root, _, rest = name.partition("/")
        kind = first.get(root, "batch" if root in given["batch"] else "model state")
        item = Item(rest or name, kind, placed.bytes_of(leaf, placed.dims[value]))
        (host if getattr(leaf.sharding, "memory_kind", None) == "pinned_host" else device).append(item)
    return tuple(device), tuple(host)
