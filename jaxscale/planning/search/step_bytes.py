"""Bytes of a train step on a device in closed form, to rank many plans before a few are estimated.

    weights + optimizer state + compute copy + gradients + kept activations + the larger of loss and working set

The sum of the first terms is a lower bound, apart from rounding. The largest error is that of the working set, which
`estimate` computes from the traced program.
"""

from collections.abc import Mapping

from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.search.model_costs import Kept, SplitCosts
from jaxscale.planning.search.space import Variant
from jaxscale.recipe.plan import Plan


def sum_of_kinds(byte_count_by_kind: Mapping[str, float]) -> float:
    """Return the total bytes of a step; the loss and the working set are not alive together, so the larger one counts.

    Example:
        >>> sum_of_kinds({"parameters": 4.0, "loss": 3.0, "transients": 1.0, "gathered weights": 1.0})
        7.0
    """
    working_set_bytes = byte_count_by_kind.get("transients", 0.0) + byte_count_by_kind.get("gathered weights", 0.0)
    loss_bytes = byte_count_by_kind.get("loss", 0.0)
    return sum(byte_count_by_kind.values()) - min(loss_bytes, working_set_bytes)


def bytes_by_kind(layout: Plan, variant: Variant, kept: Kept, costs: SplitCosts) -> dict[str, float]:
    """Return the approximate bytes of device memory of a step by kind of tensor, per device.

    Args:
        layout: plan with a mesh over which the batch can be split evenly.
        variant: memory rule, chunk of the loss and offload of the step.
        kept: what the memory rule keeps for the rows of a microbatch on a device, over all stages of a pipeline.
        costs: costs of the model under the layout's split over tensor and sequence axes.
    """
    mesh = layout.mesh
    assert mesh is not None
    row_count = costs.batch / mesh.batch_shards / layout.microbatches  # of one microbatch
    scale = row_count / costs.rows
    weight_shards, gradient_shards, state_shards = (mesh.fsdp if layout.zero >= stage else 1 for stage in (3, 2, 1))
    element_count = costs.weights / mesh.pipe
    is_bfloat16 = layout.precision == "bfloat16"
    # gradients of several microbatches are summed in float32
    has_float32_sum = layout.microbatches > 1 or not is_bfloat16
    weight_bytes = 0.0 if variant.offload.masters else costs.weight_bytes / mesh.pipe / weight_shards
    compute_copy_bytes = (
        2 * element_count / weight_shards if is_bfloat16 and variant.offload.weights == "device" else 0.0
    )
    state_bytes = 0.0
    if variant.offload.optimizer_state == "device":
        state_bytes = costs.state_bytes / mesh.pipe / state_shards
    gradient_bytes = (4 if has_float32_sum else 2) * element_count / gradient_shards
    if variant.offload.gradients == "host":
        gradient_bytes /= max(1, costs.sizes.layers)
    gathered_bytes = 0.0
    if weight_shards > 1 or variant.offload.weights == "host":  # two blocks, in the type of the products
        sizes = costs.sizes
        gathered_bytes = (2 if is_bfloat16 else 4) * (2 * sizes.block_weights / max(1, sizes.layers))
    kept_bytes = kept.kept_bytes / mesh.pipe
    if layout.pipeline is not None:  # the first stage keeps a microbatch for each rank, and works on one
        kept_microbatch_count = min(mesh.pipe, layout.microbatches)
        if layout.stages_keep == "input":
            kept_bytes += kept_microbatch_count * scale * costs.input_bytes
        else:  # stashes are not sharded over the tensor and sequence axes
            stash_bytes = kept_bytes
            if layout.pipeline.name.startswith("zb"):  # a block keeps everything until its weight gradient
                stash_bytes += costs.kept(MemoryPlan("none"), row_count).kept_bytes / mesh.pipe
            kept_bytes += kept_microbatch_count * mesh.tensor * mesh.sequence * stash_bytes
    loss_bytes = scale * costs.loss_bytes
    if variant.loss_chunk is not None:
        loss_bytes *= min(1.0, variant.loss_chunk / costs.positions)
    working_bytes = scale * costs.working_bytes
    return {
        "parameters": weight_bytes,
        "optimizer state": state_bytes,
        "compute copy": compute_copy_bytes,
        "kept activations": kept_bytes,
        "loss": loss_bytes,
        "gradients": gradient_bytes,
        "gathered weights": gathered_bytes,
        "transients": working_bytes,
    }
