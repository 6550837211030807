"""The collectives of a train step in closed form, from its plan and the sizes of its model.

    data, replica    gradients are all-reduced in each microbatch, over both axes and the sequence axis in one
    ZeRO 1           as well; then new weights are gathered, in the type in which the passes compute
    ZeRO 2           gradients are reduced and scattered in each microbatch; new weights are gathered
    ZeRO 3           weights of blocks are gathered for the forward and again for the backward pass of each microbatch,
                     all others once a microbatch; gradients are reduced and scattered
    tensor           two all-reduces of a block's activations in each pass, or as many gathers and scatters with
                     sequence parallelism; the embedding and the head have one each
    sequence         keys and values are gathered, and their gradients scattered
    pipe             `pipeline_traffic.py`
    tables           if a microbatch reads less than a sharded table holds, devices exchange what they read, and its
                     gradients, in place of the table; a tied head reduces gradients of its own

Collectives of blocks run once for each block. Those of a block's forward pass run again if it is recomputed, but for
the last reduction, whose result nothing reads. These are the collectives of compiled steps, which the three compilers
insert in different ways (`wire_plans.py` of the benchmarks compares them):

    XLA:GPU    sums gradients of tables in float32; gathers keys and normed activations in float32, before it converts
               them, if the backward pass reads them; reduces gradients of other weights once a step under ZeRO 0
    XLA:TPU    reduces the gradient of a whole table over all axes under ZeRO 2 and 3, if there are other axes than fsdp
    XLA:CPU    gathers other weights once a step

Left out: the loss over a split vocabulary, norms and other small sums, the expert axis, and what a compiler does apart
from this, such as gathers in the form of permutes beside products.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax

from jaxscale.model_traits import ModelTraits
from jaxscale.planning.search.pipeline_traffic import messages, pipelined_gradients, pipelined_weights
from jaxscale.planning.search.transfer import Sizes, StepTraffic, Transfer, WeightShapes
from jaxscale.platforms.platform import DeviceKind
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec, wire
from jaxscale.sharding.mesh import AXES
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import named_leaves

__all__ = ["Sizes", "Transfer", "sizes_of", "transfers"]

CODED = 4
"""Assumed factor by which a codec makes gradients smaller if the shapes of the weights are not known."""


def transfers(
    plan: Plan, sizes: Sizes, rows: int, *, recomputed: float = 0.0, chip: DeviceKind = "tpu"
) -> tuple[Transfer, ...]:
    """Return the collectives of a train step.

    Args:
        plan: plan with a mesh.
        sizes: sizes of the model on a device.
        rows: rows of one microbatch on a device.
        recomputed: share of a block's forward pass that runs again in the backward pass.
        chip: kind of the chips, whose compiler inserts the collectives.

    Example:
        >>> sizes = Sizes(block_weights=1000, other_weights=200, layers=2, activations=64)
        >>> plan = Plan(mesh="fsdp:4", zero=3)
        >>> [(t.kind, t.nbytes, t.count, t.passes) for t in transfers(plan, sizes, rows=1)][1:3]
        [('all-gather', 2000.0, 2, 'forward'), ('all-gather', 2000.0, 2, 'backward')]
    """
    assert plan.mesh is not None
    pipe_size = 1 if plan.pipeline is None else plan.pipeline.shape()[0]
    mesh = dataclasses.replace(plan.mesh, pipe=pipe_size)  # a plan may leave it out
    step = StepTraffic(plan, sizes, mesh, rows, recomputed, chip)
    if plan.pipeline is None:
        candidates = [*_weights(step), *_lookups(step), *_gradients(step)]
    else:
        candidates = [*pipelined_weights(step), *pipelined_gradients(step), *messages(step)]
    candidates += [*_replicas(step), *_activations(step), *_sequence(step)]
    count_by_transfer: dict[Transfer, float] = {}  # of the transfers with count 1
    for transfer in candidates:
        axes = tuple(axis for axis in AXES if axis in transfer.axes and mesh.sizes[axis] > 1)
        if axes and transfer.count and transfer.nbytes:
            one = dataclasses.replace(transfer, axes=axes, count=1)
            count_by_transfer[one] = count_by_transfer.get(one, 0) + transfer.count
    return tuple(dataclasses.replace(one, count=count) for one, count in count_by_transfer.items())


def _weights(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the gathers of weights, without a pipeline."""
    sizes, width = step.sizes, step.width
    if step.zero == 3:
        count = 1 if step.chip == "cpu" else step.microbatches
        is_read_apart = step.has_sparse_lookups and not sizes.is_tied
        is_gathered_apart = step.has_whole_tables and step.chip == "tpu"  # over both axes at once
        tables = sizes.tables if is_read_apart or is_gathered_apart else 0
        yield Transfer("all-gather", ("fsdp",), width * (sizes.other_weights - tables), count, "weights", "forward")
        layer_bytes = width * step.layer_weights
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.runs, "weights", "forward")
        yield Transfer("all-gather", ("fsdp",), layer_bytes, step.runs, "weights", "backward")
    elif step.zero:
        nbytes = width * (sizes.block_weights + sizes.other_weights)
        yield Transfer("all-gather", ("fsdp",), nbytes, 1, "weights", "update")


def _lookups(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the exchange of what is read from sharded tables, and of its gradients, without a pipeline."""
    if not step.has_sparse_lookups or step.zero == 1:
        return
    elements, count = step.lookup_elements, step.microbatches
    axes = ("fsdp", "tensor") if step.has_whole_tables else ("fsdp",)
    if step.zero == 3:
        yield Transfer("reduce-scatter", axes, step.width * elements, count, "activations", "forward")
    if step.chip == "tpu":
        yield Transfer("all-gather", axes, 4 * elements, count, "activations", "backward")
        return
    yield Transfer("all-gather", ("fsdp",), step.width * elements, count, "activations", "backward")
    if step.has_whole_tables:
        shard_bytes = step.width * elements / step.mesh.fsdp
        yield Transfer("all-gather", ("tensor",), shard_bytes, count, "activations", "backward")


def _gradients(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the reductions of gradients over the axes of the batch and of sequences, without a pipeline."""
    sizes, layer_bytes = step.sizes, step.gradient_width * step.layer_weights
    if step.zero >= 2:
        yield Transfer("reduce-scatter", ("fsdp",), layer_bytes, step.runs, "gradients", "backward")
        shard_bytes = layer_bytes / step.mesh.fsdp
        yield Transfer("all-reduce", step.other_axes, shard_bytes, step.runs, "gradients", "backward")
    else:
        yield Transfer("all-reduce", step.batch_axes, layer_bytes, step.runs, "gradients", "backward")
    yield from _table_gradients(step)
    yield from _other_gradients(step, sizes.other_weights - (0 if sizes.is_tied else sizes.tables))


def _other_gradients(step: StepTraffic, weights: float) -> Iterator[Transfer]:
    """Yield the reductions of gradients of weights outside of blocks, but for tables."""
    microbatch_count = step.microbatches
    nbytes, other_axes = step.gradient_width * weights, step.other_axes
    # compilers of accelerators move an all-reduce of a sum over microbatches behind the loop; a TPU's in the sum's type
    late_count = microbatch_count if step.chip == "cpu" else 1
    late_bytes = 4 * weights if step.chip == "tpu" and microbatch_count > 1 else nbytes
    if step.zero >= 2:
        yield Transfer("reduce-scatter", ("fsdp",), nbytes, microbatch_count, "gradients", "backward")
        late_bytes /= step.mesh.fsdp
        yield Transfer("all-reduce", other_axes, late_bytes, late_count, "gradients", "backward")
    elif step.zero == 1:
        is_whole = bool(other_axes) or (step.sizes.is_tied and step.chip == "gpu")
        kind = "all-reduce" if is_whole else "reduce-scatter"  # an update reads a shard
        yield Transfer(kind, step.batch_axes, nbytes, microbatch_count, "gradients", "backward")
    else:
        yield Transfer("all-reduce", step.batch_axes, late_bytes, late_count, "gradients", "backward")


def _table_gradients(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the reductions of gradients of tables."""
    tables, microbatch_count = step.sizes.tables, step.microbatches
    other_axes, tensor = step.other_axes, step.mesh.tensor
    late_count = microbatch_count if step.chip == "cpu" else 1
    width = 4 if step.chip == "gpu" or (step.chip == "tpu" and step.zero and not other_axes) else step.gradient_width
    if step.has_sparse_lookups and step.zero >= 2:  # the gradients of what was read were gathered
        width = 4 if step.chip == "gpu" else step.gradient_width
        shard_bytes = width * tables / step.mesh.fsdp
        yield Transfer("all-reduce", other_axes, shard_bytes, late_count, "gradients", "backward")
        return
    if step.has_whole_tables:
        nbytes = (4 if step.chip == "gpu" else step.gradient_width) * tables * tensor
        if step.zero or step.chip == "tpu":
            is_scattered = step.chip == "tpu" and step.zero and not other_axes
            kind = "reduce-scatter" if is_scattered else "all-reduce"
            axes = (*step.batch_axes, "tensor")
            yield Transfer(kind, axes, nbytes, microbatch_count, "gradients", "backward")
            return
        yield Transfer("reduce-scatter", ("tensor",), nbytes, microbatch_count, "gradients", "backward")
    is_whole = step.mesh.sequence > 1 if step.chip == "gpu" else step.chip == "tpu" and bool(other_axes)
    if step.zero >= 2 and not is_whole:
        yield Transfer("reduce-scatter", ("fsdp",), width * tables, microbatch_count, "gradients", "backward")
        yield Transfer("all-reduce", other_axes, width * tables / step.mesh.fsdp, late_count, "gradients", "backward")
    elif step.zero:
        is_scattered = step.has_sparse_lookups and not step.sizes.is_tied
        is_reduced = (step.chip == "gpu" and not is_scattered) or is_whole or bool(other_axes)
        kind = "all-reduce" if is_reduced else "reduce-scatter"
        yield Transfer(kind, step.batch_axes, width * tables, microbatch_count, "gradients", "backward")
    else:
        width = 4 if step.chip == "tpu" and microbatch_count > 1 else width
        yield Transfer("all-reduce", step.batch_axes, width * tables, late_count, "gradients", "backward")


def _replicas(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the exchange between replicas by a codec or by DiLoCo, as the all-reduce that sends as many bytes."""
    if not step.has_own_replicas:
        return
    plan, mesh, sizes = step.plan, step.mesh, step.sizes
    shard_count = mesh.data * mesh.pipe * mesh.fsdp
    weights = sizes.block_weights + sizes.other_weights / mesh.pipe  # a stage has its blocks, and its part of the rest
    nbytes = 4 * weights * mesh.pipe / shard_count
    if plan.reduce is not None and not isinstance(plan.reduce, str):
        nbytes *= _coded_share(plan.reduce, sizes.shapes, mesh.replica, shard_count)
    count = 1.0 if plan.diloco is None else 1 / plan.diloco.every
    yield Transfer("all-reduce", ("replica",), nbytes, count, "replicas", "backward")


@functools.lru_cache(maxsize=256)
def _coded_share(codec: Codec, shapes: WeightShapes, replicas: int, shard_count: int) -> float:
    """Return the bytes that a codec sends for weights split into shards, over those of float32."""
    if replicas == 1 or not shapes:
        return 1 / CODED
    sent_bytes = exact_bytes = 0
    for shape, is_stacked in shapes:
        dims = list(shape)
        splittable = [dim for dim in range(is_stacked, len(dims)) if dims[dim] % shard_count == 0]
        if splittable:
            dims[max(splittable, key=lambda dim: dims[dim])] //= shard_count
        exact = wire.exact(tuple(dims), replicas)
        exact_bytes += exact
        sent_bytes += min(exact, codec.wire_bytes(tuple(dims), replicas, layers=is_stacked))
    return sent_bytes / exact_bytes


def _activations(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the collectives of activations over the tensor axis."""
    plan, sizes, mesh = step.plan, step.sizes, step.mesh
    nbytes, axes = step.width * step.rows * sizes.activations, ("tensor",)
    # the rerun of a whole stage needs what each of its blocks returns; that of a block does not
    stage_rerun = 1.0 if plan.pipeline is not None and plan.stages_keep == "input" else 0.0
    block_rerun = min(1.0, max(0.0, step.recomputed - stage_rerun))
    scatter_count = step.runs * (2 * stage_rerun + block_rerun)
    gather_count = 2 * step.runs * (stage_rerun + block_rerun)
    ends_count = step.microbatches if sizes.has_split_ends else 0
    if not plan.sequence_parallel:
        yield Transfer("all-reduce", axes, nbytes, 2 * step.runs + ends_count, "activations", "forward")
        count = 2 * step.runs + scatter_count + ends_count
        yield Transfer("all-reduce", axes, nbytes, count, "activations", "backward")
        return
    if step.has_whole_tables and plan.pipeline is None and (sizes.is_tied or not step.has_sparse_lookups):
        table_axes = ("fsdp", "tensor") if step.zero == 3 and step.chip == "tpu" else axes
        table_bytes = step.width * sizes.tables * mesh.tensor
        yield Transfer("all-gather", table_axes, table_bytes, step.microbatches, "weights", "forward")
    kept_gathers, lost_gathers = 2 * step.runs * (1 - block_rerun), 2 * step.runs * block_rerun
    read_bytes = (2 if step.has_wide_gathers else 1) * nbytes
    yield Transfer("all-gather", axes, read_bytes, kept_gathers, "activations", "forward")
    yield Transfer("all-gather", axes, nbytes, lost_gathers + ends_count, "activations", "forward")
    yield Transfer("reduce-scatter", axes, nbytes, 2 * step.runs, "activations", "forward")
    yield Transfer("all-gather", axes, read_bytes, gather_count, "activations", "backward")
    yield Transfer("all-gather", axes, nbytes, 2 * step.runs, "activations", "backward")
    count = 2 * step.runs + scatter_count + ends_count
    yield Transfer("reduce-scatter", axes, nbytes, count, "activations", "backward")


def _sequence(step: StepTraffic) -> Iterator[Transfer]:
    """Yield the collectives of keys and values over the sequence axis."""
    nbytes = step.width * step.rows * step.sizes.attention * step.mesh.sequence
    read_bytes = (1.5 if step.has_wide_gathers else 1) * nbytes  # keys, but not values
    rerun = min(1.0, step.recomputed)
    axes = ("sequence",)
    yield Transfer("all-gather", axes, read_bytes, step.runs * (1 - rerun), "sequence", "forward")
    yield Transfer("all-gather", axes, nbytes, step.runs * rerun, "sequence", "forward")
    yield Transfer("all-gather", axes, read_bytes, step.runs * rerun, "sequence", "backward")
    yield Transfer("reduce-scatter", axes, nbytes, step.runs, "sequence", "backward")


def sizes_of(step: TrainStep, calls: tuple[BlockCall, ...]) -> Sizes:
    """Return the sizes of a model under a step's split over tensor and sequence axes, per device.

    Weights outside of blocks are tables if their names contain "embed" or "position".

    Args:
        step: a step on a mesh of tensor and sequence axes alone; its devices need not be present.
        calls: calls of the model's blocks (`traced_blocks`).
    """
    tensor_size = step.mesh.shape["tensor"]
    leaves = named_leaves(step.layout.abstract.params)
    local_shapes = {name: tuple(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in leaves.items()}
    weights = sum(map(math.prod, local_shapes.values()))
    block_weights = min(weights, sum(_block_weights(call, tensor_size) for call in calls))
    unstacked = {name: shape for name, shape in local_shapes.items() if not step.pure_model.is_stacked(name)}
    table_names = [name for name in unstacked if any(word in name.lower() for word in ("embed", "position"))]
    tables = min(weights - block_weights, sum(math.prod(unstacked[name]) for name in table_names))
    rows = step.experiment.batch
    largest_call = max(calls, key=lambda call: call.input_bytes, default=None)
    activations = 0
    if largest_call is not None:
        graph = largest_call.graph
        element_bytes = {"bfloat16": 2, "float16": 2}.get(graph.values[graph.carried[0]].dtype, 4)
        split = tensor_size if step.plan.sequence_parallel else 1
        activations = split * graph.carried_bytes // element_bytes // max(1, rows)
    traits = ModelTraits.of(step.experiment.model)
    kv_share = 2.0
    heads, kv_heads = (getattr(step.experiment.model, name, None) for name in ("heads", "kv_heads"))
    if heads and kv_heads:
        kv_share = 2 * kv_heads / heads
    return Sizes(
        block_weights=block_weights,
        other_weights=weights - block_weights,
        layers=sum(call.count for call in calls),
        activations=activations,
        attention=int(kv_share * activations) // tensor_size if traits.context else 0,
        tables=tables,
        has_split_ends=any(unstacked[name] != tuple(leaves[name].shape) for name in table_names),
        is_tied=sum(traits.vocab in leaves[name].shape for name in unstacked) == 1,
        shapes=tuple((shape, step.pure_model.is_stacked(name)) for name, shape in local_shapes.items()),
    )


def _block_weights(call: BlockCall, tensor_size: int) -> int:
    """Return the elements on a device of the weights of all runs of a block."""
    leaves = jax.tree.leaves(call.args[0]) if call.args else []
    return sum(math.prod(leaf.shape) for leaf in leaves if leaf.shape) * call.count // tensor_size
