"""Bytes per device of every value of a traced program, without devices, from placements of the program's arguments.

The placement of a value (`Dims`) lists the mesh axes along each of its dims; `dims`, `operand_dims` and similar names
stand for placements. Arguments and sharding constraints specify placements. Products, elementwise operations and
reshapes propagate placements, as in XLA's partitioner (GSPMD, Xu et al. 2021, arXiv:2105.04663). This module implements
the part of that propagation that affects memory. If two operands of a product use the same mesh axis, the activations
keep the axis and the weight is gathered. Values are represented by their numbers in a `FlatProgram`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.programs.dims import (
    Axes,
    DimLink,
    Dims,
    Shape,
    dims_of,
    links,
    local_bytes,
    local_shape,
    part_counts,
    shape_of,
    summed_dims,
)
from jaxscale.programs.elementwise import ELEMENTWISE
from jaxscale.programs.flat import LOOPS, FlatProgram, Operation, carries, loop_parts
from jaxscale.programs.tiles import TileDims, Tiles, padding
from jaxscale.sharding.partition import dim_axes

_FIXPOINT = 3
"""Maximum number of passes over a loop's body until the state has the same dims before and after a pass."""

_LIKE_FIRST_OPERAND = (
    "slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "dynamic_update_slice", "scatter", "scatter-add",
    "scatter_add", "scatter-mul",
)  # fmt: skip
"""Operations that place the result like their first operand, in the dims that have the same size in both."""

_PLACED_BY_READERS = ELEMENTWISE | {"transpose", "reshape", "sharding_constraint"}
"""Operations that place their operands like the result, which is placed where its readers need it."""


@dataclasses.dataclass(eq=False)
class Placements:
    """Mesh axes along the dims of a program's values.

    Args:
        program: a flat program.
        axis_sizes: number of devices along each mesh axis.
        tiles: the tiles that kernels prescribe; `None` if memory is not tiled, as on a GPU.
        dims: mesh axes along the dims of each value, by the value's number.
        gathered_bytes: bytes of gathered weights, by the index of the operation that reads them.
        summed_products: indices of the products with results that are summed over devices of the fsdp axis.
        loop_placements: placements in the body of each loop, by the loop's index among the operations.
        branch_placements: placements in the branches of each `cond`, by the `cond`'s index among the operations.
    """

    program: FlatProgram
    axis_sizes: Mapping[str, int]
    tiles: Tiles | None = None
    dims: dict[int, Dims] = dataclasses.field(default_factory=dict)
    gathered_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    summed_products: set[int] = dataclasses.field(default_factory=set)
    loop_placements: dict[int, "Placements"] = dataclasses.field(default_factory=dict)
    branch_placements: dict[int, "tuple[Placements, ...]"] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fixed_values(self) -> frozenset[int]:
        """The values whose placement the program specifies: its inputs, and the results of sharding constraints."""
        constraints = (operation for operation in self.program.operations if operation.kind == "sharding_constraint")
        return frozenset((*self.program.inputs, *(constraint.outputs[0] for constraint in constraints)))

    def part_count(self, axes: Sequence[str]) -> int:
        """Return the number of parts into which a dim with these mesh axes is split."""
        return math.prod(self.axis_sizes.get(axis, 1) for axis in axes)

    def bytes_of(self, aval: Any, dims: Dims, *, in_host: bool = False, tile_dims: TileDims | None = None) -> int:
        """Return the bytes per device of an abstract value in device memory, or in host memory with `in_host`.

        A value in the other memory has 0 bytes. `tile_dims` are the dims of prescribed tiles.
        """
        if in_host_memory(aval) != in_host:
            return 0
        unpadded_bytes = local_bytes(aval, dims, self.axis_sizes)
        if not unpadded_bytes or self.tiles is None or in_host:
            return unpadded_bytes
        return int(unpadded_bytes * padding(local_shape(aval.shape, dims, self.axis_sizes), tile_dims))

    def value_bytes(self, value: int) -> int:
        """Return the bytes per device of a value of the program in device memory."""
        tile_dims = None if self.tiles is None else self.tiles.dims_by_value.get(value)
        return self.bytes_of(self.program.avals[value], self.dims[value], tile_dims=tile_dims)


def in_host_memory(aval: Any) -> bool:
    """Return whether an abstract value is in host memory."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def place(
    program: FlatProgram, input_dims: Sequence[Dims], axis_sizes: Mapping[str, int], *, tiles: Tiles | None = None
) -> Placements:
    """Place all values of a program; return their placements.

    Args:
        program: a flat program.
        input_dims: mesh axes along the dims of each input; inputs without an entry are unsharded.
        axis_sizes: number of devices along each mesh axis.
        tiles: the tiles that kernels prescribe (`prescribed_tiles`); `None` if memory is not tiled, as on a GPU.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
        >>> program = flatten(jax.make_jaxpr(jnp.matmul)(x, w))
        >>> placements = place(program, [(("data",), ()), ((), ("tensor",))], {"data": 2, "tensor": 4})
        >>> placements.dims[program.outputs[0]]
        (('data',), ('tensor',))
    """
    placements = Placements(program, axis_sizes, tiles)
    for value, dims in zip(program.inputs, input_dims, strict=False):
        placements.dims[value] = dims
    for value in program.inputs[len(input_dims) :]:
        placements.dims[value] = _unsharded(program.avals[value])
    for index, operation in enumerate(program.operations):  # forward, from operands to results
        output_dims = _output_dims(operation, index, placements)
        placements.dims |= zip(operation.outputs, output_dims, strict=True)
    for index, operation in reversed(list(enumerate(program.operations))):
        # backward, so that a value is computed where its reader needs it
        if operation.kind == "dot_general":
            _place_product_operands(operation, placements)
        elif operation.kind in LOOPS:
            _place_loop_state(operation, index, placements)
        elif operation.kind == "enter":
            _place_entered(operation, placements)
        elif operation.kind in _PLACED_BY_READERS:
            _place_operands(operation, placements)
    return placements


def _unsharded(aval: Any) -> Dims:
    """Return the dims of an abstract value that no mesh axis splits."""
    return ((),) * len(shape_of(aval))


def _operand_avals(operation: Operation, placements: Placements) -> list[Any]:
    """Return the abstract value of each operand; for a literal, the literal."""
    avals = placements.program.avals
    return [
        operation.literals[index] if value is None else avals[value] for index, value in enumerate(operation.inputs)
    ]


def _operand_dims(operation: Operation, placements: Placements) -> list[Dims]:
    """Return the dims of each operand."""
    return [
        _unsharded(aval) if value is None else placements.dims[value]
        for aval, value in zip(_operand_avals(operation, placements), operation.inputs, strict=True)
    ]


def _shard_count(placements: Placements, dims: Dims) -> int:
    """Return the number of shards of a value with these dims."""
    return math.prod(part_counts(dims, placements.axis_sizes))


def _place_operands(operation: Operation, placements: Placements) -> None:
    """Place each operand like the result, if that splits the operand into more shards."""
    program = placements.program
    for value, output in zip(operation.inputs, operation.outputs * len(operation.inputs), strict=False):
        if value is None or value in placements.fixed_values:
            continue
        output_dims = operand_dims = placements.dims[output]
        if operation.kind == "transpose":
            permutation = operation.params["permutation"]
            operand_dims = tuple(output_dims[permutation.index(dim)] for dim in range(len(permutation)))
        elif operation.kind == "reshape":
            operand_dims = _reshaped_dims(operation, output_dims, placements)
        elif shape_of(program.avals[value]) != shape_of(program.avals[output]):
            continue
        if _shard_count(placements, operand_dims) > _shard_count(placements, placements.dims[value]):
            placements.dims[value] = operand_dims


def _reshaped_dims(operation: Operation, output_dims: Dims, placements: Placements) -> Dims:
    """Return the dims of a reshape's operand that place it like the result, as far as its dims split evenly."""
    operand, output = operation.inputs[0], operation.outputs[0]
    assert operand is not None, "a literal is not reshaped"
    operand_shape, output_shape = (
        shape_of(placements.program.avals[operand]),
        shape_of(placements.program.avals[output]),
    )
    operand_dims: list[Axes] = [()] * len(operand_shape)
    for _, dim, output_dim in links("reshape", operation.params, [operand_shape], output_shape) or ():
        if operand_shape[dim] % placements.part_count(output_dims[output_dim]) == 0:
            operand_dims[dim] = output_dims[output_dim]
    return tuple(operand_dims)


def _place_entered(operation: Operation, placements: Placements) -> None:
    """Place an array like its parts in a region over manual axes, if that splits the array into more shards."""
    value, part_dims = operation.inputs[0], placements.dims[operation.outputs[0]]
    if value is None or value in placements.fixed_values:
        return
    manual_dims = dim_axes(operation.params["spec"], len(part_dims))
    whole_dims = tuple((*manual_axes, *axes) for manual_axes, axes in zip(manual_dims, part_dims, strict=True))
    if _shard_count(placements, whole_dims) > _shard_count(placements, placements.dims[value]):
        placements.dims[value] = whole_dims


def _place_loop_state(operation: Operation, index: int, placements: Placements) -> None:
    """Place a loop's state, from before the loop to after it, where the readers of the final state need it."""
    body, body_dims = operation.loop_body, placements.loop_placements[index].dims
    assert body is not None
    initial_state = carries(operation)
    final_state = operation.outputs[: len(initial_state)]
    final_dims = [placements.dims[value] for value in final_state]
    operand_dims = _operand_dims(operation, placements)
    const_count = len(loop_parts(operation, operand_dims)[0])
    body_state = body.inputs[const_count : const_count + len(initial_state)]
    state_dims = [body_dims[value] for value in body_state]
    if final_dims != state_dims:
        state_dims = _place_loop(operation, index, operand_dims, placements, final_dims)[: len(initial_state)]
    for values in (final_state, initial_state):
        for value, dims in zip(values, state_dims, strict=True):
            if value is not None and value not in placements.program.inputs:
                placements.dims[value] = max(placements.dims[value], dims, key=partial(_shard_count, placements))


def _place_product_operands(operation: Operation, placements: Placements) -> None:
    """Shard the unsharded dims of a product's operands like the linked dims of its result."""
    output, shapes = operation.outputs[0], [shape_of(aval) for aval in _operand_avals(operation, placements)]
    for operand_index, dim, output_dim in _links(operation, shapes, placements.program.avals[output].shape):
        value = operation.inputs[operand_index]
        if value is None or value in placements.fixed_values:
            continue
        dims, axes = placements.dims[value], placements.dims[output][output_dim]
        if not dims[dim] and not set(axes) & {axis for other_axes in dims for axis in other_axes}:
            placements.dims[value] = (*dims[:dim], axes, *dims[dim + 1 :])


def _output_dims(operation: Operation, index: int, placements: Placements) -> Sequence[Dims]:
    """Return the dims of each result of an operation.

    In `placements`, record the bytes that the operation gathers, whether it sums over devices, and the placements
    inside it.
    """
    operand_avals, operand_dims = _operand_avals(operation, placements), _operand_dims(operation, placements)
    kind, avals = operation.kind, placements.program.avals
    if kind in ("scan", "while"):
        output_dims = _place_loop(operation, index, operand_dims, placements)
        if operation.manual_axes:  # slots and sums of a pipelined step start as zeros, placed as in the loop
            values_and_dims = zip(carries(operation), output_dims, strict=False)
            inputs = placements.program.inputs
            placements.dims |= {v: dims for v, dims in values_and_dims if v is not None and v not in inputs}
        return output_dims
    if kind == "sharding_constraint":
        return [dims_of(operation.params["sharding"], len(avals[operation.outputs[0]].shape))]
    if operation.branches:
        return _place_branches(operation, index, operand_dims, placements)
    if kind == "enter":
        return [tuple(tuple(axis for axis in axes if axis not in operation.manual_axes) for axes in operand_dims[0])]
    if kind == "leave":
        manual_dims = dim_axes(operation.params["spec"], len(operand_dims[0]))
        return [tuple((*manual_axes, *axes) for manual_axes, axes in zip(manual_dims, operand_dims[0], strict=True))]
    if kind == "shard_map":
        specs = operation.params["out_specs"]
        values_and_specs = zip(operation.outputs, specs, strict=True)
        return [dim_axes(spec, len(avals[value].shape)) for value, spec in values_and_specs]
    if kind != "dot_general":
        return [
            _linked_dims(operation, operand_avals, operand_dims, output, placements) for output in operation.outputs
        ]
    dim_pairs = summed_dims(kind, operation.params)
    left_dims, right_dims = operand_dims
    summed_axes = {axis for left, right in dim_pairs for axis in left_dims[left] if axis in right_dims[right]}
    placements.gathered_bytes[index] = _gathered_bytes(operation, operand_avals, operand_dims, summed_axes, placements)
    if "fsdp" in summed_axes:
        placements.summed_products.add(index)
    product_dims = _linked_dims(operation, operand_avals, operand_dims, operation.outputs[0], placements)
    # a mesh axis that splits a summed dim of both operands is absent from the sum
    return [tuple(tuple(axis for axis in axes if axis not in summed_axes) for axes in product_dims)]


def _linked_dims(
    operation: Operation,
    operand_avals: Sequence[Any],
    operand_dims: Sequence[Dims],
    result: int,
    placements: Placements,
) -> Dims:
    """Return the dims of a result; `result` is the number of the value.

    Each dim of the result gets the axes of the first sharded operand dim that is linked to it, except for axes that
    another dim of the result uses.
    """
    result_shape = shape_of(placements.program.avals[result])
    operand_shapes = [shape_of(aval) for aval in operand_avals]
    operation_links = _links(operation, operand_shapes, result_shape)
    if operation.kind == "dot_general":  # the larger operand keeps its axes
        operand_bytes = [
            placements.bytes_of(aval, dims) for aval, dims in zip(operand_avals, operand_dims, strict=True)
        ]
        operation_links = sorted(operation_links, key=lambda link: -operand_bytes[link[0]])
    result_dims: list[Axes] = [()] * len(result_shape)
    used_axes: set[str] = set()
    for operand_index, dim, result_dim in operation_links:
        if result_dims[result_dim] or not operand_dims[operand_index][dim]:
            continue
        axes = tuple(axis for axis in operand_dims[operand_index][dim] if axis not in used_axes)
        has_same_size = operand_shapes[operand_index][dim] == result_shape[result_dim]
        # a reshaped dim of another size keeps the axes if they split it evenly
        if has_same_size or result_shape[result_dim] % placements.part_count(axes) == 0:
            result_dims[result_dim] = axes
            used_axes.update(axes)
    return tuple(result_dims)


def _links(operation: Operation, shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Return the links between an operation's operands and a result; the first link to a dim counts."""
    kind, params = operation.kind, operation.params
    if kind == "gather":
        return _gather_links(params, shapes, result_shape)
    operation_links = links(kind, params, shapes, result_shape)
    if operation_links is None:
        return _same_dims(shapes[:1] if kind in _LIKE_FIRST_OPERAND else shapes, result_shape)
    # the kernel of a convolution is gathered
    return [link for link in operation_links if kind != "conv_general_dilated" or link[0] == 0]


def _same_dims(shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Yield the links of an elementwise operation: dims of the same size in operands of the result's rank."""
    for operand_index, shape in enumerate(shapes):
        if len(shape) == len(result_shape):
            yield from ((operand_index, dim, dim) for dim, size in enumerate(result_shape) if shape[dim] == size)


def _gather_links(params: Any, shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Yield a gather's links: from dims of the indices, and from those dims of the table that are taken whole."""
    dim_numbers = params["dimension_numbers"]
    table_shape, indices_shape = shapes[:2]
    row_dims = [dim for dim in range(len(result_shape)) if dim not in dim_numbers.offset_dims]
    yield from ((1, dim, result_dim) for dim, result_dim in zip(range(len(indices_shape) - 1), row_dims, strict=False))
    table_dims = [dim for dim in range(len(table_shape)) if dim not in dim_numbers.collapsed_slice_dims]
    for dim, result_dim in zip(table_dims, dim_numbers.offset_dims, strict=False):
        if table_shape[dim] == result_shape[result_dim]:
            yield 0, dim, result_dim


def _place_loop(
    operation: Operation,
    index: int,
    operand_dims: list[Dims],
    placements: Placements,
    final_dims: Sequence[Dims] | None = None,
) -> list[Dims]:
    """Place a loop's body until the loop's state has the same dims before and after it; return each result's dims.

    `final_dims` are the dims in which the final state is needed.
    """
    body = operation.loop_body
    assert body is not None
    axis_sizes = _automatic_sizes(operation, placements)
    const_dims, state_dims, stacked_operand_dims = map(list, loop_parts(operation, operand_dims))
    shard_count = partial(_shard_count, placements)
    if final_dims is not None:
        state_dims = [max(pair, key=shard_count) for pair in zip(state_dims, final_dims, strict=True)]
    slice_dims = [dims[1:] for dims in stacked_operand_dims]
    body_tiles = None if placements.tiles is None else placements.tiles.loop_tiles[index]
    body_placements = place(body, [*const_dims, *state_dims, *slice_dims], axis_sizes, tiles=body_tiles)
    for _ in range(_FIXPOINT):
        next_dims = [
            _unsharded(body.avals[argument]) if value is None else body_placements.dims[value]
            for value, argument in zip(body.outputs[: len(state_dims)], body.inputs[len(const_dims) :], strict=False)
        ]
        merged_dims = [max(pair, key=shard_count) for pair in zip(state_dims, next_dims, strict=True)]
        if merged_dims == state_dims:
            break
        state_dims = merged_dims
        body_placements = place(body, [*const_dims, *state_dims, *slice_dims], axis_sizes, tiles=body_tiles)
    placements.loop_placements[index] = body_placements
    stacked_outputs = body.outputs[len(state_dims) :]
    stacked_dims = [((), *(body_placements.dims[value] if value is not None else ())) for value in stacked_outputs]
    return [*state_dims, *stacked_dims]


def _automatic_sizes(operation: Operation, placements: Placements) -> dict[str, int]:
    """Return the number of devices along each mesh axis that is not one of an operation's manual axes."""
    return {axis: size for axis, size in placements.axis_sizes.items() if axis not in operation.manual_axes}


def _place_branches(operation: Operation, index: int, operand_dims: list[Dims], placements: Placements) -> list[Dims]:
    """Place the branches of a `cond`; return the dims of each result, from the branch that shards it most."""
    axis_sizes = _automatic_sizes(operation, placements)
    argument_dims = operand_dims[1:]  # the first operand selects the branch
    branch_tiles = (
        [None] * len(operation.branches) if placements.tiles is None else placements.tiles.branch_tiles[index]
    )
    branch_placements = [
        place(branch, argument_dims, axis_sizes, tiles=tiles)
        for branch, tiles in zip(operation.branches, branch_tiles, strict=True)
    ]
    placements.branch_placements[index] = tuple(branch_placements)
    output_dims = []
    for output_index, value in enumerate(operation.outputs):
        outputs = [(branch, branch.program.outputs[output_index]) for branch in branch_placements]
        branch_dims = [branch.dims[output] for branch, output in outputs if output is not None]
        unsharded_dims = _unsharded(placements.program.avals[value])
        output_dims.append(max(branch_dims, key=partial(_shard_count, placements), default=unsharded_dims))
    return output_dims


def _gathered_bytes(
    operation: Operation,
    operand_avals: Sequence[Any],
    operand_dims: Sequence[Dims],
    summed_axes: set[str],
    placements: Placements,
) -> int:
    """Return the bytes of a product's operands that are gathered because the other operand uses the same mesh axes.

    `summed_axes` are the mesh axes that split a summed dim of both operands.
    """
    contracted_dims, batch_dims = operation.params["dimension_numbers"]
    gathered_bytes = 0
    for side, other_side in ((0, 1), (1, 0)):  # indices of an operand and of the other one
        shared_dims = (*contracted_dims[other_side], *batch_dims[other_side])
        free_axes = {
            axis for dim, axes in enumerate(operand_dims[other_side]) if dim not in shared_dims for axis in axes
        }
        gathered_dims = tuple(
            tuple(a for a in axes if a not in free_axes and (dim not in contracted_dims[side] or a in summed_axes))
            for dim, axes in enumerate(operand_dims[side])
        )
        if gathered_dims != operand_dims[side] and any("fsdp" in axes for axes in operand_dims[side]):
            operand_bytes = placements.bytes_of(operand_avals[side], gathered_dims)
            if operand_bytes <= placements.bytes_of(operand_avals[other_side], operand_dims[other_side]):
                gathered_bytes += operand_bytes
    return gathered_bytes
