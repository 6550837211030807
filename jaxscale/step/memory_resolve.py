"""What a plan's memory rule comes to for one step: the model's blocks are traced, and each gets its decision.

`none`, `dots`, `full` and `jax:POLICY` say by themselves what a block keeps. Every other rule needs the blocks first:
their values, bytes per device and microbatch, FLOP, and seconds where the chip's rates are known.
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
"""On a CPU, which has no memory beside the host's, offload is a rehearsal: planned as for this chip, moving nothing."""


_OF_SEGMENTS = ("sqrt", "periodic", "revolve", "chain")
"""Rules that run segments of several blocks again."""


def decide_memory(objective: Objective, devices: Sequence[Device]) -> Decision:
    """What the plan's memory rule comes to, for the blocks as the step will call them.

    Args:
        objective: of the step, built without a memory plan.
        devices: that the step is for.

    Raises:
        UserError: the rule does not fit the model, or its budget is below the least possible.
    """
    decision, plan = _decided(objective, devices), objective.planned.plan
    segments = decision.chain is not None or (decision.stack is not None and decision.stack.segment is not None)
    if plan.offload.weights == "host" and segments:
        raise UserError(
            f"memory {plan.memory} with offload.weights host: segments of several blocks are cut out of the stacked "
            "weights, and all of them would come to the device at once; take save:BYTES of at least the blocks' "
            "inputs, none, dots or full"
        )
    if decision.host_bytes and plan.asynchronous and plan.stages_keep == "residuals":  # the rule has a row of its own
        raise UserError(
            f"memory {plan.memory} with pipeline {plan.pipeline}: what its stages keep is in flight from step to step, "
            "and lies on the device; add the option stash=input, with which a stage offloads within its backward, or "
            "take a synchronous pipeline"
        )
    return decision


def _decided(objective: Objective, devices: Sequence[Device]) -> Decision:
    plan = objective.planned.plan.memory
    foreign = getattr(objective.planned.experiment.model, "foreign", False)
    if plan.rule == "file":
        decision, calls = read_decision(plan.name), traced_blocks(objective)
        layers, blocks = sum(call.count for call in calls), tuple(kinds_of(calls))
        if layers != decision.layers:
            raise UserError(
                f"memory {plan}: it was made for {decision.layers} blocks, and this model has {layers}; make it again"
            )
        if decision.blocks and blocks != decision.blocks:
            raise UserError(
                f"memory {plan}: it was made for block {', '.join(decision.blocks)}, and this model has "
                f"{', '.join(blocks)}: another model, another version of it, or other shapes; make it again"
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
    # the budget is that of all blocks on a device; its stages are alike, and keep something one at a time where each
    # runs again in its backward
    held = stages if objective.planned.plan.stages_keep == "residuals" else 1
    one = decide(dataclasses.replace(plan, budget=plan.budget // held), calls, chip)
    total = {"bytes": held * one.bytes, "host_bytes": held * one.host_bytes, "flop": stages * one.flop}
    return dataclasses.replace(one, plan=plan, **total)


def _no_segments(plan: MemoryPlan) -> UserError:
    return UserError(
        f"memory {plan}: it runs segments of several blocks again as one, and this model's own code calls its blocks "
        "one by one, with anything between them; take save:BYTES, dots or full, which treat each block by itself, or "
        "build the model of layers.Stack or layers.Chain"
    )


def traced_blocks(objective: Objective, chip: Chip | None = None) -> tuple[BlockCall, ...]:
    """The blocks of the model, or of a pipeline's stage, as one microbatch of a train step calls them.

    Args:
        objective: of the step.
        chip: for the seconds of their operations.
    """
    parts = objective.planned.plan.microbatches
    batch = {
        name: jax.ShapeDtypeStruct((rows.shape[0] // parts, *rows.shape[1:]), rows.dtype)
        for name, rows in batch_shapes(objective.planned.experiment).items()
    }
    pure_model, rows = objective.planned.pure_model, next(iter(batch.values())).shape[0]
    # arguments and not constants: a block meets them as in the step
    key, examples = jax.eval_shape(lambda: (jax.random.key(0), jax.numpy.arange(rows, dtype="int32")))
    with objective.planned.tracing(plainly=True):
        calls = collect(objective.loss_of_masters, pure_model.whole, pure_model.rest, batch, key, examples, chip=chip)
    depth = objective.stage_depth
    return calls if depth is None else tuple(dataclasses.replace(call, count=depth) for call in calls)


def treatment_of(plan: Plan, decision: Decision | None, platform: str) -> Treatment:
    """How the blocks of a model run under a plan.

    Args:
        plan: whose memory rule and unrolling is asked for.
        decision: what the rule comes to; `None` for one that says it by itself.
        platform: kind of the devices.
    """
    if decision is None:
        treatment = Treatment(wrapper(plan.memory), unroll=plan.unroll)
    else:
        treatment = treatment_for(decision, unroll=plan.unroll)
    return dataclasses.replace(treatment, held=platform == "cpu" and runs_recomputation_early())


def layers_of_groups(decision: Decision | None) -> tuple[int, ...]:
    """Layers that each group of the model's stack has under a decision; () for one group."""
    stack = None if decision is None else decision.stack
    return () if stack is None or len(stack.groups) == 1 else tuple(group.layers for group in stack.groups)


def describe_decision(decision: Decision, platform: str = "tpu") -> str:
    """A decision in one line.

    Args:
        decision: what the blocks keep.
        platform: kind of the devices.

    Example:
        >>> describe_decision(Decision(MemoryPlan.parse("save:1MiB"), layers=4, bytes=900_000, flop=2_000_000))
        'memory save:1MiB: 879 KiB kept per device and microbatch, 220 KiB a block, 2.00 MFLOP recomputed'
    """
    rehearsed = platform == "cpu" and decision.plan.rule == "offload"
    rehearsal = (
        f" (a rehearsal: planned as for a {REHEARSED}; a CPU has no memory beside the host's)" if rehearsed else ""
    )
    hosted = f", {size(decision.host_bytes)} on the host" if decision.host_bytes else ""
    kept = f"{size(decision.bytes)} kept per device and microbatch"
    kept += f", {size(decision.bytes_of_a_block)} a block" if decision.layers else ""
    return f"memory {decision.plan}: {kept}{hosted}, {rate(decision.flop, 'FLOP')} recomputed{rehearsal}"
