"""Bytes of padding to tiles in a TPU's memory: XLA chooses an array's layout, except where a kernel prescribes it.

A TPU stores an array in tiles of 8 x 128 elements along two of its dims. XLA takes the dims that waste least, but the
operands and results of a Pallas kernel are tiled along their last two dims, so that heads of width 64 take twice their
bytes. Transposes and copies that lead to a kernel or come from one cost nothing, because XLA gives their other side the
same layout; the same holds for the arrays that a loop keeps for a kernel in its body.

TPU 7x multiplies arrays of two-byte types in tiles of 16 x 128 elements, but a program's arguments are in tiles of
8 x 128. XLA therefore copies each such argument that a product or a loop reads, as the weights of a plan whose
parameters are in two-byte types (`with_retiled_inputs`).
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.programs.flat import FlatProgram, Operation, loop_parts

TileDims = tuple[int, int]
"""The dims along which an array is divided into 8 and into 128 elements."""

SMALL_COUNT = 2**16
"""Number of elements below which padding to whole tiles is ignored."""

RETILE = "retile"
"""Kind of an operation that copies an argument, such as to tiles of another shape."""

RETILED_OPERANDS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "transpose", "reshape", "squeeze",
    "sharding_constraint", "optimization_barrier",
)  # fmt: skip
"""Operations whose operands are in tiles of 16 x 128 elements on TPU 7x, or that lead to such operations."""

SAME_LAYOUT = (
    "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast", "enter", "leave", "reduce_precision",
    "convert_element_type",
)  # fmt: skip
"""Operations whose operand and result have one layout."""


def padding(shape: Sequence[int], tile_dims: TileDims | None = None) -> float:
    """Return the factor by which padding to tiles of 8 x 128 elements enlarges an array.

    Args:
        shape: shape of the array on one device.
        tile_dims: dims of the tiles; `None` for those two of the last three dims that give the least factor.

    Example:
        >>> padding((8, 2048, 1024)), round(padding((64, 16, 257, 257)), 3), padding((2,))
        (1.0, 1.494, 1.0)
        >>> padding((16, 12, 512, 64)), padding((16, 12, 512, 64), (2, 3))
        (1.0, 2.0)
    """
    if len(shape) < 2 or math.prod(shape) < SMALL_COUNT:
        return 1.0
    last_dims = range(max(len(shape) - 3, 0), len(shape))
    pairs = [(i, j) for i in last_dims for j in last_dims if i != j] if tile_dims is None else [tile_dims]
    return min(_padded(shape[i], 8) * _padded(shape[j], 128) for i, j in pairs)


def _padded(size: int, multiple: int) -> float:
    """Return the factor by which rounding up to a multiple enlarges a dim."""
    return -(-size // multiple) * multiple / size


@dataclasses.dataclass(eq=False)
class Tiles:
    """The dims of the tiles of the values whose layout a kernel prescribes.

    Args:
        program: a flat program.
        dims_by_value: dims of the tiles, by the value's number.
        loop_tiles: tiles in the body of each loop, by the loop's index among the operations.
        branch_tiles: tiles in the branches of each `cond`, by the `cond`'s index among the operations.
    """

    program: FlatProgram
    dims_by_value: dict[int, TileDims] = dataclasses.field(default_factory=dict)
    loop_tiles: "dict[int, Tiles]" = dataclasses.field(default_factory=dict)
    branch_tiles: "dict[int, tuple[Tiles, ...]]" = dataclasses.field(default_factory=dict)


def kernel_tiles(program: FlatProgram) -> Tiles:
    """Return the tiles of the values of a program whose layout a kernel prescribes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.experimental import pallas as pl
        >>> from jaxscale.programs.flat import flatten
        >>> x = jnp.ones((4, 8, 2))
        >>> def copy(x_ref, y_ref):
        ...     y_ref[...] = x_ref[...]
        >>> kernel = pl.pallas_call(copy, out_shape=x)
        >>> program = flatten(jax.make_jaxpr(lambda x: kernel(x.transpose(0, 2, 1).reshape(x.shape)))(x))
        >>> sorted(kernel_tiles(program).dims_by_value.values())
        [(1, 2), (1, 2)]
    """
    tiles = Tiles(program)
    for index, operation in enumerate(program.operations):
        if operation.loop_body is not None:
            tiles.loop_tiles[index] = kernel_tiles(operation.loop_body)
            _prescribe_outside_loop(operation, tiles.loop_tiles[index], tiles)
        elif operation.branches:
            tiles.branch_tiles[index] = tuple(map(kernel_tiles, operation.branches))
        elif operation.kind == "pallas_call":
            operands = [value for value in operation.inputs if value is not None]
            for value in (*operands, *operation.outputs):
                rank = len(getattr(program.avals[value], "shape", ()))
                if rank >= 2:
                    tiles.dims_by_value[value] = (rank - 2, rank - 1)
    for operation in program.operations:  # from kernels to the readers of their results
        _prescribe_neighbor(operation, tiles, is_forward=True)
    for operation in reversed(program.operations):  # from kernels to what their operands are computed from
        _prescribe_neighbor(operation, tiles, is_forward=False)
    return tiles


def _prescribe_outside_loop(operation: Operation, body_tiles: Tiles, tiles: Tiles) -> None:
    """Give the arrays that a loop slices and stacks the layout of their slices in the loop's body."""
    body = operation.loop_body
    assert body is not None
    constants, states, stacks = loop_parts(operation, operation.inputs)
    slice_start = len(constants) + len(states)
    # each value outside, the value inside, and the number of dims that the one outside has more
    pairs = [
        *((value, body.inputs[index], 0) for index, value in enumerate((*constants, *states))),
        *((value, body.inputs[slice_start + index], 1) for index, value in enumerate(stacks)),
        *((value, body.outputs[index], int(index >= len(states))) for index, value in enumerate(operation.outputs)),
    ]
    for value, inner_value, added_dims in pairs:
        if value is not None and inner_value in body_tiles.dims_by_value:
            sublane_dim, lane_dim = body_tiles.dims_by_value[inner_value]
            tiles.dims_by_value.setdefault(value, (sublane_dim + added_dims, lane_dim + added_dims))


def _prescribe_neighbor(operation: Operation, tiles: Tiles, *, is_forward: bool) -> None:
    """Give the result of a transpose or a copy the layout of its operand, or the operand that of the result."""
    if operation.kind not in ("transpose", *SAME_LAYOUT) or operation.inputs[0] is None:
        return
    operand, result = operation.inputs[0], operation.outputs[0]
    source, target = (operand, result) if is_forward else (result, operand)
    if source not in tiles.dims_by_value or target in tiles.dims_by_value:
        return
    sublane_dim, lane_dim = tiles.dims_by_value[source]
    if operation.kind == "transpose":
        order: Sequence[int] = operation.params["permutation"]
        positions: Mapping[int, int] = {dim: position for position, dim in enumerate(order)}
        dim_of = positions.__getitem__ if is_forward else order.__getitem__
        sublane_dim, lane_dim = dim_of(sublane_dim), dim_of(lane_dim)
    tiles.dims_by_value[target] = (sublane_dim, lane_dim)


def with_retiled_inputs(program: FlatProgram) -> FlatProgram:
    """Return a program that copies each large input of a two-byte type before products and loops read it.

    Args:
        program: program of a step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> weight = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
        >>> program = flatten(jax.make_jaxpr(lambda x, w: (x.astype(w.dtype) @ w, w + 1))(jnp.ones((8, 512)), weight))
        >>> [operation.kind for operation in with_retiled_inputs(program).operations]
        ['convert_element_type', 'retile', 'dot_general', 'add']
    """
    inputs = [value for value in program.inputs if _is_retiled(program.avals[value])]
    copy_by_input = dict(zip(inputs, itertools.count(max(program.avals, default=0) + 1)))
    avals = program.avals | {copy: program.avals[value] for value, copy in copy_by_input.items()}
    operations: list[Operation] = []
    copied_inputs: set[int] = set()
    for operation in program.operations:
        if operation.loop_body is not None or operation.kind in RETILED_OPERANDS:
            for value in operation.inputs:
                if value in copy_by_input and value not in copied_inputs:
                    copied_inputs.add(value)
                    operations.append(Operation(RETILE, (value,), (copy_by_input[value],), {}))
            new_inputs = tuple(
                value if value is None else copy_by_input.get(value, value) for value in operation.inputs
            )
            operation = dataclasses.replace(operation, inputs=new_inputs)
        operations.append(operation)
    return dataclasses.replace(program, operations=operations, avals=avals)


def _is_retiled(aval: Any) -> bool:
    """Return whether an abstract value is a large array of a two-byte type."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return len(shape) >= 2 and math.prod(shape) >= SMALL_COUNT and getattr(dtype, "itemsize", 0) == 2
