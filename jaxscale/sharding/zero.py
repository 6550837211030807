"""ZeRO as placement rules: the dim of each parameter that the fsdp axis splits, and the placement of a step's tensors.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.

| stage | master weights | optimizer state | gradients | compute weights |
|---|---|---|---|---|
| 0 | whole | whole | whole | whole |
| 1 | split, if they are copied to bf16 | split | whole | whole |
| 2 | split, if they are copied to bf16 | split | split | whole |
| 3 | split | split | split | split, gathered layer by layer |

HSDP applies the same rules to a mesh that also has a data or replica axis: split inside, replicated across.
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


def split(
    shape: Sequence[int], names: Sequence[str | None] | None, spec: PartitionSpec, mesh: Any, axis: str = ZERO_AXIS
) -> PartitionSpec:
    """Return `spec` with one dim split over `axis`, or unchanged if no dim can be split evenly.

    Of the dims whose size on a device is a multiple of the axis, the largest one is split. The stacked "layers" dim is
    never split, because a scan over layers would have to gather all of it.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        spec: placement before ZeRO (tensor parallelism).
        mesh: the mesh.
        axis: mesh axis to split over.
    """
    axis_size, axes_of_dims = mesh.shape[axis], dim_axes(spec, len(shape))
    if axis_size == 1 or any(axis in axes for axes in axes_of_dims):
        return spec
    local_shape = [size // shard_count(mesh, axes) for size, axes in zip(shape, axes_of_dims, strict=True)]
    is_stack_dim = [name == "layers" for name in names or ()] or [False] * len(shape)
    candidate_dims = [dim for dim, size in enumerate(local_shape) if size % axis_size == 0 and not is_stack_dim[dim]]
    if not candidate_dims:
        return spec
    dim = max(candidate_dims, key=lambda dim: (local_shape[dim], dim))
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
        master: the parameter between steps.
        state: optimizer state of the parameter's shape.
        gradient: input of the optimizer.
        compute: the copy that the forward and backward passes read.
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
    """Return the placement of a parameter's tensors under a ZeRO stage.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        stage: ZeRO stage.
        has_copy: whether the step computes with a lower-precision copy of float32 master weights.
        mesh: the mesh.
        rules: mesh axes per logical axis.
    """
    unsplit_spec = PartitionSpec() if names is None else place.spec(shape, names, mesh, rules)
    split_spec = split(shape, names, unsplit_spec, mesh)
    return Placement(
        master=split_spec if stage == 3 or (stage > 0 and has_copy) else unsplit_spec,
        state=split_spec if stage > 0 else unsplit_spec,
        gradient=split_spec if stage > 1 else unsplit_spec,
        compute=split_spec if stage == 3 else unsplit_spec,
    )


def split_further(coarse_placement: Placement, axis: str, shape: Sequence[int], mesh: Any) -> Placement:
    """Return a placement with all but the compute copy split over one more axis, if a dim can be split evenly.

    All are split along the same dim, and over the new axis first, so that a shard of the finest placement lies within a
    shard of the others. If not, XLA would exchange shards in every step, even over a slow axis.

    Args:
        coarse_placement: the placement without the axis.
        axis: mesh axis to split over.
        shape: shape of the parameter.
        mesh: the mesh.
    """
    spec_by_field = {field: getattr(coarse_placement, field) for field in ("master", "state", "gradient")}
    split_state = split(shape, None, coarse_placement.state, mesh, axis)
    dims_before, dims_after = dim_axes(coarse_placement.state, len(shape)), dim_axes(split_state, len(shape))
    dim = next((dim for dim in range(len(shape)) if dims_before[dim] != dims_after[dim]), None)
    if dim is None:  # a coarser placement may have a dim that can be split evenly
        split_specs = {field: split(shape, None, spec, mesh, axis) for field, spec in spec_by_field.items()}
    else:
        split_specs = {field: _split_first(spec, dim, axis) for field, spec in spec_by_field.items()}
    return dataclasses.replace(coarse_placement, **split_specs)


def _split_first(spec: PartitionSpec, dim: int, axis: str) -> PartitionSpec:
    """Return a PartitionSpec with a dim split over one more axis, ahead of the axes that split it already."""
    dims = dim_axes(spec, dim + 1)
    return spec_of([*dims[:dim], (axis, *dims[dim]), *dims[dim + 1 :]])


def stacked_over(tensor_placement: Placement, axis: str) -> Placement:
    """Return the placement of a stack of tensors with this placement; the stack's first dim is split over `axis`.

    Example:
        >>> spec = PartitionSpec("tensor")
        >>> list(stacked_over(Placement(spec, spec, spec, spec), "pipe").master)
        ['pipe', 'tensor']
    """
    fields = (field.name for field in dataclasses.fields(Placement))
    return Placement(**{field: PartitionSpec(axis, *getattr(tensor_placement, field)) for field in fields})
