"""The mesh axes in a `PartitionSpec`, as one tuple of names for each dim.

An entry of a `PartitionSpec` may be `None`, a name or a tuple of names.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

DimAxes = tuple[tuple[str, ...], ...]
"""For each dim, the mesh axes that split it, starting with the slowest axis."""


def dim_axes(spec: Iterable[Any], rank: int = 0) -> DimAxes:
    """Return the mesh axes that split each dim of an array.

    Args:
        spec: a `PartitionSpec`, or its entries. If the spec leaves a dim to the compiler, the dim counts as whole.
        rank: number of dims of the array. Dims without an entry in `spec` are whole.

    Example:
        >>> dim_axes(PartitionSpec(("data", "fsdp"), None, "tensor"), 4)
        (('data', 'fsdp'), (), ('tensor',), ())
    """
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    return (*(axes if isinstance(axes, tuple) else () for axes in entries), *((),) * (rank - len(entries)))


def spec_of(axes_of_dims: Sequence[Sequence[str]]) -> PartitionSpec:
    """Return the `PartitionSpec` that splits each dim over given mesh axes: the inverse of `dim_axes`.

    Args:
        axes_of_dims: the mesh axes of each dim. The result has no entries for whole dims at the end.

    Example:
        >>> list(spec_of([("data", "fsdp"), (), ("tensor",), ()]))
        [('data', 'fsdp'), None, 'tensor']
    """
    entry_count = max((dim + 1 for dim, axes in enumerate(axes_of_dims) if axes), default=0)
    return PartitionSpec(
        *(tuple(axes) if len(axes) > 1 else next(iter(axes), None) for axes in axes_of_dims[:entry_count])
    )


def axes_of(spec: Iterable[Any]) -> tuple[str, ...]:
    """Return all mesh axes of a `PartitionSpec`, in the order of the dims."""
    return tuple(axis for axes in dim_axes(spec) for axis in axes)


def shard_count(mesh: Any, axes: Iterable[str]) -> int:
    """Return the number of shards into which these mesh axes split a dim."""
    return math.prod(mesh.shape[axis] for axis in axes)


def divisible_spec(spec: PartitionSpec, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Return `spec` for an array of this shape. Dims that the mesh axes cannot split evenly become whole.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> list(divisible_spec(PartitionSpec("data", "fsdp"), (6, 5), AbstractMesh((2, 4), ("data", "fsdp"))))
        ['data']
    """
    dim_sizes_and_axes = zip(shape, dim_axes(spec, len(shape)), strict=False)
    return spec_of([axes if dim_size % shard_count(mesh, axes) == 0 else () for dim_size, axes in dim_sizes_and_axes])
