"""Placements of arrays (the mesh axes along each dim), and the correspondence of dims of operands and results.

A dim of an operand corresponds to the dim of the result that has the same elements. A `DimLink` is such a pair of dims.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.sharding.partition import DimAxes as Placement
from jaxscale.sharding.partition import dim_axes
from jaxscale.trees import leaf_bytes

Axes = tuple[str, ...]
"""Names of the mesh axes along one dim."""
Shape = tuple[int, ...]
"""Number of elements along each dim."""
DimLink = tuple[int, int, int]
"""The index of an operand, one of the operand's dims, and the corresponding dim of the result."""

_LIKE_FIRST_OPERAND = (
    "slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "scatter", "scatter-add", "scatter_add",
    "scatter-mul",
)  # fmt: skip
"""Operations that place the result like their first operand, in the dims that have the same size in both."""


def placement_of(sharding: Any, rank: int) -> Placement:
    """Return the placement of an array with `rank` dims; no dim has axes unless `sharding` is a `NamedSharding`."""
    return dim_axes(getattr(sharding, "spec", None) or (), rank)[:rank]


def constraint_placement(params: Any, operand_placement: Placement) -> Placement:
    """Return the placement of the result of a sharding constraint.

    Args:
        params: parameters of the constraint's equation.
        operand_placement: placement of the operand, which dims that the constraint leaves to the compiler keep.
    """
    placement, open_dims = placement_of(params["sharding"], len(operand_placement)), params.get("unconstrained_dims")
    if not open_dims:
        return placement
    used_axes = {axis for axes in placement for axis in axes}
    kept_placement = without_axes(used_axes, operand_placement)
    return tuple(kept_placement[dim] if dim in open_dims else axes for dim, axes in enumerate(placement))


def without_axes(removed_axes: Collection[str], placement: Placement) -> Placement:
    """Return a placement without some mesh axes."""
    return tuple(tuple(axis for axis in axes if axis not in removed_axes) for axes in placement)


def joined_placement(first: Placement, second: Placement) -> Placement:
    """Return the placement of a value whose dims are split by the axes of one placement, then by those of another."""
    return tuple((*first_axes, *second_axes) for first_axes, second_axes in zip(first, second, strict=True))


def part_counts(placement: Placement, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the number of parts into which each dim is split.

    Args:
        placement: mesh axes along each dim.
        axis_sizes: number of devices along each mesh axis.

    Example:
        >>> part_counts((("data", "fsdp"), ()), {"data": 2, "fsdp": 4})
        (8, 1)
    """
    return tuple(math.prod(axis_sizes.get(axis, 1) for axis in axes) for axes in placement)


def local_shape(shape: Shape, placement: Placement, axis_sizes: Mapping[str, int]) -> Shape:
    """Return the shape of one device's part of an array; a dim that cannot be split evenly is padded."""
    return tuple(
        -(-dim_size // part_count)
        for dim_size, part_count in zip(shape, part_counts(placement, axis_sizes), strict=True)
    )


def local_bytes(aval: Any, placement: Placement, axis_sizes: Mapping[str, int]) -> int:
    """Return the bytes of one device's part of an array; 0 for an abstract value that is not an array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    element_count = math.prod(aval.shape)
    local_count = math.prod(local_shape(aval.shape, placement, axis_sizes))
    return -(-leaf_bytes(aval) * local_count // element_count) if element_count else 0


def shape_of(value: Any) -> Shape:
    """Return the shape of an abstract value or literal; `()` for a value without a shape, such as a token."""
    return getattr(value, "shape", ())


def in_host_memory(aval: Any) -> bool:
    """Return whether an abstract value is in host memory."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def dim_links(
    primitive: str, params: Any, operand_shapes: Sequence[Shape], result_shape: Shape
) -> list[DimLink] | None:
    """Return which operand dims correspond to which dims of an operation's result; `None` if there is no rule for it.

    There are rules for operations that rearrange, reduce or multiply their operands.

    Args:
        primitive: name of the operation.
        params: parameters of the primitive.
        operand_shapes: shapes of the operands.
        result_shape: shape of the result.

    Example:
        >>> dim_links("reshape", {}, [(4, 6, 5)], (24, 1, 5))  # the first dims of groups with the same elements
        [(0, 0, 0), (0, 2, 2)]
    """
    yield_links = _RULES.get(primitive)
    return None if yield_links is None else list(yield_links(params, operand_shapes, result_shape))


def links_of(primitive: str, params: Any, operand_shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Return which operand dims correspond to each dim of a result; if several do, the first takes precedence.

    Args:
        primitive: name of the primitive.
        params: parameters of the equation.
        operand_shapes: shape of each operand.
        result_shape: shape of the result.
    """
    if primitive == "gather":
        return gather_links(params, operand_shapes, result_shape)
    operation_links = dim_links(primitive, params, operand_shapes, result_shape)
    if operation_links is None:
        shapes = operand_shapes[:1] if primitive in _LIKE_FIRST_OPERAND else operand_shapes
        return _same_position_links(shapes, result_shape)
    # the kernel of a convolution is gathered
    return [link for link in operation_links if primitive != "conv_general_dilated" or link[0] == 0]


def _same_position_links(operand_shapes: Sequence[Shape], result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of an elementwise operation: same size, in operands of the result's rank."""
    for operand_index, shape in enumerate(operand_shapes):
        if len(shape) == len(result_shape):
            yield from ((operand_index, dim, dim) for dim, size in enumerate(result_shape) if shape[dim] == size)


def gather_links(params: Any, operand_shapes: Sequence[Shape], result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a gather: the indices' dims, and the table's dims that are gathered whole."""
    dim_numbers = params["dimension_numbers"]
    table_shape, indices_shape = operand_shapes[:2]
    batch_result_dims = [dim for dim in range(len(result_shape)) if dim not in dim_numbers.offset_dims]
    yield from (
        (1, dim, result_dim) for dim, result_dim in zip(range(len(indices_shape) - 1), batch_result_dims, strict=False)
    )
    whole_table_dims = [dim for dim in range(len(table_shape)) if dim not in dim_numbers.collapsed_slice_dims]
    for dim, result_dim in zip(whole_table_dims, dim_numbers.offset_dims, strict=False):
        if table_shape[dim] == result_shape[result_dim]:
            yield 0, dim, result_dim


def summed_dim_pairs(primitive: str, params: Any) -> list[tuple[int, int]]:
    """Return the dims that a matrix product or convolution sums over, as pairs (left dim, right dim)."""
    dim_numbers = params.get("dimension_numbers")
    if primitive == "dot_general":
        return list(zip(*dim_numbers[0], strict=True))
    return [(dim_numbers.lhs_spec[1], dim_numbers.rhs_spec[1])] if primitive == "conv_general_dilated" else []


def gathered_placement(
    params: Any, operand_placements: Sequence[Placement], side: int, summed_axes: Collection[str]
) -> Placement:
    """Return the placement of a matrix product's operand after it was gathered over the axes of the other operand.

    Args:
        params: parameters of the product's equation.
        operand_placements: placements of both operands.
        side: index of the operand.
        summed_axes: mesh axes that split a summed dim of both operands; they stay.
    """
    contracted_dims, batch_dims = params["dimension_numbers"]
    shared_dims = (*contracted_dims[1 - side], *batch_dims[1 - side])
    free_axes = {
        axis for dim, axes in enumerate(operand_placements[1 - side]) if dim not in shared_dims for axis in axes
    }
    return tuple(
        tuple(
            axis for axis in axes if axis not in free_axes and (dim not in contracted_dims[side] or axis in summed_axes)
        )
        for dim, axes in enumerate(operand_placements[side])
    )


def reshape_operand_placement(
    operand_shape: Shape, result_shape: Shape, result_placement: Placement, part_count: Callable[[Axes], int]
) -> Placement:
    """Return a placement of a reshape's operand: a dim that splits evenly is placed like its result dim."""
    axes_by_dim: list[Axes] = [()] * len(operand_shape)
    for _, dim, result_dim in _reshape_links({}, [operand_shape], result_shape):
        if operand_shape[dim] % part_count(result_placement[result_dim]) == 0:
            axes_by_dim[dim] = result_placement[result_dim]
    return tuple(axes_by_dim)


def gathered_bytes(
    params: Any,
    operand_avals: Sequence[Any],
    operand_placements: Sequence[Placement],
    summed_axes: Collection[str],
    bytes_of: Callable[[Any, Placement], int],
) -> int:
    """Return the bytes of a matrix product's operands that are gathered because the other operand uses their axes.

    Args:
        params: parameters of the product's equation.
        operand_avals: abstract values of both operands.
        operand_placements: placements of both operands.
        summed_axes: mesh axes that split a summed dim of both operands.
        bytes_of: function from an abstract value and a placement to the bytes per device.
    """
    total_bytes = 0
    for side, other_side in ((0, 1), (1, 0)):  # indices of an operand and of the other operand
        placement = gathered_placement(params, operand_placements, side, summed_axes)
        if placement != operand_placements[side] and any("fsdp" in axes for axes in operand_placements[side]):
            operand_bytes = bytes_of(operand_avals[side], placement)
            if operand_bytes <= bytes_of(operand_avals[other_side], operand_placements[other_side]):
                total_bytes += operand_bytes
    return total_bytes


def _broadcast_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a broadcast: those that keep their size."""
    for dim, result_dim in enumerate(map(int, params["broadcast_dimensions"])):
        if operand_shapes[0][dim] == result_shape[result_dim]:
            yield 0, dim, result_dim


def _transpose_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a transpose: each dim and its new position."""
    return ((0, dim, result_dim) for result_dim, dim in enumerate(params["permutation"]))


def _removal_links(param_name: str, params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of an operation that removes the dims listed in its parameter `param_name`."""
    remaining_dims = [dim for dim in range(len(operand_shapes[0])) if dim not in params[param_name]]
    return ((0, dim, result_dim) for result_dim, dim in enumerate(remaining_dims))


def _reshape_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a reshape: those with the same key (`_dim_keys`)."""
    result_dim_by_key = {key: result_dim for result_dim, key in enumerate(_dim_keys(result_shape))}
    return (
        (0, dim, result_dim_by_key[key])
        for dim, key in enumerate(_dim_keys(operand_shapes[0]))
        if key in result_dim_by_key
    )


def _dim_keys(shape: Shape) -> list[tuple[int, bool, int]]:
    """Return a unique key of each dim; dims before and after a reshape correspond if their keys are equal.

    A key has three elements: the product of the sizes of earlier dims, whether the dim's size is 1, and the number of
    earlier dims whose first two elements are the same.
    """
    keys: list[tuple[int, bool, int]] = []
    for dim, size in enumerate(shape):
        key_start = (math.prod(shape[:dim]), size == 1)
        keys.append((*key_start, sum(key[:2] == key_start for key in keys)))
    return keys


def _product_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a matrix product: its batch dims, then the dims that each operand keeps."""
    contracted_dims_by_operand, batch_dims_by_operand = params["dimension_numbers"]
    for result_dim, (left_dim, right_dim) in enumerate(zip(*batch_dims_by_operand, strict=True)):
        yield from ((0, left_dim, result_dim), (1, right_dim, result_dim))
    free_result_dims = itertools.count(len(batch_dims_by_operand[0]))
    for operand_index in (0, 1):
        for dim in range(len(operand_shapes[operand_index])):
            if dim not in contracted_dims_by_operand[operand_index] and dim not in batch_dims_by_operand[operand_index]:
                yield operand_index, dim, next(free_result_dims)


def _convolution_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a convolution: the input's batch dim, and the kernel's output channels."""
    dim_numbers = params["dimension_numbers"]
    yield 0, dim_numbers.lhs_spec[0], dim_numbers.out_spec[0]
    yield 1, dim_numbers.rhs_spec[0], dim_numbers.out_spec[1]


def _scatter_links(params: Any, operand_shapes: Any, result_shape: Shape) -> Iterator[DimLink]:
    """Yield the corresponding dims of a reduce-scatter; one that is not tiled removes the scattered dim."""
    scattered_dim, is_removed = params["scatter_dimension"], not params["tiled"]
    for dim in range(len(operand_shapes[0])):
        if not (is_removed and dim == scattered_dim):
            yield 0, dim, dim - (is_removed and dim > scattered_dim)


_reduction_links = partial(_removal_links, "axes")
_RULES: Mapping[str, Any] = {
    "broadcast_in_dim": _broadcast_links,
    "transpose": _transpose_links,
    "reshape": _reshape_links,
    "squeeze": partial(_removal_links, "dimensions"),
    **dict.fromkeys([f"reduce_{name}" for name in ("sum", "max", "min", "and", "or", "xor", "prod")], _reduction_links),
    **dict.fromkeys(["argmax", "argmin"], _reduction_links),
    "dot_general": _product_links,
    "conv_general_dilated": _convolution_links,
    "reduce_scatter": _scatter_links,
}
"""For each primitive, a function that yields the links from the params, operand shapes and result shape."""
