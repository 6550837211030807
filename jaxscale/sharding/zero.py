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
    shape: Sequence[int], names: Sequence[str | None] | None, whole: PartitionSpec, mesh: Any, axis: str = ZERO_AXIS
) -> PartitionSpec:
    """`whole` with one dim split over `axis`, or `whole` itself if no dim can be split evenly.

    The dim that is largest on a device is split, among those whose size there is a multiple of the axis.

    The stacked "layers" dim is never split: a scan over layers would have to gather all of it.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        whole: placement before ZeRO (tensor parallelism).
        mesh: the mesh.
        axis: mesh axis to split over.
    """
    count, axes_of_dims = mesh.shape[axis], dim_axes(whole, len(shape))
    if count == 1 or any(axis in axes for axes in axes_of_dims):
        return whole
    local_shape = [size // shard_count(mesh, axes) for size, axes in zip(shape, axes_of_dims, strict=True)]
    is_stack_dim = [name == "layers" for name in names or ()] or [False] * len(shape)
    candidate_dims = [dim for dim, size in enumerate(local_shape) if size % count == 0 and not is_stack_dim[dim]]
    if not candidate_dims:
        return whole
    dim = max(candidate_dims, key=lambda dim: (local_shape[dim], dim))
    return spec_of([*axes_of_dims[:dim], (*axes_of_dims[dim], axis), *axes_of_dims[dim + 1 :]])


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """A PartitionSpec without one mesh axis.

    Example:
        >>> list(without(PartitionSpec("tensor", ("fsdp", "pipe")), "fsdp"))
        ['tensor', 'pipe']
    """
    return spec_of([tuple(name for name in axes if name != axis) for axes in dim_axes(spec)])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of the tensors that belong to one parameter.

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
    """Placement of a parameter's tensors under a ZeRO stage.

    Args:
        shape: shape of the parameter.
        names: logical axis of each dim; `None` for a parameter without names.
        stage: ZeRO stage.
        has_copy: whether the step computes with a lower-precision copy of float32 master weights.
        mesh: the mesh.
        rules: mesh axes per logical axis.
    """
    unsplit = PartitionSpec() if names is None else place.spec(shape, names, mesh, rules)
    split_spec = split(shape, names, unsplit, mesh)
    return Placement(
        master=split_spec if stage == 3 or (stage > 0 and has_copy) else unsplit,
        state=split_spec if stage > 0 else unsplit,
        gradient=split_spec if stage > 1 else unsplit,
        compute=split_spec if stage == 3 else unsplit,
    )


def over(old: Placement, axis: str, shape: Sequence[int], mesh: Any) -> Placement:
    """A placement with all but the compute copy split over one more axis, if a dim can be split evenly.

    All are split along the same dim, and over the new axis first, so that a shard of the finest placement lies within a
    shard of the others: otherwise XLA would exchange shards in every step, over a slow axis too.

    Args:
        old: the placement without the axis.
        axis: mesh axis to split over.
        shape: shape of the parameter.
        mesh: the mesh.
    """
    spec_of_field = {field: getattr(old, field) for field in ("master", "state", "gradient")}
    new_state = split(shape, None, old.state, mesh, axis)
    old_dims, new_dims = dim_axes(old.state, len(shape)), dim_axes(new_state, len(shape))
    dim = next((dim for dim in range(len(shape)) if old_dims[dim] != new_dims[dim]), None)
    if dim is None:  # a coarser placement may have a dim that can be split evenly
        new_specs = {field: split(shape, None, spec, mesh, axis) for field, spec in spec_of_field.items()}
    else:
        new_specs = {field: _split_first(spec, dim, axis) for field, spec in spec_of_field.items()}
    return dataclasses.replace(old, **new_specs)


def _split_first(spec: PartitionSpec, dim: int, axis: str) -> PartitionSpec:
    """A PartitionSpec with a dim split over one more axis, ahead of the axes that split it already."""
    dims = dim_axes(spec, dim + 1)
    return spec_of([*dims[:dim], (axis, *dims[dim]), *dims[dim + 1 :]])


def stacked_over(single: Placement, axis: str) -> Placement:
    """The placement of a stack of tensors, from that of one: the stack's first dim is split over a mesh axis.

    Example:
        >>> spec = PartitionSpec("tensor")
        >>> list(stacked_over(Placement(spec, spec, spec, spec), "pipe").master)
        ['pipe', 'tensor']
    """
    fields = (field.name for field in dataclasses.fields(Placement))
    return Placement(**{field: PartitionSpec(axis, *getattr(single, field)) for field in fields})
