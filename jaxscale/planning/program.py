"""A train step for devices that need not be here: to trace and weigh, or to hand to their compiler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform
from jaxscale.step.build import TrainStep, build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.typing import Batch


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


def batch_shapes(experiment: Experiment) -> Batch:
    """Shapes of a global batch: as the data tells them, else of its first batch.

    Raises:
        UserError: the data cannot be opened.
    """
    import jax

    shapes: Callable[[int], Mapping[str, tuple[tuple[int, ...], str]]] | None
    shapes = getattr(experiment.data, "shapes", None)
    if shapes is not None:
        told = shapes(experiment.batch)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in told.items()}
    if experiment.data is None:
        raise UserError(f"experiment {experiment.name} has no data, so the shapes of its batches are unknown: give it")
    first = next(iter(experiment.data.open(experiment.batch, experiment.seed).train()))
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in first.items()}


def lowered_step(devices: Sequence[Any], make: Callable[[], Experiment], plan: Plan | None = None) -> Any:
    """The train step lowered for devices: with `functools.partial`, a recipe of `platforms.compile.compile_report`.

    Args:
        devices: of the platform.
        make: makes the experiment; it must pickle, as must `plan`.
        plan: how; the experiment's own by default.
    """
    experiment = make()
    step = build(experiment, plan, devices=devices)
    return step.step_fn.lower(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))


def compiled_bytes(experiment: Experiment, plan: Plan) -> int:
    """Bytes of device memory per device of the step compiled for the devices of this process."""
    found = build(experiment, plan).compile(batch_shapes(experiment))
    return found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
