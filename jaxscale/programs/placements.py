"""Bytes per device of every value of a traced program, without devices, from placements of the program's arguments.

A placement is the mesh axes along each dim of a value. Arguments and sharding constraints specify placements.
Products, elementwise operations and reshapes propagate them, as in XLA's partitioner (GSPMD, Xu et al. 2021,
arXiv:2105.04663).
This module has the part of that propagation that affects memory. If two operands of a product use the same mesh axis,
the activations keep it and the weight is gathered. Values are represented by their numbers in a `FlatProgram`.
"""

import dataclasses
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
from jaxscale.programs.flat import FlatProgram, Operation, carries, loop_parts
from jaxscale.sharding.partition import dim_axes

_FIXPOINT = 3
"""Maximum number of passes over a loop's body until its state has the same dims before and after."""
_SMALL = 2**16  # number of elements below which tiles hardly matter

_LIKE_FIRST_OPERAND = (
    "slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "dynamic_update_slice", "scatter", "scatter-add",
    "scatter_add", "scatter-mul",
)  # fmt: skip
"""Operations whose result has the placement of their first operand, in the dims whose size is the same."""

_PLACED_BY_READERS = (
    "transpose", "sharding_constraint", "convert_element_type", "reduce_precision", "mul", "add_any",
    "optimization_barrier",
)  # fmt: skip
"""Operations whose operands are computed where their result is needed."""


@dataclasses.dataclass(eq=False)
class Placements:
    """Mesh axes along the dims of a program's values.

    Args:
        program: the program whose values are placed.
        sizes: number of devices along each mesh axis.
        tiled: whether memory is tiled, as a TPU's is.
        dims: mesh axes along the dims of each value, by its number.
        gathered: bytes of gathered weights, by the index of the operation that reads them.
        summed: indices of products whose results are summed over devices of the fsdp axis.
        loops: placements in the body of each loop, by the loop's index among the operations.
        branches: placements in the branches of each `cond`, by its index among the operations.
    """

    program: FlatProgram
    sizes: Mapping[str, int]
    tiled: bool = False
    dims: dict[int, Dims] = dataclasses.field(default_factory=dict)
    gathered: dict[int, int] = dataclasses.field(default_factory=dict)
    summed: set[int] = dataclasses.field(default_factory=set)
    loops: dict[int, "Placements"] = dataclasses.field(default_factory=dict)
    branches: dict[int, "tuple[Placements, ...]"] = dataclasses.field(default_factory=dict)

    def ways(self, axes: Sequence[str]) -> int:
        """Return the number of parts into which mesh axes split a dim."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def bytes_of(self, aval: Any, dims: Dims, *, host: bool = False) -> int:
        """Return an abstract value's bytes per device in device memory, or with `host` in host memory; 0 elsewhere."""
        if in_host_memory(aval) != host:
            return 0
        unpadded_bytes = local_bytes(aval, dims, self.sizes)
        if not unpadded_bytes or not self.tiled or host:
            return unpadded_bytes
        return int(unpadded_bytes * padding(local_shape(aval.shape, dims, self.sizes)))


def in_host_memory(aval: Any) -> bool:
    """Return whether an abstract value is in host memory."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def padding(shape: Sequence[int]) -> float:
    """Return the factor by which tiles of 8 x 128 elements enlarge an array, along the best two of the last three dims.

    Example:
        >>> padding((8, 2048, 1024)), round(padding((64, 16, 257, 257)), 3), padding((2,))
        (1.0, 1.494, 1.0)
    """
    if len(shape) < 2 or math.prod(shape) < _SMALL:
        return 1.0
    last_sizes = shape[-3:]
    growth_128 = [-(-size // 128) * 128 / size for size in last_sizes]
    growth_8 = [-(-size // 8) * 8 / size for size in last_sizes]
    return min(growth_128[i] * growth_8[j] for i in range(len(last_sizes)) for j in range(len(last_sizes)) if i != j)


def place(
    program: FlatProgram, input_dims: Sequence[Dims], sizes: Mapping[str, int], *, tiled: bool = False
) -> Placements:
    """Place all values of a program; return their placements.

    Args:
        program: a flat program.
        input_dims: mesh axes along the dims of each input; inputs without an entry are unsharded.
        sizes: number of devices along each mesh axis.
        tiled: whether memory is tiled, as a TPU's is.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
        >>> program = flatten(jax.make_jaxpr(jnp.matmul)(x, w))
        >>> placements = place(program, [(("data",), ()), ((), ("tensor",))], {"data": 2, "tensor": 4})
        >>> placements.dims[program.outputs[0]]
        (('data',), ('tensor',))
    """
    placements = Placements(program, sizes, tiled)
    for value, dims in zip(program.inputs, input_dims, strict=False):
        placements.dims[value] = dims
    for value in program.inputs[len(input_dims) :]:
        placements.dims[value] = _unsharded(program.shapes[value])
    for index, operation in enumerate(program.operations):  # forwards, to the results
        output_dims = _output_dims(operation, index, placements)
        placements.dims |= zip(operation.outputs, output_dims, strict=True)
    for operation in reversed(program.operations):  # backwards, so that a value is computed where its reader needs it
        if operation.kind == "dot_general":
            _place_product_operands(operation, placements)
        elif operation.kind in _PLACED_BY_READERS:
            _place_operands(operation, placements)
    return placements


def _unsharded(aval: Any) -> Dims:
    """Return the dims of an abstract value that no mesh axis splits."""
    return ((),) * len(shape_of(aval))


def _operands(operation: Operation, placements: Placements) -> list[Any]:
    """Return the abstract value of each operand, or the operand itself if it is a literal."""
    shapes = placements.program.shapes
    inputs = enumerate(operation.inputs)
    return [operation.literals[index] if value is None else shapes[value] for index, value in inputs]


def _shards(placements: Placements, dims: Dims) -> int:
    """Return the number of shards of a value with these dims."""
    return math.prod(part_counts(dims, placements.sizes))


def _place_operands(operation: Operation, placements: Placements) -> None:
    """Place operands like the result, if that splits them into more shards."""
    program = placements.program
    for value, output in zip(operation.inputs, operation.outputs * len(operation.inputs), strict=False):
        if value is None or value in program.inputs:
            continue
        dims = placements.dims[output]
        if operation.kind == "transpose":
            permutation = operation.params["permutation"]
            dims = tuple(dims[permutation.index(dim)] for dim in range(len(permutation)))
        elif shape_of(program.shapes[value]) != shape_of(program.shapes[output]):
            continue
        if _shards(placements, dims) > _shards(placements, placements.dims[value]):
            placements.dims[value] = dims


def _place_product_operands(operation: Operation, placements: Placements) -> None:
    """Shard the unsharded dims of a product's operands like the linked dims of its result."""
    output, shapes = operation.outputs[0], [shape_of(operand) for operand in _operands(operation, placements)]
    for operand, dim, output_dim in _links(operation, shapes, placements.program.shapes[output].shape):
        value = operation.inputs[operand]
        if value is None or value in placements.program.inputs:
            continue
        dims, axes = placements.dims[value], placements.dims[output][output_dim]
        if not dims[dim] and not set(axes) & {axis for other_axes in dims for axis in other_axes}:
            placements.dims[value] = (*dims[:dim], axes, *dims[dim + 1 :])


def _output_dims(operation: Operation, index: int, placements: Placements) -> Sequence[Dims]:
    """Return the dims of an operation's results; record the bytes that it gathers, and whether it sums over devices."""
    operands = _operands(operation, placements)
    operand_dims = [
        _unsharded(operand) if value is None else placements.dims[value]
        for operand, value in zip(operands, operation.inputs, strict=True)
    ]
    kind, shapes = operation.kind, placements.program.shapes
    if kind in ("scan", "while"):
        output_dims = _place_loop(operation, index, operand_dims, placements)
        if operation.manual:  # slots and sums of a pipelined step start as zeros, placed as in the loop
            state_dims = zip(carries(operation), output_dims, strict=False)
            inputs = placements.program.inputs
            placements.dims |= {value: axes for value, axes in state_dims if value is not None and value not in inputs}
        return output_dims
    if kind == "sharding_constraint":
        return [dims_of(operation.params["sharding"], len(shapes[operation.outputs[0]].shape))]
    if operation.branches:
        return _place_branches(operation, index, operand_dims, placements)
    if kind == "enter":
        return [tuple(tuple(axis for axis in axes if axis not in operation.manual) for axes in operand_dims[0])]
    if kind == "leave":
        manual_axes = dim_axes(operation.params["spec"], len(operand_dims[0]))
        return [tuple((*manual, *axes) for manual, axes in zip(manual_axes, operand_dims[0], strict=True))]
    if kind == "shard_map":
        specs = operation.params["out_specs"]
        values_and_specs = zip(operation.outputs, specs, strict=True)
        return [dim_axes(spec, len(shapes[value].shape)) for value, spec in values_and_specs]
    if kind != "dot_general":
        return [_linked_dims(operation, operands, operand_dims, output, placements) for output in operation.outputs]
    dim_pairs = summed_dims(kind, operation.params)
    left_dims, right_dims = operand_dims
    summed_axes = {axis for left, right in dim_pairs for axis in left_dims[left] if axis in right_dims[right]}
    placements.gathered[index] = _gathered_bytes(operation, operands, operand_dims, summed_axes, placements)
    if "fsdp" in summed_axes:
        placements.summed.add(index)
    product_dims = _linked_dims(operation, operands, operand_dims, operation.outputs[0], placements)
    # the sum over an axis along which both operands are split removes it
    return [tuple(tuple(axis for axis in axes if axis not in summed_axes) for axes in product_dims)]


def _linked_dims(
    operation: Operation, operands: Sequence[Any], dims: Sequence[Dims], result: int, placements: Placements
) -> Dims:
    """Return a result's dims: each has the axes of the first sharded operand dim linked to it, without axes in use.

    `dims` has the dims of each operand, and `result` is the number of the result.
    """
    shape = shape_of(placements.program.shapes[result])
    shapes = [shape_of(operand) for operand in operands]
    operation_links = _links(operation, shapes, shape)
    if operation.kind == "dot_general":  # the larger operand keeps its axes
        operand_bytes = [placements.bytes_of(operand, axes) for operand, axes in zip(operands, dims, strict=True)]
        operation_links = sorted(operation_links, key=lambda link: -operand_bytes[link[0]])
    result_dims: list[Axes] = [()] * len(shape)
    used_axes: set[str] = set()
    for operand, dim, result_dim in operation_links:
        if result_dims[result_dim] or not dims[operand][dim]:
            continue
        axes = tuple(axis for axis in dims[operand][dim] if axis not in used_axes)
        # a group of reshaped dims keeps the axes of its first dim if they divide it
        if shapes[operand][dim] == shape[result_dim] or shape[result_dim] % placements.ways(axes) == 0:
            result_dims[result_dim] = axes
            used_axes.update(axes)
    return tuple(result_dims)


def _links(operation: Operation, shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Return the links between an operation's operands and a result; the first of several links to a dim counts."""
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
    for operand, shape in enumerate(shapes):
        if len(shape) == len(result_shape):
            yield from ((operand, dim, dim) for dim, size in enumerate(result_shape) if shape[dim] == size)


def _gather_links(params: Any, shapes: Sequence[Shape], result_shape: Shape) -> Iterable[DimLink]:
    """Yield a gather's links: gathered rows are placed like their indices, dims taken whole like the table's dims."""
    numbers = params["dimension_numbers"]
    table_shape, indices_shape = shapes[:2]
    row_dims = [dim for dim in range(len(result_shape)) if dim not in numbers.offset_dims]
    yield from ((1, dim, result_dim) for dim, result_dim in zip(range(len(indices_shape) - 1), row_dims, strict=False))
    table_dims = [dim for dim in range(len(table_shape)) if dim not in numbers.collapsed_slice_dims]
    for dim, result_dim in zip(table_dims, numbers.offset_dims, strict=False):
        if table_shape[dim] == result_shape[result_dim]:
            yield 0, dim, result_dim


def _place_loop(operation: Operation, index: int, dims: list[Dims], placements: Placements) -> list[Dims]:
    """Place a loop's body until its state has the same dims before and after it; return the loop's result dims.

    `dims` has the dims of each operand of the loop.
    """
    body = operation.loop
    assert body is not None
    sizes = _automatic_sizes(operation, placements)
    const_dims, state_dims, scanned_dims = map(list, loop_parts(operation, dims))
    scanned_dims = [operand_dims[1:] for operand_dims in scanned_dims]
    body_placements = place(body, [*const_dims, *state_dims, *scanned_dims], sizes, tiled=placements.tiled)
    for _ in range(_FIXPOINT):
        next_dims = [
            _unsharded(body.shapes[argument]) if value is None else body_placements.dims[value]
            for value, argument in zip(body.outputs[: len(state_dims)], body.inputs[len(const_dims) :], strict=False)
        ]
        merged_dims = [max(pair, key=partial(_shards, placements)) for pair in zip(state_dims, next_dims, strict=True)]
        if merged_dims == state_dims:
            break
        state_dims = merged_dims
        body_placements = place(body, [*const_dims, *state_dims, *scanned_dims], sizes, tiled=placements.tiled)
    placements.loops[index] = body_placements
    stacked_outputs = body.outputs[len(state_dims) :]
    stacked_dims = [((), *(body_placements.dims[value] if value is not None else ())) for value in stacked_outputs]
    return [*state_dims, *stacked_dims]


def _automatic_sizes(operation: Operation, placements: Placements) -> dict[str, int]:
    """Return the number of devices along each mesh axis that is not manual for an operation."""
    return {axis: size for axis, size in placements.sizes.items() if axis not in operation.manual}


def _place_branches(operation: Operation, index: int, dims: list[Dims], placements: Placements) -> list[Dims]:
    """Place the branches of a `cond`; return the dims of each result, from the branch that shards it most.

    `dims` has the dims of each operand of the `cond`, the first of which selects the branch.
    """
    sizes = _automatic_sizes(operation, placements)
    branch_placements = [place(branch, dims[1:], sizes, tiled=placements.tiled) for branch in operation.branches]
    placements.branches[index] = tuple(branch_placements)
    output_dims = []
    for output_index, value in enumerate(operation.outputs):
        outputs = [(placement, placement.program.outputs[output_index]) for placement in branch_placements]
        branch_dims = [placement.dims[output] for placement, output in outputs if output is not None]
        unsharded = _unsharded(placements.program.shapes[value])
        output_dims.append(max(branch_dims, key=partial(_shards, placements), default=unsharded))
    return output_dims


def _gathered_bytes(
    operation: Operation, operands: Sequence[Any], dims: Sequence[Dims], summed_axes: set[str], placements: Placements
) -> int:
    """Return the bytes of a product's operands that are gathered, because the other operand uses the same mesh axes.

    `dims` has the dims of both operands; `summed_axes` are the mesh axes that split a summed dim of both.
    """
    contracted_dims, batch_dims = operation.params["dimension_numbers"]
    gathered_bytes = 0
    for side, partner in ((0, 1), (1, 0)):
        bound_dims = (*contracted_dims[partner], *batch_dims[partner])
        free_axes = {axis for dim, axes in enumerate(dims[partner]) if dim not in bound_dims for axis in axes}
        gathered_dims = tuple(
            tuple(a for a in axes if a not in free_axes and (dim not in contracted_dims[side] or a in summed_axes))
            for dim, axes in enumerate(dims[side])
        )
        if gathered_dims != dims[side] and any("fsdp" in axes for axes in dims[side]):
            operand_bytes = placements.bytes_of(operands[side], gathered_dims)
            if operand_bytes <= placements.bytes_of(operands[partner], dims[partner]):
                gathered_bytes += operand_bytes
    return gathered_bytes
