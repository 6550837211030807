"""The collectives of a pipeline's train step in closed form: messages between stages, weights and gradients.

    shared weights   those outside of blocks are split over the pipe axis between steps; they are gathered once, and
                     their float32 gradients are scattered once
    blocks           their float32 gradients are summed over microbatches, and reduced once; under ZeRO 3, each pass of
                     a microbatch gathers weights and scatters gradients
    sequence         gradients are summed over this axis in each microbatch, in the type of the passes
    messages         all ranks exchange messages at the end of each tick in which any rank has one to send

The executor and the loop over ticks are those of `step/pipelined/`.
"""

import functools
from collections.abc import Iterator

from jaxscale.pipeline.action import Kind
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.ticks import ticks
from jaxscale.planning.search.transfer import PassName, StepTraffic, Transfer


def pipelined_weight_gathers(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gathers of weights in a pipelined step."""
    sizes, element_bytes = step.sizes, step.element_bytes
    shared_bytes = element_bytes * sizes.other_weights
    axes = ("pipe", "fsdp") if step.zero else ("pipe",)
    yield Transfer("all-gather", axes, shared_bytes, 1, "weights", "update")
    if step.zero == 3:
        layer_bytes = element_bytes * step.layer_elements
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.run_count, "weights", "forward")
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.run_count, "weights", "backward")
    elif step.zero:
        yield Transfer("all-gather", ("fsdp",), element_bytes * sizes.block_weights, 1, "weights", "update")


def pipelined_gradient_reductions(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gradient reductions of a pipelined step."""
    sizes, mesh, microbatch_count = step.sizes, step.mesh, step.microbatch_count
    block_bytes, shared_bytes = 4 * sizes.block_weights, 4 * sizes.other_weights
    other_axes = tuple(axis for axis in step.other_axes if axis != "sequence")
    # the compiler handles the sequence axis, and sums over it in every backward pass
    nbytes = step.gradient_element_bytes * step.layer_elements
    yield Transfer("all-reduce", ("sequence",), nbytes, step.run_count, "gradients", "backward")
    nbytes = step.gradient_element_bytes * sizes.other_weights
    yield Transfer("all-reduce", ("sequence",), nbytes, microbatch_count, "gradients", "backward")
    if step.zero >= 2:
        if step.zero == 3:
            layer_bytes = step.gradient_element_bytes * step.layer_elements
            yield Transfer("reduce-scatter", ("fsdp",), layer_bytes, step.run_count, "gradients", "backward")
        else:
            yield Transfer("reduce-scatter", ("fsdp",), block_bytes, 1, "gradients", "update")
        yield Transfer("reduce-scatter", ("pipe",), shared_bytes, 1, "gradients", "update")
        yield Transfer("reduce-scatter", ("fsdp",), shared_bytes / mesh.pipe, 1, "gradients", "update")
        nbytes = (block_bytes + shared_bytes / mesh.pipe) / mesh.fsdp
        yield Transfer("all-reduce", other_axes, nbytes, 1, "gradients", "update")
    else:
        yield Transfer("reduce-scatter", ("pipe",), shared_bytes, 1, "gradients", "update")
        nbytes = block_bytes + shared_bytes / mesh.pipe
        yield Transfer("all-reduce", (*other_axes, "fsdp"), nbytes, 1, "gradients", "update")


def stage_messages(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the messages between stages: activations in one direction of the ring, gradients in the other."""
    assert step.plan.pipeline is not None
    split_count = step.mesh.tensor if step.plan.sequence_parallel else 1
    nbytes = step.element_bytes * step.rows * step.sizes.activation_elements / split_count
    pass_names: tuple[PassName, PassName] = ("forward", "backward")
    for pass_name, count in zip(pass_names, message_tick_counts(step.plan.pipeline), strict=True):
        yield Transfer("collective-permute", ("pipe",), nbytes, count, "stages", pass_name)


@functools.lru_cache(maxsize=4096)
def message_tick_counts(pipeline: PipelinePlan) -> tuple[int, int]:
    """Return how many exchanges of a step go to the right neighbor on the ring of ranks, and how many to the left.

    Example:
        >>> message_tick_counts(PipelinePlan.parse("gpipe:2x4"))
        (4, 4)
        >>> message_tick_counts(PipelinePlan.parse("1f1b:4x8"))
        (15, 17)
    """
    schedule = pipeline.schedule()
    right_and_left_ticks: tuple[set[int], set[int]] = (set(), set())
    for action, tick in ticks(schedule).items():
        route = schedule.routes[schedule.route[action.microbatch]]
        target_stage = action.stage + (1 if action.kind is Kind.F else -1)
        if action.kind in (Kind.F, Kind.B, Kind.I) and 0 <= target_stage < len(route):
            ring_distance = (route[target_stage] - route[action.stage]) % schedule.ranks
            if ring_distance:
                right_and_left_ticks[
                    0 if ring_distance == 1 and (schedule.ranks > 2 or action.kind is Kind.F) else 1
                ].add(tick)
    return len(right_and_left_ticks[0]), len(right_and_left_ticks[1])
