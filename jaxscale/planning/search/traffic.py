"""The collectives of a train step in closed form, from its plan and the sizes of its model.

    data, replica    gradients are all-reduced in each microbatch
    ZeRO 1           gradients are all-reduced in each microbatch, and the new weights are gathered, as the passes read
                     them
    ZeRO 2           gradients are reduced and scattered in each microbatch, and the new weights are gathered
    ZeRO 3           weights of blocks are gathered for the forward and again for the backward pass of each microbatch,
                     all others once a step; gradients are reduced and scattered in each microbatch
    tensor           two all-reduces of a block's activations in each pass, or as many gathers and scatters with
                     sequence parallelism; those of the forward pass again if it runs again, but for the last scatter
    sequence         keys and values are gathered, and their gradients scattered; gradients are all-reduced
    pipe             the activations of a microbatch pass each boundary between stages in both directions; ZeRO 2 and 3
                     communicate in all of the 2 (M + P - 1) ticks of M microbatches and P ranks

These are the collectives that XLA's partitioner inserts for our programs. Left out: the loss over a split vocabulary,
norms and other small sums, and what a compiler merges or divides.
"""

import dataclasses
import math
from typing import Literal

import jax

from jaxscale.model_traits import ModelTraits
from jaxscale.platforms.megascale import CollectiveKind
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.plan import Plan
from jaxscale.step.train_step import TrainStep

CODED = 4
"""Assumed factor by which a codec makes gradients smaller; `fit` reports the exact bytes of the step."""
Purpose = Literal["weights", "gradients", "activations", "sequence", "stages", "replicas"]
PassName = Literal["forward", "backward", "update"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model on a device, after the splits over tensor and sequence axes, before ZeRO's over fsdp.

    Args:
        block_weights: elements of the weights of all blocks.
        other_weights: elements of all other weights, such as embedding and head.
        layers: number of blocks.
        activations: elements of the input of a block, for one row; not divided over the tensor axis.
        attention: elements of the keys and values of a block, for one row.
    """

    block_weights: int
    other_weights: int
    layers: int
    activations: int
    attention: int = 0


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind in a train step.

    Args:
        kind: kind of the collective.
        axes: mesh axes along which devices communicate.
        nbytes: bytes of the whole array, per device, as in `compiler.collectives.Collective`.
        count: number of executions in a step.
        purpose: what is sent.
        passes: pass in which it is sent.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    nbytes: float
    count: float
    purpose: Purpose
    passes: PassName


def transfers(plan: Plan, sizes: Sizes, rows: int, *, recomputed: float = 0.0) -> tuple[Transfer, ...]:
    """Return the collectives of a train step.

    Args:
        plan: plan with a mesh.
        sizes: sizes of the model on a device.
        rows: rows of one microbatch on a device.
        recomputed: share of a block's forward pass that runs again in the backward pass.

    Example:
        >>> sizes = Sizes(block_weights=1000, other_weights=200, layers=2, activations=64)
        >>> plan = Plan(mesh="fsdp:4", zero=3)
        >>> [(t.kind, t.nbytes, t.passes) for t in transfers(plan, sizes, rows=1)][1:]
        [('all-gather', 4000, 'forward'), ('all-gather', 4000, 'backward'), ('reduce-scatter', 4800, 'backward')]
    """
    assert plan.mesh is not None
    mesh, microbatch_count = plan.mesh, plan.microbatches
    weights = sizes.block_weights + sizes.other_weights
    width = 2 if plan.precision == "bfloat16" else 4  # bytes of an element in the passes
    gradient_width = 4 if plan.reduce == "float32" else width
    step_transfers: list[Transfer] = []

    def add(kind: CollectiveKind, axis: str, nbytes: float, count: float, purpose: Purpose, passes: PassName) -> None:
        """Add collectives, unless the axis has one device or they send nothing."""
        if mesh.sizes[axis] > 1 and count and nbytes:
            step_transfers.append(Transfer(kind, (axis,), nbytes, count, purpose, passes))

    # the ranks of a pipeline run one program, whose every tick has the collectives of a forward and a backward pass
    is_pipelined = plan.pipeline is not None
    tick_count = 2 * (microbatch_count + mesh.pipe - 1) if is_pipelined else microbatch_count
    if plan.zero == 3:
        add("all-gather", "fsdp", width * sizes.other_weights, 1, "weights", "forward")
        for passes in ("forward", "backward"):
            add("all-gather", "fsdp", width * sizes.block_weights, tick_count, "weights", passes)
    elif plan.zero:
        add("all-gather", "fsdp", width * weights, 1, "weights", "update")
    shard_bytes = gradient_width * weights
    if plan.zero >= 2:
        add("reduce-scatter", "fsdp", shard_bytes, tick_count, "gradients", "backward")
        shard_bytes /= mesh.fsdp
    else:
        add("all-reduce", "fsdp", shard_bytes, microbatch_count, "gradients", "backward")
    for axis in ("data", "sequence"):
        add("all-reduce", axis, shard_bytes, microbatch_count, "gradients", "backward")
    _add_replicas(step_transfers, plan, shard_bytes)
    row_bytes = width * rows * sizes.activations
    counts: tuple[tuple[PassName, float], ...] = (("forward", 1.0), ("backward", 1 + min(1.0, recomputed)))
    for passes, pass_count in counts:
        count = microbatch_count * sizes.layers * 2 * pass_count
        if plan.sequence_parallel:
            scatter_count = count - microbatch_count * sizes.layers * (pass_count - 1)  # nothing reads the last result
            add("all-gather", "tensor", row_bytes, count, "activations", passes)
            add("reduce-scatter", "tensor", row_bytes, scatter_count, "activations", passes)
        else:
            add("all-reduce", "tensor", row_bytes, count, "activations", passes)
    attention_bytes = width * rows * sizes.attention * mesh.sequence
    add("all-gather", "sequence", attention_bytes, microbatch_count * sizes.layers, "sequence", "forward")
    add("reduce-scatter", "sequence", attention_bytes, microbatch_count * sizes.layers, "sequence", "backward")
    for passes, _ in counts:
        chunk_count = 1 if plan.pipeline is None else plan.pipeline.chunks or 1
        add("collective-permute", "pipe", row_bytes, microbatch_count * chunk_count, "stages", passes)
    return tuple(step_transfers)


def sizes_of(step: TrainStep, calls: tuple[BlockCall, ...]) -> Sizes:
    """Return the sizes of a model under a step's split over tensor and sequence axes, per device.

    Args:
        step: a step on a mesh of tensor and sequence axes alone; its devices need not be present.
        calls: calls of the model's blocks (`traced_blocks`).
    """
    leaves = jax.tree.leaves(step.layout.abstract.params)
    weights = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    block_weights = min(weights, sum(_block_weights(call, step) for call in calls))
    rows = step.experiment.batch
    largest_call = max(calls, key=lambda call: call.input_bytes, default=None)
    activations = 0
    if largest_call is not None:
        graph = largest_call.graph
        element_bytes = {"bfloat16": 2, "float16": 2}.get(graph.values[graph.carried[0]].dtype, 4)
        split = step.mesh.shape["tensor"] if step.plan.sequence_parallel else 1
        activations = split * graph.carried_bytes // element_bytes // max(1, rows)
    traits = ModelTraits.of(step.experiment.model)
    kv_share = 2.0
    heads, kv_heads = (getattr(step.experiment.model, name, None) for name in ("heads", "kv_heads"))
    if heads and kv_heads:
        kv_share = 2 * kv_heads / heads
    attention = int(kv_share * activations) if traits.context else 0
    return Sizes(block_weights, weights - block_weights, sum(call.count for call in calls), activations, attention)


def _block_weights(call: BlockCall, step: TrainStep) -> int:
    """Return the elements on a device of the weights of all runs of a block."""
    leaves = jax.tree.leaves(call.args[0]) if call.args else []
    tensor_size = step.mesh.shape["tensor"]
    return sum(math.prod(leaf.shape) for leaf in leaves if leaf.shape) * call.count // tensor_size


def _add_replicas(step_transfers: list[Transfer], plan: Plan, shard_bytes: float) -> None:
    """Add the exchange between replicas: of gradients, of a codec's messages, or of DiLoCo's weights."""
    assert plan.mesh is not None
    if plan.mesh.replica == 1:
        return
    count, nbytes = float(plan.microbatches), shard_bytes
    if plan.diloco is not None:  # float32 weights, every few steps
        count, nbytes = 1 / plan.diloco.every, 4 * shard_bytes / (2 if plan.precision == "bfloat16" else 4)
    elif plan.reduce is not None and not isinstance(plan.reduce, str):
        count, nbytes = 1.0, shard_bytes / CODED  # once a step
    step_transfers.append(Transfer("all-reduce", ("replica",), nbytes, count, "replicas", "backward"))
