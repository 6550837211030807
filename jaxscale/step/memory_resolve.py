"""The decision of a plan's memory rule for one step: what each of the model's blocks keeps for its backward pass.

The rules `none`, `dots`, `full` and `jax:POLICY` specify this without a look at the blocks. For every other rule the
blocks are traced first: their values, bytes per device and microbatch, FLOP, and seconds if the chip's rates are known.
"""

import dataclasses
from collections.abc import Sequence

import jax

from jaxscale.blocks import Treatment
from jaxscale.compat import runs_recomputation_early
from jaxscale.errors import UserError
from jaxscale.memory.apply import treatment_for, wrapper
from jaxscale.memory.decide import decide, kinds_of
from jaxscale.memory.decision import Decision, read_decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.platforms.detect import chip_of
from jaxscale.platforms.platform import Chip, chips
from jaxscale.programs.collect import BlockCall, collect
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import Device
from jaxscale.step.gradients import Objective
from jaxscale.values.units import rate, size

REHEARSED = "v5e"
"""The chip for which offload is planned on a CPU. There it is a rehearsal that moves nothing: all memory is the host's.
"""


_OF_SEGMENTS = ("sqrt", "periodic", "revolve", "chain")
"""Rules that recompute segments of several blocks."""


def decide_memory(objective: Objective, devices: Sequence[Device]) -> Decision:
    """The decision of the plan's memory rule, for the blocks as the step will call them.

    Args:
        objective: the objective of the step, built without a treatment of its blocks.
        devices: the devices of the step.

    Raises:
        UserError: the rule does not fit the model, or its budget is below the least possible.
    """
    decision, plan = _decided(objective, devices), objective.planned.plan
    segments = decision.chain is not None or (decision.stack is not None and decision.stack.segment is not None)
    if plan.offload.weights == "host" and segments:
        raise UserError(
            f"memory {plan.memory} with offload.weights host: segments of several blocks are cut out of the stacked "
            "weights, which would bring all of them to the device at once; take none, dots, full, or save:BYTES with "
            "at least the bytes of the blocks' inputs"
        )
    if decision.host_bytes and plan.asynchronous and plan.stages_keep == "residuals":
        raise UserError(
            f"memory {plan.memory} with pipeline {plan.pipeline}: this pipeline keeps activations from step to step, "
            "which must stay on the device; add the option stash=input to the pipeline, so that a stage offloads "
            "within its backward pass, or take a synchronous pipeline"
        )
    return decision


def _decided(objective: Objective, devices: Sequence[Device]) -> Decision:
    """The decision of the plan's memory rule, without a check against the rest of the plan."""
    plan = objective.planned.plan.memory
    foreign = getattr(objective.planned.experiment.model, "foreign", False)
    if plan.rule == "file":
        decision, calls = read_decision(plan.name), traced_blocks(objective)
        layers, blocks = sum(call.count for call in calls), tuple(kinds_of(calls))
        if layers != decision.layers:
            raise UserError(
                f"memory {plan}: the file was made for {decision.layers} blocks, but this model has {layers}; make a "
                "file for this model"
            )
        if decision.blocks and blocks != decision.blocks:
            raise UserError(
                f"memory {plan}: the file was made for block {', '.join(decision.blocks)}, but this model has "
                f"{', '.join(blocks)} (another model, another version of it, or other shapes); make a new file for "
                "this model"
            )
        if foreign and decision.chain is not None:
            raise _no_segments(plan)
        return decision
    if foreign and plan.rule in _OF_SEGMENTS:
        raise _no_segments(plan)
    chip = chip_of(devices[0].device_kind, devices[0].platform)
    if plan.rule == "offload" and chip.kind == "cpu":
        chip = chips()[REHEARSED]
    calls, stages = traced_blocks(objective, chip), objective.stages_here
    if stages == 1 or plan.budget is None:
        return decide(plan, calls, chip)
    # the budget is for all blocks on a device, whose stages are alike; if each stage is recomputed in its backward
    # pass, only one stage at a time keeps anything
    keeping_stages = stages if objective.planned.plan.stages_keep == "residuals" else 1
    of_stage = decide(dataclasses.replace(plan, budget=plan.budget // keeping_stages), calls, chip)
    device_bytes, on_host = keeping_stages * of_stage.bytes, keeping_stages * of_stage.host_bytes
    return dataclasses.replace(of_stage, plan=plan, bytes=device_bytes, host_bytes=on_host, flop=stages * of_stage.flop)


def _no_segments(plan: MemoryPlan) -> UserError:
    """The error for a rule of segments on a model that is not built of our layers."""
    return UserError(
        f"memory {plan}: this rule recomputes segments of several blocks, and this model's own code calls its blocks "
        "one by one, possibly with other code between them; take save:BYTES, dots or full, which treat each block by "
        "itself, or build the model of layers.Stack or layers.Chain"
    )


def traced_blocks(objective: Objective, chip: Chip | None = None) -> tuple[BlockCall, ...]:
    """The blocks of the model, or of a pipeline's stage, as one microbatch of a train step calls them.

    Args:
        objective: the objective of the step.
        chip: the chip whose rates give the seconds of their operations; `None` leaves the seconds out.
    """
    microbatches = objective.planned.plan.microbatches
    batch = {
        name: jax.ShapeDtypeStruct((array.shape[0] // microbatches, *array.shape[1:]), array.dtype)
        for name, array in batch_shapes(objective.planned.experiment).items()
    }
    pure_model, row_count = objective.planned.pure_model, next(iter(batch.values())).shape[0]
    # arguments rather than constants, so that a block is traced as in the step
    key, examples = jax.eval_shape(lambda: (jax.random.key(0), jax.numpy.arange(row_count, dtype="int32")))
    with objective.planned.tracing(is_forward_only=True):
        calls = collect(objective.loss_of_masters, pure_model.whole, pure_model.rest, batch, key, examples, chip=chip)
    depth = objective.stage_depth
    return calls if depth is None else tuple(dataclasses.replace(call, count=depth) for call in calls)


def treatment_of(plan: Plan, decision: Decision | None, platform: str) -> Treatment:
    """How the blocks of a model run under a plan.

    Args:
        plan: the plan, with its memory rule and number of unrolled layers.
        decision: what the blocks keep; `None` if the memory rule does not depend on them.
        platform: kind of the devices: "cpu", "gpu" or "tpu".
    """
    if decision is None:
        treatment = Treatment(wrapper(plan.memory), unroll=plan.unroll)
    else:
        treatment = treatment_for(decision, unroll=plan.unroll)
    return dataclasses.replace(treatment, is_held_back=platform == "cpu" and runs_recomputation_early())


def layers_of_groups(decision: Decision | None) -> tuple[int, ...]:
    """Number of layers in each group of layers that a decision treats alike; () if the stack is one group."""
    stack = None if decision is None else decision.stack
    return () if stack is None or len(stack.groups) == 1 else tuple(group.layers for group in stack.groups)


def describe_decision(decision: Decision, platform: str = "tpu") -> str:
    """A decision in one line.

    Args:
        decision: what the blocks keep.
        platform: kind of the devices: "cpu", "gpu" or "tpu".

    Example:
        >>> describe_decision(Decision(MemoryPlan.parse("save:1MiB"), layers=4, bytes=900_000, flop=2_000_000))
        'memory save:1MiB: 879 KiB kept per device and microbatch, 220 KiB a block, 2.00 MFLOP recomputed'
    """
    rehearsal = ""
    if platform == "cpu" and decision.plan.rule == "offload":
        rehearsal = f" (a rehearsal: planned as for a {REHEARSED}; a CPU has no memory beside the host's)"
    hosted = f", {size(decision.host_bytes)} on the host" if decision.host_bytes else ""
    kept = f"{size(decision.bytes)} kept per device and microbatch"
    kept += f", {size(decision.bytes_of_a_block)} a block" if decision.layers else ""
    return f"memory {decision.plan}: {kept}{hosted}, {rate(decision.flop, 'FLOP')} recomputed{rehearsal}"
