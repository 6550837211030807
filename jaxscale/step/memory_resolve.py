"""The decision of a plan's memory rule for one step: the values that each block keeps for its backward pass.

The rules `none`, `dots`, `full` and `jax:POLICY` need no trace of the blocks. Every other rule decides from a trace,
which shows the blocks' values, their bytes per device and microbatch, their FLOP and, on a known chip, their modeled
times.
"""

import dataclasses
from collections.abc import Sequence

import jax

from jaxscale.blocks import Treatment
from jaxscale.compat import runs_recomputation_early
from jaxscale.errors import UserError
from jaxscale.memory.apply import treatment_for, wrapper
from jaxscale.memory.decide import decide, graphs_by_kind
from jaxscale.memory.decision import Decision, read_decision
from jaxscale.model_traits import ModelTraits
from jaxscale.platforms.detect import chip_of
from jaxscale.platforms.platform import Chip, chips
from jaxscale.programs.collect import BlockCall, collect
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import Device
from jaxscale.step.gradients import Objective
from jaxscale.values.units import rate, size

REHEARSAL_CHIP = "v5e"
"""The chip for which offload is planned on a CPU, where all memory is the host's and offload moves nothing."""

SEGMENT_RULES = ("sqrt", "periodic", "revolve", "chain")
"""Rules that recompute segments of several blocks."""


def decide_memory(objective: Objective, devices: Sequence[Device]) -> Decision:
    """Return the decision of the plan's memory rule for the blocks, traced as the step will call them.

    Args:
        objective: the objective of the step, built without a treatment of its blocks.
        devices: the devices of the step.

    Raises:
        UserError: the rule does not fit the model, or the rule's budget is below the smallest possible budget.
    """
    decision, plan = _decide_unchecked(objective, devices), objective.planned.plan
    has_segments = decision.chain is not None or (decision.stack is not None and decision.stack.segment is not None)
    if plan.offload.weights == "host" and has_segments:
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


def _decide_unchecked(objective: Objective, devices: Sequence[Device]) -> Decision:
    """Return the decision of the plan's memory rule, without a check against the other settings of the plan."""
    memory_plan = objective.planned.plan.memory
    if memory_plan.rule == "file":
        decision = read_decision(memory_plan.name)
        calls = traced_blocks(objective, is_sequence=is_foreign_list(objective) and decision.chain is not None)
        block_count, block_kinds = sum(call.count for call in calls), tuple(graphs_by_kind(calls))
        if block_count != decision.layers:
            raise UserError(
                f"memory {memory_plan}: the file was made for {decision.layers} blocks, but this model has "
                f"{block_count}; make a file for this model"
            )
        if decision.blocks and block_kinds != decision.blocks:
            raise UserError(
                f"memory {memory_plan}: the file was made for block {', '.join(decision.blocks)}, but this model has "
                f"{', '.join(block_kinds)} (another model, another version of it, or other shapes); make a new file "
                "for this model"
            )
        return decision
    chip = chip_of(devices[0].device_kind, devices[0].platform)
    if memory_plan.rule == "offload" and chip.kind == "cpu":
        chip = chips()[REHEARSAL_CHIP]
    is_sequence = is_foreign_list(objective) and memory_plan.rule in SEGMENT_RULES
    calls = traced_blocks(objective, chip, is_sequence=is_sequence)
    stage_count = objective.stages_per_device
    if stage_count == 1 or memory_plan.budget is None:
        return decide(memory_plan, calls, chip)
    # the budget is for all blocks on a device, whose stages are alike; if each stage is recomputed in its backward
    # pass, only one stage at a time keeps values
    keeping_stage_count = stage_count if objective.planned.plan.stages_keep == "residuals" else 1
    stage_memory_plan = dataclasses.replace(memory_plan, budget=memory_plan.budget // keeping_stage_count)
    stage_decision = decide(stage_memory_plan, calls, chip)
    return dataclasses.replace(
        stage_decision,
        plan=memory_plan,
        bytes=keeping_stage_count * stage_decision.bytes,
        host_bytes=keeping_stage_count * stage_decision.host_bytes,
        flop=stage_count * stage_decision.flop,
    )


def is_foreign_list(objective: Objective) -> bool:
    """Return whether the blocks are a list in a foreign model, rather than a scan.

    A list is cut into segments between its blocks.
    """
    model = objective.planned.experiment.model
    return ModelTraits.of(model).foreign and not getattr(model, "scanned", ())


def traced_blocks(
    objective: Objective, chip: Chip | None = None, *, is_sequence: bool = False
) -> tuple[BlockCall, ...]:
    """Return the calls of the model's blocks, or of the blocks of one stage, in one microbatch of a train step.

    Args:
        objective: the objective of the step.
        chip: the chip whose rates give the modeled times of operations; `None` leaves the times out.
        is_sequence: whether the blocks will run as one sequence; a foreign model is then divided at its blocks.
    """
    microbatch_count = objective.planned.plan.microbatches
    abstract_microbatch = {
        name: jax.ShapeDtypeStruct((leaf.shape[0] // microbatch_count, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch_shapes(objective.planned.experiment).items()
    }
    pure_model, row_count = objective.planned.pure_model, next(iter(abstract_microbatch.values())).shape[0]
    # key and indices are arguments rather than constants, so that a block is traced as in the step
    abstract_key_and_indices = jax.eval_shape(lambda: (jax.random.key(0), jax.numpy.arange(row_count, dtype="int32")))
    with objective.planned.tracing(is_forward_only=True):
        calls = collect(
            objective.loss_of_masters,
            pure_model.abstract_module_params,
            pure_model.abstract_model_state,
            abstract_microbatch,
            *abstract_key_and_indices,
            chip=chip,
            is_sequence=is_sequence,
        )
    depth = objective.stage_depth
    return calls if depth is None else tuple(dataclasses.replace(call, count=depth) for call in calls)


def treatment_of(plan: Plan, decision: Decision | None, platform: str) -> Treatment:
    """Return how the blocks of a model run under a plan.

    Args:
        plan: the plan, with its memory rule and number of unrolled layers.
        decision: the values that the blocks keep; `None` if the memory rule does not depend on the blocks.
        platform: kind of the devices: "cpu", "gpu" or "tpu".
    """
    if decision is None:
        treatment = Treatment(wrapper(plan.memory), unroll=plan.unroll)
    else:
        treatment = treatment_for(decision, unroll=plan.unroll)
    return dataclasses.replace(treatment, is_held_back=platform == "cpu" and runs_recomputation_early())


def depths_of_groups(decision: Decision | None) -> tuple[int, ...]:
    """Return the number of layers in each group that a decision treats alike; () if the stack is one group."""
    stack = None if decision is None else decision.stack
    return () if stack is None or len(stack.groups) == 1 else tuple(group.layers for group in stack.groups)


def describe_decision(decision: Decision, platform: str = "tpu") -> str:
    """Return a line for the user that describes a decision.

    Args:
        decision: the values that the blocks keep.
        platform: kind of the devices: "cpu", "gpu" or "tpu".

    Example:
        >>> from jaxscale.memory.plan import MemoryPlan
        >>> describe_decision(Decision(MemoryPlan.parse("save:1MiB"), layers=4, bytes=900_000, flop=2_000_000))
        'memory save:1MiB: 879 KiB kept per device and microbatch, 220 KiB a block, 2.00 MFLOP recomputed'
    """
    rehearsal_text = ""
    if platform == "cpu" and decision.plan.rule == "offload":
        rehearsal_text = f" (a rehearsal: planned as for a {REHEARSAL_CHIP}; a CPU has no memory besides the host's)"
    host_text = f", {size(decision.host_bytes)} on the host" if decision.host_bytes else ""
    device_text = f"{size(decision.bytes)} kept per device and microbatch"
    device_text += f", {size(decision.bytes_of_a_block)} a block" if decision.layers else ""
    flop_text = f"{rate(decision.flop, 'FLOP')} recomputed"
    return f"memory {decision.plan}: {device_text}{host_text}, {flop_text}{rehearsal_text}"
