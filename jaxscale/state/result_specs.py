"""Placements of a function's results over mesh axes, as XLA propagates them from its arguments.

An array that a step returns and the next step takes should be split between steps as it is within them. Otherwise every
device keeps the parts of others, and each step gathers the array at its end.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.programs.dims import Placement, placement_of
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.typing import PyTree


def split_as_results(
    function: Callable[..., PyTree], arguments: tuple[PyTree, ...], results: PyTree, sharding: NamedSharding
) -> PyTree[jax.ShapeDtypeStruct]:
    """Return abstract arrays whose dims, but for the first, are split as those of a function's results.

    A dim that its axes cannot split evenly stays whole. The function is traced, not run; if the first dims are split
    over all axes of the mesh, it is not traced either.

    Args:
        function: function of the arguments.
        arguments: trees of abstract arrays; an array without a sharding is whole.
        results: shapes and dtypes of the results.
        sharding: sharding of the first dim of each result.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("pipe", "tensor"))
        >>> in_columns = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        >>> weights = jax.ShapeDtypeStruct((2, 4, 6), "float32", sharding=in_columns)
        >>> stages = NamedSharding(mesh, PartitionSpec("pipe"))
        >>> tuple(split_as_results(lambda weights: weights + 1, (weights,), weights, stages).sharding.spec)
        ('pipe', None, 'tensor')
    """
    leaves, treedef = jax.tree.flatten(results)
    axis_sizes = sharding.mesh.shape
    (first_axes,) = placement_of(sharding, 1)
    placements: list[Placement | None] = [None] * len(leaves)
    if any(size > 1 and axis not in first_axes for axis, size in axis_sizes.items()):
        program = flatten(jax.make_jaxpr(function)(*arguments))
        argument_leaves = jax.tree.leaves(arguments)
        input_placements = [placement_of(leaf.sharding, len(leaf.shape)) for leaf in argument_leaves]
        by_value = place(program, input_placements, axis_sizes).by_value
        placements = [None if value is None else by_value[value] for value in program.outputs]
    return treedef.unflatten(
        _split(leaf, placement or (), sharding) for leaf, placement in zip(leaves, placements, strict=True)
    )


def _split(leaf: jax.ShapeDtypeStruct, placement: Placement, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return an abstract array with this sharding of its first dim, and the others split over further axes.

    Args:
        leaf: shape and dtype of the array.
        placement: axes of each dim; empty if all but the first are whole.
        sharding: sharding of the first dim.
    """
    axis_sizes = sharding.mesh.shape
    (first_axes,) = placement_of(sharding, 1)
    axes_by_dim: list[tuple[str, ...] | None] = []
    for dim_size, axes in zip(leaf.shape[1:], placement[1:], strict=False):
        split_axes = tuple(axis for axis in axes if axis not in first_axes and axis_sizes[axis] > 1)
        is_even = dim_size % math.prod(axis_sizes[axis] for axis in split_axes) == 0
        axes_by_dim.append(split_axes if split_axes and is_even else None)
    while axes_by_dim and axes_by_dim[-1] is None:
        axes_by_dim.pop()
    spec = PartitionSpec(sharding.spec[0], *axes_by_dim)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(sharding.mesh, spec))
