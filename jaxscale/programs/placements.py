"""Bytes per device of every value of a traced program, without devices: placements propagated from value to value.

Arguments and sharding constraints specify placements; products, elementwise operations and reshapes propagate them, as
in XLA's partitioner (GSPMD, Xu et al. 2021, arXiv:2105.04663), of which this is the part that memory needs. Where two
operands use the same mesh axis, the activations keep it and the weight is gathered.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.compat import scan_counts
from jaxscale.programs.dims import (
    Dims,
    Link,
    Shape,
    dims_of,
    dims_of_spec,
    links,
    local_bytes,
    local_shape,
    parts,
    shape_of,
    summed_dims,
)
from jaxscale.programs.flat import FlatProgram, Operation, carries

_FIXPOINT = 3
_SMALL = 2**16  # elements; below this, tiles hardly matter

_UPDATES = (
    "slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "dynamic_update_slice", "scatter", "scatter-add",
    "scatter_add", "scatter-mul",
)  # fmt: skip
"""Operations whose result has the placement of their first operand, where dims have the same size."""

_FOLLOWED = (
    "transpose", "sharding_constraint", "convert_element_type", "reduce_precision", "mul", "add_any",
    "optimization_barrier",
)  # fmt: skip
"""Operations whose operands are computed where their result is needed."""


@dataclasses.dataclass(eq=False)
class Placements:
    """Mesh axes along the dims of a program's values.

    Args:
        sizes: devices along each mesh axis.
        tiled: memory is tiled, as a TPU's.
        dims: mesh axes of each value's dims.
        gathered: bytes of gathered weights, by the index of the operation that reads them.
        summed: indices of products whose results are summed over devices of the fsdp axis.
        loops: placements in a loop's body, by the index of the loop.
        branches: placements in the branches of a `cond`, by its index.
    """

    sizes: Mapping[str, int]
    tiled: bool = False
    dims: dict[int, Dims] = dataclasses.field(default_factory=dict)
    gathered: dict[int, int] = dataclasses.field(default_factory=dict)
    summed: set[int] = dataclasses.field(default_factory=set)
    loops: dict[int, "Placements"] = dataclasses.field(default_factory=dict)
    branches: dict[int, "tuple[Placements, ...]"] = dataclasses.field(default_factory=dict)

    def ways(self, axes: Sequence[str]) -> int:
        """Number of parts into which mesh axes split a dim."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def bytes_of(self, shape: Any, dims: Dims, *, host: bool = False) -> int:
        """Bytes per device of an abstract value in device memory, or in host memory with `host`; 0 if elsewhere."""
        if in_host_memory(shape) != host:
            return 0
        size = local_bytes(shape, dims, self.sizes)
        return (
            int(size * padding(local_shape(shape.shape, dims, self.sizes)))
            if size and self.tiled and not host
            else size
        )


def in_host_memory(shape: Any) -> bool:
    """Whether an abstract value is in host memory."""
    return getattr(getattr(shape, "memory_space", None), "name", "") == "Host"


def padding(shape: Sequence[int]) -> float:
    """Factor by which tiles enlarge an array in a TPU's memory: 8 x 128 of two of the last three dims.

    Example:
        >>> padding((8, 2048, 1024)), round(padding((64, 16, 257, 257)), 3), padding((2,))
        (1.0, 1.494, 1.0)
    """
    if len(shape) < 2 or math.prod(shape) < _SMALL:
        return 1.0
    inner = shape[-3:]
    lanes = [-(-size // 128) * 128 / size for size in inner]
    rows = [-(-size // 8) * 8 / size for size in inner]
    return min(lanes[i] * rows[j] for i in range(len(inner)) for j in range(len(inner)) if i != j)


def place(
    program: FlatProgram, input_dims: Sequence[Dims], sizes: Mapping[str, int], *, tiled: bool = False
) -> Placements:
    """Placements of all values of a program.

    Args:
        program: a flat program.
        input_dims: mesh axes of the dims of each of its inputs.
        sizes: devices along each mesh axis.
        tiled: memory is tiled, as a TPU's.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
        >>> program = flatten(jax.make_jaxpr(jnp.matmul)(x, w))
        >>> placements = place(program, [(("data",), ()), ((), ("tensor",))], {"data": 2, "tensor": 4})
        >>> placements.dims[program.outputs[0]]
        (('data',), ('tensor',))
    """
    placements = Placements(sizes, tiled)
    for value, dims in zip(program.inputs, input_dims, strict=False):
        placements.dims[value] = dims
    for value in program.inputs[len(input_dims) :]:
        placements.dims[value] = _unsharded(program.shapes[value])
    for index, operation in enumerate(program.operations):
        _forward(program, operation, index, placements)
    _backward(program, placements)
    return placements


def _unsharded(aval: Any) -> Dims:
    return ((),) * len(shape_of(aval))


def _backward(program: FlatProgram, placements: Placements) -> None:
    """Propagate placements from outputs back to inputs, so that a value is computed where its reader needs it."""
    arguments = set(program.inputs)
    for operation in reversed(program.operations):
        if operation.kind not in ("dot_general", *_FOLLOWED):
            continue
        for index, value in enumerate(operation.inputs):
            if value is None or value in arguments:
                continue
            if operation.kind == "dot_general":
                placements.dims[value] = _operand_dims(program, operation, index, placements)
                continue
            output = operation.outputs[index % len(operation.outputs)]
            output_dims, shape = placements.dims[output], shape_of(program.shapes[value])
            order = operation.params.get("permutation", range(len(shape)))
            if tuple(shape[dim] for dim in order) != shape_of(program.shapes[output]):
                continue
            dims = tuple(output_dims[order.index(dim)] for dim in range(len(shape)))
            if _shards(placements, dims) > _shards(placements, placements.dims[value]):
                placements.dims[value] = dims


def _operand_dims(program: FlatProgram, operation: Operation, index: int, placements: Placements) -> Dims:
    """Dims of an operand of a product, with the axes of the result's dims where the operand is unsharded."""
    result = operation.outputs[0]
    shapes = [None if value is None else shape_of(program.shapes[value]) for value in operation.inputs]
    dims = list(placements.dims[operation.inputs[index]])
    for operand, dim, result_dim in links("dot_general", operation.params, shapes, shape_of(program.shapes[result])):
        result_axes = placements.dims[result][result_dim]
        if operand == index and not dims[dim] and not {axis for axes in dims for axis in axes} & set(result_axes):
            dims[dim] = result_axes
    return tuple(dims)


def _shards(placements: Placements, dims: Dims) -> int:
    """Number of shards of a value."""
    return math.prod(parts(dims, placements.sizes))


def _forward(program: FlatProgram, operation: Operation, index: int, placements: Placements) -> None:
    """Propagate placements from an operation's operands to its results."""
    avals = [None if value is None else program.shapes[value] for value in operation.inputs]
    dims = [() if value is None else placements.dims[value] for value in operation.inputs]
    kind = operation.kind
    if kind in ("scan", "while"):
        output_dims = _loop(operation, index, dims, placements)
        if operation.manual:  # slots and sums of a pipelined step start as zeros, placed as in the loop
            states = zip(carries(operation), output_dims, strict=False)
            placements.dims |= {v: axes for v, axes in states if v is not None and v not in program.inputs}
    elif kind == "sharding_constraint":
        output_dims = [dims_of(operation.params["sharding"], len(program.shapes[operation.outputs[0]].shape))]
    elif operation.branches:
        output_dims = _cond(program, operation, index, dims, placements)
    elif kind == "enter":
        output_dims = [tuple(tuple(axis for axis in axes if axis not in operation.manual) for axes in dims[0])]
    elif kind == "leave":
        manual_axes = dims_of_spec(operation.params["spec"], len(dims[0]))
        output_dims = [tuple((*manual, *axes) for manual, axes in zip(manual_axes, dims[0], strict=True))]
    elif kind == "shard_map":
        output_dims = [
            dims_of_spec(spec, len(program.shapes[value].shape))
            for value, spec in zip(operation.outputs, operation.params["out_specs"], strict=True)
        ]
    else:
        if kind == "dot_general":
            placements.gathered[index] = _gathered_bytes(operation, avals, dims, placements)
            pairs = summed_dims(kind, operation.params)
            if any("fsdp" in set(dims[0][left]) & set(dims[1][right]) for left, right in pairs):
                placements.summed.add(index)
        output_dims = [_result_dims(operation, avals, dims, program.shapes[v], placements) for v in operation.outputs]
    for value, value_dims in zip(operation.outputs, output_dims, strict=True):
        placements.dims[value] = value_dims


def _result_dims(
    operation: Operation, avals: Sequence[Any], dims: Sequence[Dims], result: Any, placements: Placements
) -> Dims:
    """Dims of a result: the axes of linked dims of the operands, each axis once."""
    kind, params = operation.kind, operation.params
    shapes = [None if aval is None else shape_of(aval) for aval in avals]
    shape = shape_of(result)
    result_links = links(kind, params, shapes, shape)
    summed_axes: set[str] = set()
    if kind == "dot_general" and result_links is not None:
        # the larger operand keeps its axes; one along which both operands are summed is used up
        sizes = [placements.bytes_of(aval, axes) for aval, axes in zip(avals, dims, strict=True)]
        result_links = sorted(result_links, key=lambda link: -sizes[link[0]])
        summed_axes.update(*(set(dims[0][a]) & set(dims[1][b]) for a, b in summed_dims(kind, params)))
    elif kind == "conv_general_dilated" and result_links is not None:
        result_links = [link for link in result_links if link[0] == 0]  # the kernel is gathered
    elif kind == "gather":
        result_links = _gather_links(params, shapes, shape)
    elif result_links is None:
        result_links = _same_dims(shapes[:1] if kind in _UPDATES else shapes, shape)
    result_dims: list[tuple[str, ...]] = [()] * len(shape)
    used_axes: set[str] = set()
    for operand, dim, result_dim in result_links:
        axes = tuple(axis for axis in dims[operand][dim] if axis not in used_axes)
        # an equal dim has equal parts; one of a reshaped array may not divide
        fits = shapes[operand][dim] == shape[result_dim] or shape[result_dim] % placements.ways(axes) == 0
        if axes and not result_dims[result_dim] and fits:
            result_dims[result_dim] = axes
            used_axes.update(axes)
    return tuple(tuple(axis for axis in axes if axis not in summed_axes) for axes in result_dims)


def _same_dims(shapes: Sequence[Shape | None], result: Shape) -> Iterable[Link]:
    """Links of an elementwise operation."""
    for operand, shape in enumerate(shapes):
        if shape is not None and len(shape) == len(result):
            yield from ((operand, dim, dim) for dim in range(len(result)) if shape[dim] == result[dim])


def _gather_links(params: Any, shapes: Sequence[Shape | None], result: Shape) -> Iterable[Link]:
    """Gathered rows have the placement of their indices; dims taken whole have that of the table."""
    numbers = params["dimension_numbers"]
    table, indices = shapes[0] or (), shapes[1] or ()
    row_dims = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    yield from ((1, dim, target) for dim, target in zip(range(len(indices) - 1), row_dims, strict=False))
    table_dims = [dim for dim in range(len(table)) if dim not in numbers.collapsed_slice_dims]
    for dim, target in zip(table_dims, numbers.offset_dims, strict=False):
        if table[dim] == result[target]:
            yield 0, dim, target


def _loop(operation: Operation, index: int, dims: list[Dims], placements: Placements) -> list[Dims]:
    """Dims of a loop's results, with a state whose dims are the same before and after the body."""
    body = operation.loop
    assert body is not None
    if operation.kind == "scan":
        consts, carries = scan_counts(operation.params)
    else:
        dims = dims[operation.params["cond_nconsts"] :]
        consts = operation.params["body_nconsts"]
        carries = len(dims) - consts
    sizes = _automatic_sizes(operation, placements)
    xs = [operand_dims[1:] for operand_dims in dims[consts + carries :]]
    state = list(dims[consts : consts + carries])
    nested = place(body, [*dims[:consts], *state, *xs], sizes, tiled=placements.tiled)
    for _ in range(_FIXPOINT):
        next_state = [
            _unsharded(body.shapes[argument]) if value is None else nested.dims[value]
            for value, argument in zip(body.outputs[:carries], body.inputs[consts:], strict=False)
        ]
        most_sharded = [
            a if _shards(placements, a) > _shards(placements, b) else b for a, b in zip(next_state, state, strict=True)
        ]
        if most_sharded == state:
            break
        state = most_sharded
        nested = place(body, [*dims[:consts], *state, *xs], sizes, tiled=placements.tiled)
    placements.loops[index] = nested
    stacked_dims = [((), *(nested.dims[value] if value is not None else ())) for value in body.outputs[carries:]]
    return [*state, *stacked_dims]


def _automatic_sizes(operation: Operation, placements: Placements) -> dict[str, int]:
    """The mesh axes over which shapes within an operation are still global."""
    return {axis: size for axis, size in placements.sizes.items() if axis not in operation.manual}


def _cond(
    program: FlatProgram, operation: Operation, index: int, dims: list[Dims], placements: Placements
) -> list[Dims]:
    """Dims of the results: for each, those of the branch that shards it most."""
    sizes = _automatic_sizes(operation, placements)
    nested = [place(branch, dims[1:], sizes, tiled=placements.tiled) for branch in operation.branches]
    placements.branches[index] = tuple(nested)
    output_dims = []
    for number, value in enumerate(operation.outputs):
        candidates = [
            inner.dims[output]
            for inner, branch in zip(nested, operation.branches, strict=True)
            if (output := branch.outputs[number]) is not None
        ]
        output_dims.append(max(candidates, key=partial(_shards, placements), default=_unsharded(program.shapes[value])))
    return output_dims


def _gathered_bytes(operation: Operation, shapes: Any, dims: Any, placements: Placements) -> int:
    """Bytes of an operand that is gathered because the free dims of the other operand use the same axes."""
    (left, right), (left_batch, right_batch) = operation.params["dimension_numbers"]
    total = 0
    sides = ((0, 1, left, right, right_batch), (1, 0, right, left, left_batch))
    for side, partner, contracted, paired, batched in sides:
        free_axes = {axis for d, axes in enumerate(dims[partner]) if d not in (*paired, *batched) for axis in axes}
        summed = {
            axis for a, b in zip(contracted, paired, strict=True) for axis in set(dims[side][a]) & set(dims[partner][b])
        }
        gathered_dims = tuple(
            tuple(axis for axis in axes if axis not in free_axes and (d not in contracted or axis in summed))
            for d, axes in enumerate(dims[side])
        )
        if any("fsdp" in axes for axes in dims[side]) and gathered_dims != dims[side] and shapes[side] is not None:
            size = placements.bytes_of(shapes[side], gathered_dims)
            partner_size = (
                placements.bytes_of(shapes[partner], dims[partner]) if shapes[partner] is not None else size + 1
            )
            total += size if size <= partner_size else 0
    return total
