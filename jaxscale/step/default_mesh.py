"""Choose the mesh of a plan that has none: as many devices as the rows of the batch and the model allow.

Rows are split first. On several TPU slices, a plan with a ZeRO stage shards within each slice, and replicates over the
slices, so that only gradients cross the slow network between them. If there are more devices than rows, tensor
parallelism uses the remaining devices, provided that the model's dims allow it. This does not apply to CPU devices,
because they share their cores.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxscale.errors import UserError
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.layout import Device

TENSOR_SIZES = (1, 2, 4, 8)
"""Numbers of devices along the tensor axis of a default mesh; more would leave the fast links within a GPU host."""


def slice_count(devices: Sequence[Device]) -> int:
    """Return the number of TPU slices that devices belong to."""
    return len({getattr(device, "slice_index", 0) or 0 for device in devices})


def default_mesh(
    plan: Plan, row_count: int, devices: Sequence[Device], check_plan: Callable[[Plan], None]
) -> tuple[MeshSpec, str]:
    """Choose the mesh of a plan that has none.

    Args:
        plan: the plan; its pipeline determines the number of devices along "pipe".
        row_count: number of rows of a microbatch.
        devices: devices that may be used.
        check_plan: function that raises a `UserError` if a plan does not fit the model.

    Returns:
        A tuple (mesh, reason). The reason says why the mesh uses tensor parallelism or leaves devices unused; it is ""
        if the mesh does neither.

    Raises:
        UserError: the pipeline takes more devices than there are.
    """
    pipe_size = 1 if plan.pipeline is None else plan.pipeline.shape()[0]
    if pipe_size > len(devices):
        raise UserError(
            f"pipeline {plan.pipeline} takes {pipe_size} devices, but there are {len(devices)}: take fewer stages"
        )
    tpu_slice_count, shard_axis = slice_count(devices), "fsdp" if plan.zero else "data"
    preferred_replica_count = tpu_slice_count if plan.zero and pipe_size % tpu_slice_count else 1
    meshes: list[MeshSpec] = []
    for tensor_size in TENSOR_SIZES if devices[0].platform != "cpu" else TENSOR_SIZES[:1]:
        max_shard_count = len(devices) // (pipe_size * tensor_size)
        shard_counts = [count for count in range(1, max_shard_count + 1) if row_count % count == 0]
        even_shard_counts = [count for count in shard_counts if count * pipe_size % tpu_slice_count == 0]
        if not shard_counts:
            continue
        # if no count is even over the slices, `MeshSpec.build` refuses the mesh, and its error suggests an even one
        shard_count = max(even_shard_counts or shard_counts)
        replica_count = preferred_replica_count if shard_count % preferred_replica_count == 0 else 1
        mesh = MeshSpec(pipe=pipe_size, replica=replica_count, tensor=tensor_size)
        meshes.append(dataclasses.replace(mesh, **{shard_axis: shard_count // replica_count}))
    for mesh in sorted(meshes, key=lambda mesh: (-mesh.devices, mesh.tensor)):
        if mesh.tensor == 1:
            break
        zero_stage = plan.zero if mesh.fsdp > 1 else 0  # with one device along fsdp, nothing is sharded
        try:
            check_plan(dataclasses.replace(plan, mesh=mesh, zero=zero_stage))
        except UserError:
            continue
        row_text = "1 row is" if row_count == 1 else f"{row_count} rows are"
        return mesh, f"with tensor:{mesh.tensor}, because {row_text} too few for all devices"
    mesh = meshes[0]
    if mesh.devices == len(devices):
        return mesh, ""
    full_shard_count = len(devices) // pipe_size
    advice = (
        f"; a batch that is a multiple of {full_shard_count * plan.microbatches} would use "
        f"{full_shard_count * pipe_size}"
    )
    row_text = "1 row" if row_count == 1 else f"{row_count} rows"
    return mesh, f"the most that divide {row_text}{advice}"
