"""Mesh axes along the dims of arrays, and the dims of operands and results that hold the same elements."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.sharding.partition import DimAxes as Dims
from jaxscale.sharding.partition import dim_axes
from jaxscale.trees import leaf_bytes

Axes = tuple[str, ...]
Shape = tuple[int, ...]
DimLink = tuple[int, int, int]
"""Index of an operand, one of its dims, and the dim of the result with the same elements."""


def dims_of(sharding: Any, rank: int) -> Dims:
    """Mesh axes along the dims of an array with a `NamedSharding`; unsharded for any other sharding."""
    return dim_axes(getattr(sharding, "spec", None) or (), rank)[:rank]


def parts(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Number of parts into which each dim is split.

    Args:
        dims: mesh axes of each dim.
        sizes: devices along each mesh axis.

    Example:
        >>> parts((("data", "fsdp"), ()), {"data": 2, "fsdp": 4})
        (8, 1)
    """
    return tuple(math.prod(sizes.get(axis, 1) for axis in axes) for axes in dims)


def local_shape(shape: Shape, dims: Dims, sizes: Mapping[str, int]) -> Shape:
    """Shape of one device's part of an array; dims that do not divide are padded."""
    return tuple(-(-size // count) for size, count in zip(shape, parts(dims, sizes), strict=True))


def local_bytes(aval: Any, dims: Dims, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's part of an array; 0 for an abstract value that is no array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    elements = math.prod(aval.shape)
    return -(-leaf_bytes(aval) * math.prod(local_shape(aval.shape, dims, sizes)) // elements) if elements else 0


def shape_of(value: Any) -> Shape:
    """Shape of a value, abstract or literal; `()` if it has none, as a token."""
    return getattr(value, "shape", ())


def links(primitive: str, params: Any, shapes: Sequence[Shape], result: Shape) -> list[DimLink] | None:
    """The linked dims of an operation that rearranges, reduces or multiplies its operands; `None` for any other.

    Args:
        primitive: name of the operation.
        params: of the primitive.
        shapes: of the operands.
        result: shape of the result.

    Example:
        >>> links("reshape", {}, [(4, 6, 5)], (24, 1, 5))  # the first dims of each group with the same elements
        [(0, 0, 0), (0, 2, 2)]
    """
    rule = _RULES.get(primitive)
    return None if rule is None else list(rule(params, shapes, result))


def summed_dims(primitive: str, params: Any) -> list[tuple[int, int]]:
    """Pairs of dims of the two operands that a product or convolution sums over."""
    numbers = params.get("dimension_numbers")
    if primitive == "dot_general":
        return list(zip(*numbers[0], strict=True))
    return [(numbers.lhs_spec[1], numbers.rhs_spec[1])] if primitive == "conv_general_dilated" else []


def _broadcast(params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    for dim, target in enumerate(map(int, params["broadcast_dimensions"])):
        if shapes[0][dim] == result[target]:
            yield 0, dim, target


def _transpose(params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    return ((0, dim, target) for target, dim in enumerate(params["permutation"]))


def _without(removed: str, params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    """Links of an operation that removes the dims of its parameter `removed`."""
    remaining_dims = [dim for dim in range(len(shapes[0])) if dim not in params[removed]]
    return ((0, dim, target) for target, dim in enumerate(remaining_dims))


def _reshape(params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    """Dims before which both shapes have the same product: equal ones, or the first of two groups with one product."""
    targets = {place: target for target, place in enumerate(_places(result))}
    return ((0, dim, targets[place]) for dim, place in enumerate(_places(shapes[0])) if place in targets)


def _places(shape: Shape) -> list[tuple[int, bool, int]]:
    """For each dim, the product of the dims before it, whether its size is 1, and its number among such dims there."""
    places: list[tuple[int, bool, int]] = []
    for dim, size in enumerate(shape):
        before, is_one = math.prod(shape[:dim]), size == 1
        places.append((before, is_one, sum(place[:2] == (before, is_one) for place in places)))
    return places


def _product(params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    contracted, batched = params["dimension_numbers"]
    for target, (left, right) in enumerate(zip(*batched, strict=True)):
        yield from ((0, left, target), (1, right, target))
    free_targets = itertools.count(len(batched[0]))
    for side in (0, 1):
        for dim in range(len(shapes[side])):
            if dim not in contracted[side] and dim not in batched[side]:
                yield side, dim, next(free_targets)


def _convolution(params: Any, shapes: Any, result: Shape) -> Iterator[DimLink]:
    numbers = params["dimension_numbers"]
    yield 0, numbers.lhs_spec[0], numbers.out_spec[0]
    yield 1, numbers.rhs_spec[0], numbers.out_spec[1]


_reduce = partial(_without, "axes")
_RULES: Mapping[str, Any] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": partial(_without, "dimensions"),
    **dict.fromkeys([f"reduce_{name}" for name in ("sum", "max", "min", "and", "or", "xor", "prod")], _reduce),
    **dict.fromkeys(["argmax", "argmin"], _reduce),
    "dot_general": _product,
    "conv_general_dilated": _convolution,
}
