"""ZeRO as placement rules: which dim of each parameter the fsdp axis splits, and for which of its tensors.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.

| stage | master weights | optimizer state | gradients | compute weights |
|---|---|---|---|---|
| 0 | whole | whole | whole | whole |
| 1 | split, if they are copied to bf16 | split | whole | whole |
| 2 | split, if they are copied to bf16 | split | split | whole |
| 3 | split | split | split | split, gathered layer by layer |

HSDP applies the same rules to a mesh that also has a data or replica axis. Tensors are split over the fsdp axis and
replicated over the data or replica axis.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from jaxscale.sharding import place
from jaxscale.sharding.partition import dim_axes, shard_count, spec_of
from jaxscale.sharding.rules import AxisRules

ZeroStage = Literal[0, 1, 2, 3]

ZERO_AXIS = "fsdp"
"""The mesh axis over which ZeRO shards."""


def split_spec(
    shape: Sequence[int], names: Sequence[str | None] | None, spec: PartitionSpec, mesh: Any, axis: str = ZERO_AXIS
) -> PartitionSpec:
    """Return `spec` with one dim split over `axis` too, or unchanged if no dim can be split evenly.

    A dim can be split if its size on a device is a multiple of the size of the axis; the largest such dim is split. The
    stacked "layers" dim is never split, because a scan over layers would have to gather the whole stack.

    The fsdp axis prefers a dim of a matrix that no other axis splits. Beside a data axis, XLA gathers a dim that fsdp
    and tensor both split over both of them, and all-reduces its gradient. Two kinds of weights take the largest dim
    all the same: tables, whose first dim is the vocabulary, because XLA would send whole batches of activations; and
    those of more than two dims, such as experts, because XLA:GPU would transpose their whole stack.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        spec: placement before this split, such as that of tensor parallelism.
        mesh: the mesh.
        axis: mesh axis over which to split.
    """
    axis_size, axes_of_dims = mesh.shape[axis], dim_axes(spec, len(shape))
    if axis_size == 1 or any(axis in axes for axes in axes_of_dims):
        return spec
    local_shape = [dim_size // shard_count(mesh, axes) for dim_size, axes in zip(shape, axes_of_dims, strict=True)]
    dim_names = tuple(names or (None,) * len(shape))
    candidate_dims = [
        dim for dim, dim_size in enumerate(local_shape) if dim_size % axis_size == 0 and dim_names[dim] != "layers"
    ]
    if not candidate_dims:
        return spec
    inner_names = [name for name in dim_names if name != "layers"]
    is_matrix = len(inner_names) == 2 and inner_names[0] != "vocab"
    prefers_unsplit = is_matrix and axis == ZERO_AXIS
    dim = max(candidate_dims, key=lambda dim: (prefers_unsplit and not axes_of_dims[dim], local_shape[dim], dim))
    return spec_of([*axes_of_dims[:dim], (*axes_of_dims[dim], axis), *axes_of_dims[dim + 1 :]])


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Return a PartitionSpec without one of its mesh axes.

    Example:
        >>> list(without_axis(PartitionSpec("tensor", ("fsdp", "pipe")), "fsdp"))
        ['tensor', 'pipe']
    """
    return spec_of([tuple(name for name in axes if name != axis) for axes in dim_axes(spec)])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of the tensors that belong to one parameter.

    Args:
        master: placement of the parameter between steps.
        state: placement of optimizer state that has the parameter's shape.
        gradient: placement of the gradient that the optimizer reads.
        compute: placement of the copy of the parameter that the forward and backward passes read.
    """

    master: PartitionSpec
    state: PartitionSpec
    gradient: PartitionSpec
    compute: PartitionSpec


def placement(
    shape: Sequence[int],
    names: Sequence[str | None] | None,
    stage: ZeroStage,
    has_copy: bool,
    mesh: Any,
    rules: AxisRules,
) -> Placement:
    """Return the placements of a parameter's tensors for a ZeRO stage.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        stage: ZeRO stage, from 0 to 3.
        has_copy: whether the step computes with a lower-precision copy of float32 master weights.
        mesh: the mesh.
        rules: mesh axes of each logical axis.
    """
    unsplit_spec = PartitionSpec() if names is None else place.spec(shape, names, mesh, rules)
    sharded_spec = split_spec(shape, names, unsplit_spec, mesh)
    return Placement(
        master=sharded_spec if stage == 3 or (stage > 0 and has_copy) else unsplit_spec,
        state=sharded_spec if stage > 0 else unsplit_spec,
        gradient=sharded_spec if stage > 1 else unsplit_spec,
        compute=sharded_spec if stage == 3 else unsplit_spec,
    )


def split_further(coarse_placement: Placement, axis: str, shape: Sequence[int], mesh: Any) -> Placement:
    """Return a placement in which master weights, optimizer state and gradient are also split over `axis`.

    A tensor without a dim that can be split evenly stays unchanged. The tensors are split along the same dim, and over
    the additional axis first. So each shard of the most finely split tensor lies within a shard of every other tensor.
    Otherwise XLA would exchange shards in every step, even over a slow axis.

    Args:
        coarse_placement: the placement without the additional axis.
        axis: mesh axis over which to split.
        shape: shape of the parameter.
        mesh: the mesh.
    """
    spec_by_field = {field: getattr(coarse_placement, field) for field in ("master", "state", "gradient")}
    state_spec = split_spec(shape, None, coarse_placement.state, mesh, axis)
    old_axes_of_dims, new_axes_of_dims = dim_axes(coarse_placement.state, len(shape)), dim_axes(state_spec, len(shape))
    dim = next((dim for dim in range(len(shape)) if old_axes_of_dims[dim] != new_axes_of_dims[dim]), None)
    if dim is None:  # the state has no such dim, but a tensor that is split less finely may have one
        split_spec_by_field = {
            field: split_spec(shape, None, spec, mesh, axis) for field, spec in spec_by_field.items()
        }
    else:
        split_spec_by_field = {field: _split_first(spec, dim, axis) for field, spec in spec_by_field.items()}
    return dataclasses.replace(coarse_placement, **split_spec_by_field)


def _split_first(spec: PartitionSpec, dim: int, axis: str) -> PartitionSpec:
    """Return `spec` with the dim at index `dim` split over `axis` first, and then over the dim's other axes."""
    axes_of_dims = dim_axes(spec, dim + 1)
    return spec_of([*axes_of_dims[:dim], (axis, *axes_of_dims[dim]), *axes_of_dims[dim + 1 :]])


def stack_placement(tensor_placement: Placement, axis: str) -> Placement:
    """Return the placement of a stack of tensors: `axis` splits the stack, `tensor_placement` places each tensor.

    Example:
        >>> spec = PartitionSpec("tensor")
        >>> list(stack_placement(Placement(spec, spec, spec, spec), "pipe").master)
        ['pipe', 'tensor']
    """
    field_names = (field.name for field in dataclasses.fields(Placement))
    return Placement(**{field: PartitionSpec(axis, *getattr(tensor_placement, field)) for field in field_names})
