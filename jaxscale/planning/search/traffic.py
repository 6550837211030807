"""The collectives of a train step in closed form, from its plan and the sizes of its model.

    data, replica    gradients are all-reduced in each microbatch, over both axes and the sequence axis at once
    ZeRO 1           the same; then new weights are gathered, in the type in which the passes compute
    ZeRO 2           gradients are reduced and scattered in each microbatch; new weights are gathered
    ZeRO 3           weights of blocks are gathered for the forward and again for the backward pass of each microbatch,
                     other weights once a microbatch; gradients are reduced and scattered
    tensor           two all-reduces of a block's activations in each pass, or as many gathers and scatters with
                     sequence parallelism; the embedding and the head have one each
    sequence         keys and values are gathered, and their gradients scattered
    pipe             `pipeline_traffic.py`
    tables           if a microbatch reads less than a sharded table holds, devices exchange the rows that they read and
                     the gradients of these rows, instead of the table; a tied head reduces its gradients separately

Collectives of blocks run once for each block. Those of a block's forward pass run again if the pass is recomputed,
except the last reduction, whose result nothing reads. The three compilers insert collectives in different ways, and the
closed forms follow their compiled steps (`wire_plans.py` of the benchmarks compares both):

    XLA:GPU    sums gradients of tables in float32; reduces gradients of other weights once a step under ZeRO 0
    XLA:TPU    reduces the gradient of a whole table over all axes under ZeRO 2 and 3, if axes besides fsdp are used
    XLA:CPU    gathers other weights once a step

Left out: the loss over a split vocabulary, norms and other small sums, the expert axis, and other choices of a
compiler, such as gathers that it replaces by permutes that overlap with products.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax

from jaxscale.model_traits import ModelTraits
from jaxscale.planning.search.pipeline_traffic import (
    pipelined_gradient_reductions,
    pipelined_weight_gathers,
    stage_messages,
)
from jaxscale.planning.search.transfer import Sizes, StepTraffic, Transfer, WeightShapes
from jaxscale.platforms.platform import DeviceKind
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.sharding.mesh import AXES
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import named_leaves

__all__ = ["Sizes", "Transfer", "sizes_of", "transfers"]

ASSUMED_CODEC_RATIO = 4
"""Assumed compression ratio of a codec, used if the shapes of the weights are unknown."""


def transfers(
    plan: Plan, sizes: Sizes, rows: int, *, recomputed: float = 0.0, chip: DeviceKind = "tpu"
) -> tuple[Transfer, ...]:
    """Return the collectives of a train step.

    Args:
        plan: plan with a mesh.
        sizes: sizes of the model on a device.
        rows: number of rows of one microbatch on a device.
        recomputed: share of a block's forward pass that runs again in the backward pass.
        chip: kind of the chips, whose compiler inserts the collectives.

    Example:
        >>> sizes = Sizes(block_weights=1000, other_weights=200, layers=2, activation_elements=64)
        >>> plan = Plan(mesh="fsdp:4", zero=3)
        >>> [(t.kind, t.nbytes, t.count, t.passes) for t in transfers(plan, sizes, rows=1)][1:3]
        [('all-gather', 2000.0, 2, 'forward'), ('all-gather', 2000.0, 2, 'backward')]
    """
    assert plan.mesh is not None
    pipe_size = 1 if plan.pipeline is None else plan.pipeline.shape()[0]
    mesh = dataclasses.replace(plan.mesh, pipe=pipe_size)  # the plan's mesh may leave pipe out
    step = StepTraffic(plan, sizes, mesh, rows, recomputed, chip)
    if plan.pipeline is None:
        unmerged_transfers = [*_weight_gathers(step), *_lookup_exchanges(step), *_gradient_reductions(step)]
    else:
        unmerged_transfers = [
            *pipelined_weight_gathers(step),
            *pipelined_gradient_reductions(step),
            *stage_messages(step),
        ]
    unmerged_transfers += [*_replica_exchanges(step), *_activation_collectives(step), *_sequence_collectives(step)]
    count_by_transfer: dict[Transfer, float] = {}  # by transfer with count 1
    for transfer in unmerged_transfers:
        axes = tuple(axis for axis in AXES if axis in transfer.axes and mesh.sizes[axis] > 1)
        if axes and transfer.count and transfer.nbytes:
            single_transfer = dataclasses.replace(transfer, axes=axes, count=1)
            count_by_transfer[single_transfer] = count_by_transfer.get(single_transfer, 0) + transfer.count
    return tuple(
        dataclasses.replace(single_transfer, count=count) for single_transfer, count in count_by_transfer.items()
    )


def _weight_gathers(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gathers of weights for a step that has no pipeline."""
    sizes, element_bytes = step.sizes, step.element_bytes
    if step.zero == 3:
        gather_count = 1 if step.chip_kind == "cpu" else step.microbatch_count
        is_read_apart = step.has_sparse_lookups and not sizes.is_tied
        is_gathered_apart = step.has_whole_tables and step.chip_kind == "tpu"  # over both axes at once
        other_elements = sizes.other_weights - (sizes.table_elements if is_read_apart or is_gathered_apart else 0)
        if step.has_head_over_both:
            head_bytes = element_bytes * step.mesh.tensor * step.head_elements
            yield Transfer("all-gather", ("fsdp", "tensor"), head_bytes, gather_count, "weights", "forward")
            other_elements = max(0.0, other_elements - step.head_elements)
        yield Transfer("all-gather", ("fsdp",), element_bytes * other_elements, gather_count, "weights", "forward")
        layer_bytes = element_bytes * step.layer_elements
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.run_count, "weights", "forward")
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.run_count, "weights", "backward")
    elif step.zero:
        nbytes = element_bytes * (sizes.block_weights + sizes.other_weights)
        yield Transfer("all-gather", ("fsdp",), nbytes, 1, "weights", "update")


def _lookup_exchanges(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the exchanges of sharded tables' rows, and of the rows' gradients, for a step that has no pipeline."""
    if not step.has_sparse_lookups or step.zero == 1:
        return
    lookup_elements, microbatch_count = step.lookup_elements, step.microbatch_count
    axes = ("fsdp", "tensor") if step.has_whole_tables else ("fsdp",)
    lookup_bytes = step.element_bytes * lookup_elements
    if step.zero == 3:
        kind, sum_axes = ("all-reduce", ("fsdp", "tensor")) if step.sums_lookups_over_both else ("reduce-scatter", axes)
        yield Transfer(kind, sum_axes, lookup_bytes, microbatch_count, "activations", "forward")
    if step.chip_kind == "tpu":
        yield Transfer("all-gather", axes, 4 * lookup_elements, microbatch_count, "activations", "backward")
        return
    if step.has_head_over_both:
        yield Transfer("all-gather", axes, lookup_bytes, microbatch_count, "activations", "backward")
        return
    yield Transfer("all-gather", ("fsdp",), lookup_bytes, microbatch_count, "activations", "backward")
    if step.has_whole_tables:
        shard_bytes = lookup_bytes / step.mesh.fsdp
        yield Transfer("all-gather", ("tensor",), shard_bytes, microbatch_count, "activations", "backward")


def _gradient_reductions(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gradient reductions over the batch and sequence axes for a step that has no pipeline."""
    sizes, layer_bytes = step.sizes, step.gradient_element_bytes * step.layer_elements
    if step.zero >= 2:
        yield Transfer("reduce-scatter", ("fsdp",), layer_bytes, step.run_count, "gradients", "backward")
        shard_bytes = layer_bytes / step.mesh.fsdp
        yield Transfer("all-reduce", step.other_axes, shard_bytes, step.run_count, "gradients", "backward")
    else:
        yield Transfer("all-reduce", step.batch_axes, layer_bytes, step.run_count, "gradients", "backward")
    yield from _table_gradient_reductions(step)
    yield from _other_gradient_reductions(step, sizes.other_weights - (0 if sizes.is_tied else sizes.table_elements))


def _other_gradient_reductions(step: StepTraffic, element_count: float) -> Iterator[Transfer]:
    """Yield the gradient reductions for the weights outside blocks, except tables."""
    microbatch_count = step.microbatch_count
    nbytes, other_axes = step.gradient_element_bytes * element_count, step.other_axes
    # GPU and TPU compilers move the all-reduce of a sum over microbatches behind the loop; on TPU, it is in float32
    reductions_per_step = microbatch_count if step.chip_kind == "cpu" else 1
    late_bytes = 4 * element_count if step.chip_kind == "tpu" and microbatch_count > 1 else nbytes
    if step.has_head_over_both:
        head_bytes = step.gradient_element_bytes * step.head_elements
        yield Transfer("all-reduce", step.batch_axes, head_bytes, microbatch_count, "gradients", "backward")
        return
    if step.zero >= 2:
        yield Transfer("reduce-scatter", ("fsdp",), nbytes, microbatch_count, "gradients", "backward")
        # a tied head's gradient is added to that of the look-ups in each microbatch, after both were reduced
        early_share = step.sizes.table_elements / element_count if step.sizes.is_tied and element_count else 0.0
        for share, shard_bytes, count in (
            (early_share, nbytes / step.mesh.fsdp, microbatch_count),
            (1 - early_share, late_bytes / step.mesh.fsdp, reductions_per_step),
        ):
            yield Transfer("all-reduce", other_axes, share * shard_bytes, count, "gradients", "backward")
    elif step.zero == 1:
        is_reduced_whole = bool(other_axes) or (step.sizes.is_tied and step.chip_kind == "gpu")
        kind = "all-reduce" if is_reduced_whole else "reduce-scatter"  # an update reads a shard
        yield Transfer(kind, step.batch_axes, nbytes, microbatch_count, "gradients", "backward")
    else:
        yield Transfer("all-reduce", step.batch_axes, late_bytes, reductions_per_step, "gradients", "backward")


def _table_gradient_reductions(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gradient reductions for tables, which are weights that are read by index."""
    table_elements, microbatch_count = step.sizes.table_elements, step.microbatch_count
    other_axes, tensor_size = step.other_axes, step.mesh.tensor
    reductions_per_step = microbatch_count if step.chip_kind == "cpu" else 1
    element_bytes = (
        4
        if step.chip_kind == "gpu" or (step.chip_kind == "tpu" and step.zero and not other_axes)
        else step.gradient_element_bytes
    )
    if step.has_sparse_lookups and step.zero >= 2:  # the gradients of the rows that were read are gathered
        is_late = microbatch_count > 1 and not step.sizes.is_tied
        is_wide = step.chip_kind == "gpu" or (step.chip_kind == "tpu" and is_late)
        shard_bytes = (4 if is_wide else step.gradient_element_bytes) * table_elements / step.mesh.fsdp
        count = microbatch_count if step.sizes.is_tied else reductions_per_step
        yield Transfer("all-reduce", other_axes, shard_bytes, count, "gradients", "backward")
        return
    if step.has_whole_tables:
        nbytes = (4 if step.chip_kind == "gpu" else step.gradient_element_bytes) * table_elements * tensor_size
        if step.zero or step.chip_kind == "tpu":
            is_scattered = step.chip_kind == "tpu" and step.zero and not other_axes
            kind = "reduce-scatter" if is_scattered else "all-reduce"
            axes = (*step.batch_axes, "tensor")
            yield Transfer(kind, axes, nbytes, microbatch_count, "gradients", "backward")
            return
        yield Transfer("reduce-scatter", ("tensor",), nbytes, microbatch_count, "gradients", "backward")
    is_reduced_whole = (
        step.mesh.sequence > 1 if step.chip_kind == "gpu" else step.chip_kind == "tpu" and bool(other_axes)
    )
    if step.zero >= 2 and not is_reduced_whole:
        yield Transfer(
            "reduce-scatter", ("fsdp",), element_bytes * table_elements, microbatch_count, "gradients", "backward"
        )
        yield Transfer(
            "all-reduce",
            other_axes,
            element_bytes * table_elements / step.mesh.fsdp,
            reductions_per_step,
            "gradients",
            "backward",
        )
    elif step.zero:
        is_scattered = step.has_sparse_lookups and not step.sizes.is_tied
        is_reduced = (step.chip_kind == "gpu" and not is_scattered) or is_reduced_whole or bool(other_axes)
        kind = "all-reduce" if is_reduced else "reduce-scatter"
        yield Transfer(kind, step.batch_axes, element_bytes * table_elements, microbatch_count, "gradients", "backward")
    else:
        reduced_element_bytes = 4 if step.chip_kind == "tpu" and microbatch_count > 1 else element_bytes
        yield Transfer(
            "all-reduce",
            step.batch_axes,
            reduced_element_bytes * table_elements,
            reductions_per_step,
            "gradients",
            "backward",
        )


def _replica_exchanges(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the exchange between replicas by a codec or by DiLoCo, as an all-reduce that sends the same bytes."""
    if not step.has_replica_exchange:
        return
    plan, mesh, sizes = step.plan, step.mesh, step.sizes
    shard_count = mesh.data * mesh.pipe * mesh.fsdp
    # a stage has its own blocks, and a share of the other weights
    stage_elements = sizes.block_weights + sizes.other_weights / mesh.pipe
    nbytes = 4 * stage_elements * mesh.pipe / shard_count
    if plan.reduce is not None and not isinstance(plan.reduce, str):
        nbytes *= _coded_share(plan.reduce, sizes.shapes_and_stacked_flags, mesh.replica, shard_count)
    exchanges_per_step = 1.0 if plan.diloco is None else 1 / plan.diloco.every
    yield Transfer("all-reduce", ("replica",), nbytes, exchanges_per_step, "replicas", "backward")


@functools.lru_cache(maxsize=256)
def _coded_share(codec: Codec, shapes_and_stacked_flags: WeightShapes, replica_count: int, shard_count: int) -> float:
    """Return the bytes that a codec sends for sharded weights, divided by those of a reduction in float32."""
    if replica_count == 1 or not shapes_and_stacked_flags:
        return 1 / ASSUMED_CODEC_RATIO
    sent_bytes = exact_bytes = 0
    for shape, is_stacked in shapes_and_stacked_flags:
        dim_sizes = list(shape)
        splittable_dims = [dim for dim in range(is_stacked, len(dim_sizes)) if dim_sizes[dim] % shard_count == 0]
        if splittable_dims:
            dim_sizes[max(splittable_dims, key=lambda dim: dim_sizes[dim])] //= shard_count
        exact_weight_bytes = wire.exact(tuple(dim_sizes), replica_count)
        exact_bytes += exact_weight_bytes
        sent_bytes += min(exact_weight_bytes, codec.wire_bytes(tuple(dim_sizes), replica_count, layers=is_stacked))
    return sent_bytes / exact_bytes


def _activation_collectives(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the collectives of activations over the tensor axis."""
    plan, sizes, mesh = step.plan, step.sizes, step.mesh
    nbytes, axes = step.element_bytes * step.rows * sizes.activation_elements, ("tensor",)
    # the rerun of a whole stage needs the output of each of its blocks; the rerun of a block does not
    stage_rerun_share = 1.0 if plan.pipeline is not None and plan.stages_keep == "input" else 0.0
    block_rerun_share = min(1.0, max(0.0, step.recomputed_share - stage_rerun_share))
    scatter_count = step.run_count * (2 * stage_rerun_share + block_rerun_share)
    gather_count = 2 * step.run_count * (stage_rerun_share + block_rerun_share)
    ends_count = step.microbatch_count if sizes.has_split_ends else 0
    if not plan.sequence_parallel:
        lookup_count = 0 if step.sums_lookups_over_both else ends_count
        yield Transfer("all-reduce", axes, nbytes, 2 * step.run_count + lookup_count, "activations", "forward")
        backward_count = 2 * step.run_count + scatter_count + ends_count
        yield Transfer("all-reduce", axes, nbytes, backward_count, "activations", "backward")
        return
    if step.has_whole_tables and plan.pipeline is None and not step.has_head_over_both:
        is_tied_on_tpu = sizes.is_tied and step.chip_kind == "tpu"
        if is_tied_on_tpu or not step.has_sparse_lookups:
            table_axes = ("fsdp", "tensor") if step.zero == 3 and step.chip_kind == "tpu" else axes
            table_bytes = step.element_bytes * sizes.table_elements * mesh.tensor
            yield Transfer("all-gather", table_axes, table_bytes, step.microbatch_count, "weights", "forward")
    elif plan.pipeline is None and not step.zero:  # rows that were looked up, and the gradients of these rows
        yield Transfer("reduce-scatter", axes, nbytes, ends_count, "activations", "forward")
        yield Transfer("all-gather", axes, nbytes, ends_count, "activations", "backward")
    yield Transfer("all-gather", axes, nbytes, 2 * step.run_count + ends_count, "activations", "forward")
    yield Transfer("reduce-scatter", axes, nbytes, 2 * step.run_count, "activations", "forward")
    yield Transfer("all-gather", axes, nbytes, 2 * step.run_count + gather_count, "activations", "backward")
    backward_count = 2 * step.run_count + scatter_count + ends_count
    yield Transfer("reduce-scatter", axes, nbytes, backward_count, "activations", "backward")


def _sequence_collectives(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the collectives of keys and values over the sequence axis."""
    nbytes = step.element_bytes * step.rows * step.sizes.kv_elements * step.mesh.sequence
    rerun_share = min(1.0, step.recomputed_share)
    axes = ("sequence",)
    yield Transfer("all-gather", axes, nbytes, step.run_count, "sequence", "forward")
    yield Transfer("all-gather", axes, nbytes, step.run_count * rerun_share, "sequence", "backward")
    yield Transfer("reduce-scatter", axes, nbytes, step.run_count, "sequence", "backward")


def sizes_of(step: TrainStep, calls: tuple[BlockCall, ...]) -> Sizes:
    """Return the sizes of a model per device, split over the tensor and sequence axes of a step.

    Weights outside of blocks are tables if their names contain "embed" or "position".

    Args:
        step: a step on a mesh with only tensor and sequence axes; its devices need not be present.
        calls: calls of the model's blocks (`traced_blocks`).
    """
    tensor_size = step.mesh.shape["tensor"]
    leaf_by_name = named_leaves(step.layout.abstract.params)
    local_shape_by_name = {name: tuple(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in leaf_by_name.items()}
    weight_elements = sum(map(math.prod, local_shape_by_name.values()))
    block_elements = min(weight_elements, sum(_block_elements(call, tensor_size) for call in calls))
    unstacked_shape_by_name = {
        name: shape for name, shape in local_shape_by_name.items() if not step.pure_model.is_stacked(name)
    }
    table_names = [
        name for name in unstacked_shape_by_name if any(word in name.lower() for word in ("embed", "position"))
    ]
    table_elements = min(
        weight_elements - block_elements, sum(math.prod(unstacked_shape_by_name[name]) for name in table_names)
    )
    row_count = step.experiment.batch
    largest_call = max(calls, key=lambda call: call.input_bytes, default=None)
    activation_elements = 0
    if largest_call is not None:
        graph = largest_call.graph
        element_bytes = {"bfloat16": 2, "float16": 2}.get(graph.values[graph.carried[0]].dtype, 4)
        split_count = tensor_size if step.plan.sequence_parallel else 1
        activation_elements = split_count * graph.carried_bytes // element_bytes // max(1, row_count)
    traits = ModelTraits.of(step.experiment.model)
    kv_share = 2.0
    head_count, kv_head_count = (getattr(step.experiment.model, name, None) for name in ("heads", "kv_heads"))
    if head_count and kv_head_count:
        kv_share = 2 * kv_head_count / head_count
    return Sizes(
        block_weights=block_elements,
        other_weights=weight_elements - block_elements,
        layers=sum(call.count for call in calls),
        activation_elements=activation_elements,
        kv_elements=int(kv_share * activation_elements) // tensor_size if traits.context else 0,
        table_elements=table_elements,
        has_split_ends=any(unstacked_shape_by_name[name] != tuple(leaf_by_name[name].shape) for name in table_names),
        is_tied=sum(traits.vocab in leaf_by_name[name].shape for name in unstacked_shape_by_name) == 1,
        shapes_and_stacked_flags=tuple(
            (shape, step.pure_model.is_stacked(name)) for name, shape in local_shape_by_name.items()
        ),
    )


def _block_elements(call: BlockCall, tensor_size: int) -> int:
    """Return the number of weight elements per device, summed over all runs of a block."""
    leaves = jax.tree.leaves(call.args[0]) if call.args else []
    return sum(math.prod(leaf.shape) for leaf in leaves if leaf.shape) * call.count // tensor_size
