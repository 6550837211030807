"""Bytes per device of every value of a traced program, without devices: placements propagated from value to value.

Arguments and sharding constraints specify placements; products, elementwise operations and reshapes propagate them, as
in XLA's partitioner (GSPMD, Xu et al. 2021, arXiv:2105.04663), of which this is the part that memory needs. Where two
operands use the same mesh axis, the activations keep it and the weight is gathered.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.compat import scan_counts
from jaxscale.programs.flat import FlatProgram, Operation, carries
from jaxscale.sharding.partition import dim_axes
from jaxscale.trees import leaf_bytes

Dims = tuple[tuple[str, ...], ...]
"""Mesh axes of each dim."""

_FIXPOINT = 3
_SMALL = 2**16  # elements; below this, tiles hardly matter


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
        if not hasattr(shape, "shape") or not hasattr(shape, "dtype") or in_host_memory(shape) != host:
            return 0
        elements = math.prod(shape.shape)
        parts = [-(-size // self.ways(axes)) for size, axes in zip(shape.shape, dims, strict=True)]
        size = leaf_bytes(shape) * math.prod(parts) // elements if elements else 0
        return int(size * padding(parts)) if self.tiled and not host else size


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


def dims_of(sharding: Any, rank: int) -> Dims:
    """Mesh axes per dim of a `NamedSharding`."""
    return dim_axes(getattr(sharding, "spec", None) or (), rank)[:rank]


def _unsharded(shape: Any) -> Dims:
    return ((),) * len(getattr(shape, "shape", ()))


def _backward(program: FlatProgram, placements: Placements) -> None:
    """Propagate placements from outputs back to inputs, so that a value is computed where its reader needs it."""
    for operation in reversed(program.operations):
        if operation.kind == "dot_general":
            _backward_product(program, operation, placements)
        if operation.kind == "transpose" and operation.inputs[0] not in (None, *program.inputs):
            axes, order = placements.dims[operation.outputs[0]], operation.params["permutation"]
            input_dims = tuple(axes[order.index(d)] for d in range(len(order)))
            if _shards(placements, input_dims) > _shards(placements, placements.dims[operation.inputs[0]]):
                placements.dims[operation.inputs[0]] = input_dims
        if operation.kind not in (
            "sharding_constraint",
            "convert_element_type",
            "reduce_precision",
            "mul",
            "add_any",
            "optimization_barrier",
        ):
            continue
        for value, output in zip(operation.inputs, operation.outputs * len(operation.inputs), strict=False):
            if value is None or value in program.inputs:
                continue
            if getattr(program.shapes[value], "shape", None) != program.shapes[output].shape:
                continue
            dims, output_dims = placements.dims[value], placements.dims[output]
            if _shards(placements, output_dims) > _shards(placements, dims):
                placements.dims[value] = output_dims


def _backward_product(program: FlatProgram, operation: Operation, placements: Placements) -> None:
    """Give the axes of a product's dims to the same dims of its operands, where those are unsharded."""
    contracted, batched = operation.params["dimension_numbers"]
    output_dims = placements.dims[operation.outputs[0]]
    output_dim = len(batched[0])
    for side, value in enumerate(operation.inputs):
        rank = 0 if value is None else len(placements.dims[value])
        free_dims = [d for d in range(rank) if d not in contracted[side] and d not in batched[side]]
        targets = [*batched[side], *free_dims]
        sources = [*range(len(batched[0])), *range(output_dim, output_dim + len(free_dims))]
        output_dim += len(free_dims)
        if value is None or value in program.inputs:
            continue
        value_dims = list(placements.dims[value])
        for target, source in zip(targets, sources, strict=True):
            used_axes = {axis for axes in value_dims for axis in axes}
            if not value_dims[target] and not used_axes & set(output_dims[source]):
                value_dims[target] = output_dims[source]
        placements.dims[value] = tuple(value_dims)


def _shards(placements: Placements, dims: Dims) -> int:
    """Number of shards of a value."""
    return math.prod(placements.ways(axes) for axes in dims)


def _forward(program: FlatProgram, operation: Operation, index: int, placements: Placements) -> None:
    """Propagate placements from an operation's operands to its results."""
    shapes = [None if value is None else program.shapes[value] for value in operation.inputs]
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
        manual_axes = dims_of(_Spec(operation.params["spec"]), len(dims[0]))
        output_dims = [tuple((*manual, *axes) for manual, axes in zip(manual_axes, dims[0], strict=True))]
    elif kind == "shard_map":
        output_dims = [
            dims_of(_Spec(spec), len(program.shapes[v].shape))
            for v, spec in zip(operation.outputs, operation.params["out_specs"], strict=True)
        ]
    elif kind in _RULES:
        output = program.shapes[operation.outputs[0]]
        first_dims = _RULES[kind](operation.params, shapes, dims, output, placements)
        if kind == "dot_general":
            placements.gathered[index] = _gathered_bytes(operation, shapes, dims, placements)
            (left, right), _ = operation.params["dimension_numbers"]
            if any("fsdp" in set(dims[0][a]) & set(dims[1][b]) for a, b in zip(left, right, strict=True)):
                placements.summed.add(index)
        output_dims = [
            first_dims if program.shapes[v].shape == output.shape else _elementwise(program.shapes[v], shapes, dims)
            for v in operation.outputs
        ]
    else:
        output_dims = [_elementwise(program.shapes[value], shapes, dims) for value in operation.outputs]
    for value, value_dims in zip(operation.outputs, output_dims, strict=True):
        placements.dims[value] = value_dims


@dataclasses.dataclass(frozen=True)
class _Spec:
    spec: Any


def _elementwise(output: Any, shapes: Sequence[Any], dims: Sequence[Dims]) -> Dims:
    """Dims of an elementwise result: the axes of the operands of its shape, each axis once."""
    shape = getattr(output, "shape", ())
    merged: list[tuple[str, ...]] = [()] * len(shape)
    used_axes: set[str] = set()
    for operand, operand_dims in zip(shapes, dims, strict=True):
        if operand is None or len(getattr(operand, "shape", ())) != len(shape):
            continue
        for dim, axes in enumerate(operand_dims):
            free_axes = tuple(axis for axis in axes if axis not in used_axes)
            if free_axes and not merged[dim] and operand.shape[dim] == shape[dim]:
                merged[dim] = free_axes
                used_axes.update(free_axes)
    return tuple(merged)


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


def _dot(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    """Dims of a product: batch, left operand, right operand; the larger operand keeps its axes."""
    contracted, batched = params["dimension_numbers"]
    rank = len(batched[0])
    sources: list[dict[int, int]] = []  # for each operand, from the result's dims to its own
    for side in (0, 1):
        free_dims = [d for d in range(len(dims[side])) if d not in contracted[side] and d not in batched[side]]
        sources.append(dict(enumerate(batched[side])) | {rank + n: d for n, d in enumerate(free_dims)})
        rank += len(free_dims)
    sizes = [
        placements.bytes_of(shape, axes) if shape is not None else 0 for shape, axes in zip(shapes, dims, strict=True)
    ]
    output_dims: list[tuple[str, ...]] = [()] * rank
    used_axes: set[str] = set()
    for side in sorted((0, 1), key=lambda side: -sizes[side]):
        for target, source in sources[side].items():
            free_axes = tuple(axis for axis in dims[side][source] if axis not in used_axes)
            if free_axes and not output_dims[target]:
                output_dims[target] = free_axes
                used_axes.update(free_axes)
    # an axis along which both operands are summed is used up
    for a, b in zip(*contracted, strict=True):
        summed = set(dims[0][a]) & set(dims[1][b])
        output_dims = [tuple(axis for axis in axes if axis not in summed) for axes in output_dims]
    return tuple(output_dims)


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


def _broadcast(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    output_dims: list[tuple[str, ...]] = [()] * len(output.shape)
    for source, target in enumerate(params["broadcast_dimensions"]):
        if shapes[0] is not None and shapes[0].shape[source] == output.shape[target]:
            output_dims[target] = dims[0][source]
    return tuple(output_dims)


def _transpose(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    return tuple(dims[0][d] for d in params["permutation"])


def _reshape(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    """Match dims from the left by their products; a group keeps the axes of its first dim."""
    output_dims: list[tuple[str, ...]] = [()] * len(output.shape)
    old, new = list(shapes[0].shape), list(output.shape)
    i = j = 0
    while i < len(old) and j < len(new):
        first_i, first_j, old_size, new_size = i, j, old[i], new[j]
        while old_size != new_size:
            if old_size < new_size and i + 1 < len(old):
                i += 1
                old_size *= old[i]
            elif new_size < old_size and j + 1 < len(new):
                j += 1
                new_size *= new[j]
            else:
                return tuple(output_dims)
        sources = [d for d in range(first_i, i + 1) if old[d] > 1] or [first_i]
        targets = [d for d in range(first_j, j + 1) if new[d] > 1] or [first_j]
        axes = dims[0][sources[0]]
        if len(sources) == len(targets):
            for source, target in zip(sources, targets, strict=True):
                output_dims[target] = dims[0][source]
        elif axes and new[targets[0]] % placements.ways(axes) == 0:
            output_dims[targets[0]] = axes
        i, j = i + 1, j + 1
    return tuple(output_dims)


def _reduce(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    return tuple(axes for d, axes in enumerate(dims[0]) if d not in params["axes"])


def _squeeze(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    return tuple(axes for d, axes in enumerate(dims[0]) if d not in params["dimensions"])


def _gather(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    """Gathered rows have the placement of their indices; dims taken whole have that of the table."""
    numbers = params["dimension_numbers"]
    offsets = iter(d for d in range(len(shapes[0].shape)) if d not in numbers.collapsed_slice_dims)
    rows = iter(dims[1][:-1] if shapes[1] is not None else ())
    output_dims: list[tuple[str, ...]] = []
    for d in range(len(output.shape)):
        if d in numbers.offset_dims:
            source = next(offsets)
            output_dims.append(dims[0][source] if shapes[0].shape[source] == output.shape[d] else ())
        else:
            output_dims.append(next(rows, ()))
    used_axes: set[str] = {axis for d, axes in enumerate(output_dims) if d not in numbers.offset_dims for axis in axes}
    return tuple(
        axes if d not in numbers.offset_dims else tuple(axis for axis in axes if axis not in used_axes)
        for d, axes in enumerate(output_dims)
    )


def _first_operand(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    """Dims of the first operand, where their sizes are unchanged."""
    if shapes[0] is None:
        return _unsharded(output)
    return _elementwise(output, shapes[:1], dims[:1])


def _conv(params: Any, shapes: Any, dims: Any, output: Any, placements: Placements) -> Dims:
    numbers = params["dimension_numbers"]
    output_dims: list[tuple[str, ...]] = [()] * len(output.shape)
    output_dims[numbers.out_spec[0]] = dims[0][numbers.lhs_spec[0]]
    return tuple(output_dims)


_RULES: dict[str, Any] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "gather": _gather,
    **{f"reduce_{name}": _reduce for name in ("sum", "max", "min", "and", "or", "prod")},
    "argmax": _reduce,
    "argmin": _reduce,
    **{f"scatter{name}": _first_operand for name in ("", "-add", "_add", "-mul")},
    **dict.fromkeys(
        ("slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "dynamic_update_slice"), _first_operand
    ),
}
