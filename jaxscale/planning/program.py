"""A train step for devices that need not be present: to trace and estimate, or to compile."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.compiler.described import abstract, lower_for, without_memories
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep


def described_step(experiment: Experiment, platform: Platform, plan: Plan | None = None) -> TrainStep:
    """The train step on a description of a platform's devices; it can be traced, but not run.

    Args:
        experiment: what to train.
        platform: its devices need not be present.
        plan: the experiment's plan by default.

    Raises:
        UserError: the plan does not suit the model, the batch or the devices.
    """
    from jax.sharding import AbstractDevice

    device = AbstractDevice(platform.chip.device_kinds[0], None, platform.chip.kind)
    return build(experiment, plan, devices=[device] * platform.devices)


def lowered_step(devices: Sequence[Any], make: Callable[[], Experiment], plan: Plan | None = None) -> Any:
    """The train step lowered for devices: with `functools.partial`, a recipe of `platforms.compile.compile_report`.

    Args:
        devices: of the platform.
        make: makes the experiment; it must pickle, as must `plan`.
        plan: the experiment's plan by default.

    Raises:
        UserError: the plan is not valid, or names a kernel that the step does not use.
    """
    experiment = make()
    step_devices = [abstract(device) for device in devices] if without_memories(devices) else devices
    step = build(experiment, plan, devices=step_devices)
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    step.check_kernels()
    return traced.lower() if step_devices is devices else lower_for(devices[: step.devices], traced)


def compiled_bytes(experiment: Experiment, plan: Plan) -> int:
    """Bytes of device memory per device of the step compiled for the devices of this process."""
    compiled = build(experiment, plan).compile(batch_shapes(experiment))
    return compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes
