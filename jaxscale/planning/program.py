"""A train step for devices that need not be here: to trace and weigh, or to hand to their compiler."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.platforms.described import abstract, lower_for, without_memories
from jaxscale.platforms.platform import Platform
from jaxscale.step.build import build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.step.train_step import TrainStep


def described_step(experiment: Experiment, platform: Platform, plan: Plan | None = None) -> TrainStep:
    """The train step on a platform's devices as they are described; it can be traced, and never run.

    Args:
        experiment: what to train.
        platform: where; its devices need not be here.
        plan: how; the experiment's own by default.

    Raises:
        UserError: the plan does not fit the model, the batch or the devices.
    """
    from jax.sharding import AbstractDevice

    device = AbstractDevice(platform.chip.device_kinds[0], None, platform.chip.kind)
    return build(experiment, plan, devices=[device] * platform.devices)


def lowered_step(devices: Sequence[Any], make: Callable[[], Experiment], plan: Plan | None = None) -> Any:
    """The train step lowered for devices: with `functools.partial`, a recipe of `platforms.compile.compile_report`.

    Args:
        devices: of the platform.
        make: makes the experiment; it must pickle, as must `plan`.
        plan: how; the experiment's own by default.

    Raises:
        UserError: the plan does not fit, or names a kernel that the step does not take.
    """
    experiment = make()
    on = [abstract(device) for device in devices] if without_memories(devices) else devices
    step = build(experiment, plan, devices=on)
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    step.check_kernels()
    return traced.lower() if on is devices else lower_for(devices[: step.devices], traced)


def compiled_bytes(experiment: Experiment, plan: Plan) -> int:
    """Bytes of device memory per device of the step compiled for the devices of this process."""
    found = build(experiment, plan).compile(batch_shapes(experiment))
    return found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
