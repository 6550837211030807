"""The program of a train step, traced for devices that need not be present, or lowered for a compiler."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from jaxscale.compiler.described import abstract_device, lacks_memories, lower_for
from jaxscale.compiler.gpu_target import hides_latency
from jaxscale.planning import accuracy
from jaxscale.planning.fusion import Compiler, has_rings
from jaxscale.platforms.compiler_options import NO_RINGS, WINDOWED_EINSUM_THRESHOLD
from jaxscale.platforms.platform import Platform
from jaxscale.programs.dims import placement_of
from jaxscale.programs.flat import FlatProgram, flatten
from jaxscale.programs.flop import jaxpr_flop
from jaxscale.programs.late import with_late_gradients
from jaxscale.programs.looped import with_looped_copies
from jaxscale.programs.placements import Placements, place
from jaxscale.programs.repeated import with_repeated_scores
from jaxscale.programs.retiled import with_retiled_pools, with_retiled_weights
from jaxscale.programs.rounded import with_entered_copies, with_rounded_copies
from jaxscale.programs.rounded_pools import with_rounded_pools
from jaxscale.programs.tiles import prescribed_tiles
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import path_name


def described_step(
    experiment: Experiment, platform: Platform, plan: Plan | None = None, device_count: int | None = None
) -> TrainStep:
    """Build the train step for a description of a platform's devices; the step can be traced, but not run.

    Args:
        experiment: the experiment to plan for.
        platform: platform to describe; its devices need not be present.
        plan: plan of the step; the experiment's plan by default.
        device_count: number of devices to run on; by default all devices of the platform.

    Raises:
        UserError: the plan is not valid for the model, the batch or the devices.
    """
    from jaxscale.compiler.described_device import DescribedDevice

    described_count = platform.devices if device_count is None else device_count
    slice_count = platform.slices if device_count is None else 1
    device_fields = (platform.chip.device_kinds[0], None, platform.chip.kind)
    described_devices = [
        DescribedDevice(*device_fields, index * slice_count // described_count) for index in range(described_count)
    ]
    return build(experiment, plan, devices=described_devices)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced train step.

    Args:
        program: flat program of the step; its inputs are the leaves of the state, then those of the batch.
        placements: placements of the program's values.
        compiler: properties of the platform's compiler.
        paths_and_leaves: for each input of the program, its path and its abstract value.
        flop: FLOP of the step's matrix products, summed over all devices.
    """

    program: FlatProgram
    placements: Placements
    compiler: Compiler
    paths_and_leaves: tuple[tuple[str, Any], ...]
    flop: int


def traced_step(step: TrainStep, batch: Any, platform: Platform) -> TracedStep:
    """Trace a train step; nothing is compiled.

    Args:
        step: the train step, built for the platform's devices or for a description of them.
        batch: arrays or shapes of a global batch.
        platform: platform that the step would run on.

    Raises:
        UserError: the plan names a kernel that the step does not use.
    """
    import jax

    arguments = (step.layout.abstract, step.abstract_batch(batch))
    jaxpr = step.step_fn.trace(*arguments).jaxpr
    step.check_kernels()
    program = flatten(jaxpr)
    if platform.chip.kind == "gpu":
        program = with_late_gradients(program, in_layers=True) if hides_latency(platform.chip) else program
    elif platform.chip.kind == "tpu":
        if step.plan.zero in (1, 2):
            program = with_entered_copies(with_looped_copies(program))
        elif step.plan.zero == 0:
            program = with_entered_copies(with_rounded_copies(program), "bfloat16")
        retiles_weights = platform.chip.name == "7x"
        program = with_retiled_pools(with_rounded_pools(program), retiles_weights=retiles_weights)
        program = with_retiled_weights(program) if retiles_weights else program
        program = with_repeated_scores(program) if platform.chip.name == "v6e" else program
        if _has_ring_gradients(step, platform):
            program = with_late_gradients(program)
        elif _is_flat(platform) and step.plan.memory.rule in ("none", "dots"):
            program = with_late_gradients(program, product_kinds=("dot_general",))
    keys_and_leaves = [
        keys_and_leaf for tree in arguments for keys_and_leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    paths_and_leaves = tuple((path_name(keys), leaf) for keys, leaf in keys_and_leaves)
    for value, (path, _) in zip(program.inputs, paths_and_leaves, strict=False):
        program.names[value] = path.removeprefix("params/")
    input_placements = [placement_of(leaf.sharding, len(leaf.shape)) for _, leaf in paths_and_leaves]
    tiles = prescribed_tiles(program) if platform.chip.kind == "tpu" else None
    placements = place(program, input_placements, step.mesh.shape, tiles=tiles)
    return TracedStep(program, placements, _compiler(platform, step.plan), paths_and_leaves, jaxpr_flop(jaxpr).total)


def _has_ring_gradients(step: TrainStep, platform: Platform) -> bool:
    """Return whether XLA:TPU sums gradients of blocks outside loops around a ring, once in a step."""
    plan = step.plan
    is_around_ring = _has_ring_products(platform, plan) and has_rings(step.mesh.shape)
    return is_around_ring and plan.zero > 1 and plan.microbatches == 1


def _has_ring_products(platform: Platform, plan: Plan) -> bool:
    """Return whether XLA may compute products around a ring: on a TPU slice with a two-dimensional topology."""
    threshold = plan.compiler.of(platform.chip).get(WINDOWED_EINSUM_THRESHOLD, 0)
    return _is_flat(platform) and int(threshold) < NO_RINGS


def _is_flat(platform: Platform) -> bool:
    """Return whether the platform is a TPU slice with a two-dimensional topology."""
    return platform.chip.kind == "tpu" and platform.topology is not None and len(platform.topology) == 2


def _compiler(platform: Platform, plan: Plan) -> Compiler:
    """Return the properties of a platform's compiler under a plan, as observed in compiled programs."""
    product_fusion: Literal["no", "all", "local"] = "no"
    if platform.chip.kind == "tpu":
        product_fusion = "local" if _has_ring_products(platform, plan) else "all"
    return Compiler(
        product_fusion,
        has_scattered_gradients=plan.zero > 1,
        has_whole_gradients=plan.zero == 0,
        gathered_share=accuracy.factors(platform.chip).gather,
        rounds_operands=platform.chip.kind == "tpu",
        adds_in_place=platform.chip.kind != "cpu",
        stores_split_operands=platform.chip.name == "7x",
        stores_gathered_expressions=platform.chip.name == "v5e",
        stores_exponentials=platform.chip.name in ("v4", "v5p"),
        zeroes_stacks_early=platform.chip.kind == "gpu" and hides_latency(platform.chip),
    )


def lowered_step(devices: Sequence[Any], make: Callable[[], Experiment], plan: Plan | None = None) -> Any:
    """Lower the train step for the given devices. `step_recipe` binds all arguments except `devices`.

    Args:
        devices: devices of the platform.
        make: function that returns the experiment; it must be picklable.
        plan: plan of the step; the experiment's plan by default.

    Returns:
        The lowered step, as `jax.jit(...).lower` returns it.

    Raises:
        UserError: the plan is not valid, or it names a kernel that the step does not use.
    """
    experiment = make()
    step_devices = [abstract_device(device) for device in devices] if lacks_memories(devices) else devices
    step = build(experiment, plan, devices=step_devices)
    trace = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    step.check_kernels()
    return trace.lower() if step_devices is devices else lower_for(devices[: step.devices], trace)


def step_recipe(experiment: Experiment, plan: Plan, make: Callable[[], Experiment] | None) -> partial[Any]:
    """Return the function that `compile_report` calls to lower a train step for devices.

    Args:
        experiment: the experiment to plan for.
        plan: plan of the step.
        make: function that returns the experiment, called in the process that compiles; `None` if the experiment
            is picklable.
    """
    return partial(lowered_step, make=make or partial(dataclasses.replace, experiment), plan=plan)


def compiled_bytes(experiment: Experiment, plan: Plan) -> int:
    """Compile the step for the devices of this process, and return its bytes of device memory per device."""
    step = build(experiment, plan).compile(batch_shapes(experiment))
    return step.argument_bytes + step.output_bytes - step.alias_bytes + step.temp_bytes
