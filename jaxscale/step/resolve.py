"""resolve: settle the settings of a plan that need no trace of the model: mesh, codec of momenta, stages and unroll."""

import dataclasses
from collections.abc import Sequence

from jaxscale.compiler.options import check_options
from jaxscale.errors import UserError
from jaxscale.lowbit.products import RECIPES
from jaxscale.memory.apply import policy_of
from jaxscale.memory.plan import MemoryPlan
from jaxscale.model_traits import ModelTraits
from jaxscale.platforms.detect import chip_of
from jaxscale.recipe.combinations import check
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.requests import Facts
from jaxscale.replicas.codecs.one_bit import OneBit
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import Device, check_model, effective_rules
from jaxscale.state.stages import Stages, stages_of
from jaxscale.step.default_mesh import default_mesh, slice_count
from jaxscale.tpu_slices import slices_per_axis


@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A plan, settled for an experiment and its devices.

    Args:
        experiment: the experiment that is trained.
        plan: the plan, with its mesh settled.
        stages: the stages of the plan's pipeline; `None` without a pipeline.
        line: a line for the user that reports how the plan was settled.
    """

    experiment: Experiment
    plan: Plan
    stages: Stages | None
    line: str


def resolve(experiment: Experiment, plan: Plan, devices: Sequence[Device], note: str = "") -> ResolvedPlan:
    """Settle a plan for an experiment and its devices, and return it.

    Args:
        experiment: the experiment that is trained.
        plan: the plan, as the user wrote it.
        devices: the devices to run on.
        note: text for the user, shown if the mesh has several devices.

    Raises:
        UserError: the plan does not fit the model, the batch or the devices.
    """
    plan, line = resolve_mesh(plan, experiment, devices)
    experiment = with_scans(experiment)
    check_options(plan.compiler, devices[0])
    check(Facts(plan, experiment))  # refuses combinations of settings
    plan = with_momentum_codec(experiment, plan)
    stages = None
    if plan.pipeline is not None:
        stages = stages_of(experiment, plan)
        line += f"; {stages}"
    layer_count = ModelTraits.of(experiment.model).layers if stages is None else stages.depth
    if isinstance(layer_count, int) and plan.unroll > layer_count:
        owner_text = "the model" if stages is None else "a stage"
        line += f"; unroll {plan.unroll}: {owner_text} has {layer_count} layers, all run in one iteration"
        plan = dataclasses.replace(plan, unroll=layer_count)
    plan, unroll_note = settle_unroll(plan, devices[0].platform)
    assert plan.mesh is not None
    line += unroll_note + note * (plan.mesh.devices > 1)
    check_model(plan, experiment.model)
    if plan.memory.rule == "fit":
        raise UserError(
            "memory fit: got this rule in a step that is built directly, expected a settled rule; call jaxscale train "
            "or jaxscale.train, which settle the rule first"
        )
    return ResolvedPlan(experiment, plan, stages, line)


def with_scans(experiment: Experiment) -> Experiment:
    """Return the experiment; if its model is foreign and scans over blocks, the model lists the scan's parameters.

    If the module cannot be traced, the experiment is returned unchanged, and the trace of the step reports the error.
    """
    with_scans_method = getattr(experiment.model, "with_scans", None)
    if with_scans_method is None or experiment.data is None:
        return experiment
    try:
        model = with_scans_method(batch_shapes(experiment))
    except Exception:  # an error of the user's module, which the trace of the step reports with its line
        return experiment
    return experiment if model is experiment.model else dataclasses.replace(experiment, model=model)


def resolve_mesh(plan: Plan, experiment: Experiment, devices: Sequence[Device]) -> tuple[Plan, str]:
    """Settle the mesh of a plan, and return the plan and a line for the user that describes the choice.

    `default_mesh` chooses the mesh of a plan that has none. It splits rows over "fsdp" if the plan has a ZeRO stage,
    otherwise over "data". For a single device, the ZeRO stage becomes 0, so that the same plan runs on a laptop.

    Args:
        plan: the plan, as the user wrote it.
        experiment: the experiment, with the batch and the model.
        devices: devices that may be used.

    Raises:
        UserError: the batch cannot be split evenly, or the mesh takes more devices than there are.
    """
    batch_row_count = experiment.batch
    plan.kernels.check_platform(devices[0].platform)  # refuses kernels of other platforms
    if plan.pipeline is not None:
        rank_count, microbatch_count = plan.pipeline.shape()
        mesh = None if plan.mesh is None else dataclasses.replace(plan.mesh, pipe=rank_count)
        plan = dataclasses.replace(plan, mesh=mesh, microbatches=microbatch_count)
    if batch_row_count % plan.microbatches:
        raise UserError(
            f"batch {batch_row_count} cannot be split evenly into {plan.microbatches} microbatches: "
            f"choose a batch that is a multiple of {plan.microbatches}"
        )
    microbatch_row_count = batch_row_count // plan.microbatches
    if plan.mesh is None:
        mesh, reason = default_mesh(
            plan, microbatch_row_count, devices, lambda plan: _check_default_mesh(plan, experiment)
        )
        plural_ending = "s" if len(devices) > 1 else ""
        line = f"mesh {mesh}: {mesh.devices} of {len(devices)} {devices[0].device_kind} device{plural_ending}"
        line += f", {reason}" if reason else ""
        if plan.zero and mesh.fsdp == 1:
            line += f"; zero 0 instead of {plan.zero}, because there is one device along fsdp and nothing to shard"
            plan = dataclasses.replace(plan, zero=0)
        return dataclasses.replace(plan, mesh=mesh), line
    if plan.mesh.devices > len(devices):
        virtual_hint = ""
        if devices[0].platform == "cpu":
            virtual_hint = f", or have virtual ones by JAX_NUM_CPU_DEVICES={plan.mesh.devices} in the environment"
        raise UserError(
            f"mesh {plan.mesh} takes {plan.mesh.devices} devices, but there are {len(devices)} "
            f"({devices[0].device_kind}): ask for a smaller mesh{virtual_hint}"
        )
    shard_count = plan.mesh.batch_shards
    if microbatch_row_count % shard_count:
        raise UserError(
            f"batch {batch_row_count} in {plan.microbatches} microbatches has {microbatch_row_count} rows in each, but "
            f"mesh {plan.mesh} splits them {shard_count} ways: choose a batch that is a multiple of "
            f"{plan.microbatches * shard_count}"
        )
    line = f"mesh {plan.mesh}: {plan.mesh.devices} of {len(devices)} devices"
    slow_axes = _axes_across_slices(plan.mesh, slice_count(devices[: plan.mesh.devices]))
    for axis in slow_axes:
        line += f"; {axis} crosses the slow network between slices: consider an axis replica across them"
    return plan, line


def _check_default_mesh(plan: Plan, experiment: Experiment) -> None:
    """Refuse a default mesh with a tensor axis that the model or the plan does not allow.

    Raises:
        UserError: the tensor axis splits no dim of the model, or splits a dim unevenly, or another setting of the plan
            rules the mesh out.
    """
    rules = effective_rules(plan)
    if not any("tensor" in rules.axes(name) for name in experiment.model.logical_sizes() if name != "vocab"):
        raise UserError(f"mesh {plan.mesh}: no dim of this model is known to be split over tensor; use data or fsdp")
    check_model(plan, experiment.model)
    check(Facts(plan, experiment))


def _axes_across_slices(mesh: MeshSpec, tpu_slice_count: int) -> list[str]:
    """Return the axes that span several TPU slices, except those with few messages: replica, data and pipe.

    Example:
        >>> _axes_across_slices(MeshSpec(fsdp=32), 2), _axes_across_slices(MeshSpec(replica=2, fsdp=16), 2)
        (['fsdp'], [])
    """
    slice_counts = slices_per_axis(tuple(mesh.sizes.values()), tpu_slice_count) or (1,) * len(mesh.sizes)
    axes_with_few_messages = ("replica", "data", "pipe")
    return [
        axis
        for axis, count in zip(mesh.sizes, slice_counts, strict=True)
        if count > 1 and axis not in axes_with_few_messages
    ]


def with_momentum_codec(experiment: Experiment, plan: Plan) -> Plan:
    """Return the plan, with a codec of momenta if the optimizer requires that replicas send momenta (1-bit Adam, LAMB).

    Args:
        experiment: the experiment, with its optimizer and number of steps.
        plan: the plan, with its mesh settled.

    Raises:
        UserError: the run ends before momenta would be sent compressed.
    """
    messages, rule_name = experiment.optimizer.messages(experiment.steps), experiment.optimizer.name
    if messages is None:
        return plan
    assert plan.mesh is not None
    if messages.freeze >= experiment.steps:
        raise UserError(
            f"optimizer.freeze: {rule_name} would freeze its variance after {messages.freeze} updates, but the run has "
            f"{experiment.steps}, so nothing would be sent in few bits; freeze earlier (0.15 to 0.25 of the run), "
            f"or take {rule_name.removeprefix('one_bit_').replace('adam', 'adamw')}"
        )
    return dataclasses.replace(plan, reduce=OneBit(start=messages.freeze))


def needs_decision(plan: MemoryPlan) -> bool:
    """Return whether the rule of a memory plan needs a decision that depends on the model's blocks."""
    return plan.rule != "none" and policy_of(plan) is None


def settle_unroll(plan: Plan, platform: str) -> tuple[Plan, str]:
    """Return (plan, note for the user); the plan runs one layer per iteration if its memory rule requires that.

    A rule that depends on the blocks decides for one layer at a time. On a CPU, every rule but `none` requires one
    layer per iteration: such a loop uses the least memory there, and is no slower (the default experiment under `full`:
    21.4 MiB of temporaries in a loop, 23.1 without one).

    Args:
        plan: the plan, with its mesh settled.
        platform: kind of the devices: "cpu", "gpu" or "tpu".
    """
    if plan.unroll == 1 or plan.memory.rule == "none":
        return plan, ""
    if needs_decision(plan.memory):
        reason = "whose decision is for one layer at a time"
    elif platform == "cpu":
        reason = "because on a CPU a loop over single layers uses the least memory"
    else:
        return plan, ""
    note = f"; unroll 1 instead of {plan.unroll} under memory {plan.memory}, {reason}"
    return dataclasses.replace(plan, unroll=1), note


def describe_products(plan: Plan, device: Device) -> list[str]:
    """Return a line for the user if the device emulates the plan's matrix products; [] if the chip computes them."""
    recipe = RECIPES.get(plan.matmul)
    if recipe is None:
        return []
    chip = chip_of(device.device_kind, device.platform)
    if recipe.is_emulated:
        return [f"matmul {plan.matmul}: emulated in wider types by XLA, because no chip has all of these products"]
    if chip.peak(recipe.operands.dtype) is None:
        return [f"matmul {plan.matmul}: emulated in wider types by XLA, because {chip.name} has no such products"]
    return []
