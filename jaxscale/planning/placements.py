"""Bytes per device of every value of a traced program, with no device: placements carried from value to value.

Arguments and sharding constraints say where an array lies; products, elementwise operations and reshapes carry it on,
as XLA's partitioner does (GSPMD, Xu et al. 2021, arXiv:2105.04663), of which this is the part that memory needs. Where
two operands ask for one mesh axis the activations keep it, and the weight is gathered.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.compat import scan_counts
from jaxscale.planning.flat import Operation, Program, carries
from jaxscale.trees import leaf_bytes

Dims = tuple[tuple[str, ...], ...]
"""Mesh axes of each dim."""

_FIXPOINT = 3
_SMALL = 2**16  # elements; below, tiles hardly matter


@dataclasses.dataclass(eq=False)
class Placements:
    """Placements of a program's values.

    Args:
        sizes: devices along each mesh axis.
        tiled: memory is in tiles, as a TPU's.
        dims: mesh axes of each value's dims.
        gathered: bytes of weights that are brought together for an operation, by its place in the program.
        summed: places of products whose results are sums over devices of the fsdp axis.
        loops: the same of the body of a loop, by the loop's place.
        branches: the same of the branches of a `cond`.
    """

    sizes: Mapping[str, int]
    tiled: bool = False
    dims: dict[int, Dims] = dataclasses.field(default_factory=dict)
    gathered: dict[int, int] = dataclasses.field(default_factory=dict)
    summed: set[int] = dataclasses.field(default_factory=set)
    loops: dict[int, "Placements"] = dataclasses.field(default_factory=dict)
    branches: dict[int, "tuple[Placements, ...]"] = dataclasses.field(default_factory=dict)

    def ways(self, axes: Sequence[str]) -> int:
        """Parts into which mesh axes split a dim."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def bytes_of(self, shape: Any, dims: Dims, *, host: bool = False) -> int:
        """Bytes on one device of an abstract value placed so, 0 of one in host memory; or in the host's alone."""
        if not hasattr(shape, "shape") or not hasattr(shape, "dtype") or in_host_memory(shape) != host:
            return 0
        whole = math.prod(shape.shape)
        parts = [-(-size // self.ways(axes)) for size, axes in zip(shape.shape, dims, strict=True)]
        size = leaf_bytes(shape) * math.prod(parts) // whole if whole else 0
        return int(size * padding(parts)) if self.tiled and not host else size


def in_host_memory(shape: Any) -> bool:
    """Whether an abstract value lies on the host."""
    return getattr(getattr(shape, "memory_space", None), "name", "") == "Host"


def padding(shape: Sequence[int]) -> float:
    """How much bigger an array is in a TPU's memory, whose tiles are 8 x 128 of two of the last three dims.

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


def place(program: Program, given: Sequence[Dims], sizes: Mapping[str, int], *, tiled: bool = False) -> Placements:
    """Placements of all values of a program whose arguments are placed as given.

    Args:
        program: what runs.
        given: placement of each of its inputs.
        sizes: devices along each mesh axis.
        tiled: memory is in tiles, as a TPU's.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.planning.flat import flatten
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
        >>> program = flatten(jax.make_jaxpr(jnp.matmul)(x, w))
        >>> found = place(program, [(("data",), ()), ((), ("tensor",))], {"data": 2, "tensor": 4})
        >>> found.dims[program.outputs[0]]
        (('data',), ('tensor',))
    """
    found = Placements(sizes, tiled)
    for value, dims in zip(program.inputs, given, strict=False):
        found.dims[value] = dims
    for value in program.inputs[len(given) :]:
        found.dims[value] = _whole(program.shapes[value])
    for at, operation in enumerate(program.operations):
        _forward(program, operation, at, found)
    _backward(program, found)
    return found


def dims_of(sharding: Any, rank: int) -> Dims:
    """Mesh axes per dim of a `NamedSharding`."""
    spec = getattr(sharding, "spec", None) or ()
    entries = [() if e is None or not isinstance(e, str | tuple) else (e,) if isinstance(e, str) else e for e in spec]
    return tuple(entries[:rank]) + ((),) * (rank - len(entries))


def _whole(shape: Any) -> Dims:
    return ((),) * len(getattr(shape, "shape", ()))


def _backward(program: Program, found: Placements) -> None:
    """Placements carried against the flow: what is only placed afterwards is made in place, where it can be."""
    for operation in reversed(program.operations):
        if operation.kind == "dot_general":
            _through_product(program, operation, found)
        if operation.kind == "transpose" and operation.inputs[0] not in (None, *program.inputs):
            out, order = found.dims[operation.outputs[0]], operation.params["permutation"]
            back = tuple(out[order.index(d)] for d in range(len(order)))
            if _parts(found, back) > _parts(found, found.dims[operation.inputs[0]]):
                found.dims[operation.inputs[0]] = back
        if operation.kind not in (
            "sharding_constraint",
            "convert_element_type",
            "reduce_precision",
            "mul",
            "add_any",
            "optimization_barrier",
        ):
            continue
        for value, out in zip(operation.inputs, operation.outputs * len(operation.inputs), strict=False):
            if value is None or value in program.inputs:
                continue
            if getattr(program.shapes[value], "shape", None) != program.shapes[out].shape:
                continue
            here, there = found.dims[value], found.dims[out]
            if _parts(found, there) > _parts(found, here):
                found.dims[value] = there


def _through_product(program: Program, operation: Operation, found: Placements) -> None:
    """Axes of a result's dims given to the operands' dims that they are, where those are whole."""
    contracted, batched = operation.params["dimension_numbers"]
    out = found.dims[operation.outputs[0]]
    rank = len(batched[0])
    for side, value in enumerate(operation.inputs):
        size = 0 if value is None else len(found.dims[value])
        free = [d for d in range(size) if d not in contracted[side] and d not in batched[side]]
        targets = [*batched[side], *free]
        sources = [*range(len(batched[0])), *range(rank, rank + len(free))]
        rank += len(free)
        if value is None or value in program.inputs:
            continue
        dims = list(found.dims[value])
        for target, source in zip(targets, sources, strict=True):
            used = {axis for axes in dims for axis in axes}
            if not dims[target] and not used & set(out[source]):
                dims[target] = out[source]
        found.dims[value] = tuple(dims)


def _parts(found: Placements, dims: Dims) -> int:
    return math.prod(found.ways(axes) for axes in dims)


def _forward(program: Program, operation: Operation, at: int, found: Placements) -> None:
    shapes = [None if value is None else program.shapes[value] for value in operation.inputs]
    dims = [() if value is None else found.dims[value] for value in operation.inputs]
    kind = operation.kind
    if kind in ("scan", "while"):
        outs = _loop(operation, at, dims, found)
        if operation.manual:  # slots and sums of a pipelined step are zeros, made where the loop has them
            made = zip(carries(operation), outs, strict=False)
            found.dims |= {value: dims for value, dims in made if value is not None and value not in program.inputs}
    elif kind == "sharding_constraint":
        outs = [dims_of(operation.params["sharding"], len(program.shapes[operation.outputs[0]].shape))]
    elif operation.branches:
        outs = _cond(program, operation, at, dims, found)
    elif kind == "enter":
        outs = [tuple(tuple(axis for axis in axes if axis not in operation.manual) for axes in dims[0])]
    elif kind == "leave":
        told = dims_of(_Spec(operation.params["spec"]), len(dims[0]))
        outs = [tuple((*manual, *axes) for manual, axes in zip(told, dims[0], strict=True))]
    elif kind == "shard_map":
        outs = [
            dims_of(_Spec(spec), len(program.shapes[v].shape))
            for v, spec in zip(operation.outputs, operation.params["out_specs"], strict=True)
        ]
    elif kind in _RULES:
        made = program.shapes[operation.outputs[0]]
        first = _RULES[kind](operation.params, shapes, dims, made, found)
        if kind == "dot_general":
            found.gathered[at] = _gathered(operation, shapes, dims, found)
            (left, right), _ = operation.params["dimension_numbers"]
            if any("fsdp" in set(dims[0][a]) & set(dims[1][b]) for a, b in zip(left, right, strict=True)):
                found.summed.add(at)
        outs = [
            first if program.shapes[v].shape == made.shape else _like(program.shapes[v], shapes, dims)
            for v in operation.outputs
        ]
    else:
        outs = [_like(program.shapes[value], shapes, dims) for value in operation.outputs]
    for value, placed in zip(operation.outputs, outs, strict=True):
        found.dims[value] = placed


@dataclasses.dataclass(frozen=True)
class _Spec:
    spec: Any


def _like(made: Any, shapes: Sequence[Any], dims: Sequence[Dims]) -> Dims:
    """Of an operation element by element: every dim as the operands of that shape have it, each axis once."""
    shape = getattr(made, "shape", ())
    merged: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    for operand, placed in zip(shapes, dims, strict=True):
        if operand is None or len(getattr(operand, "shape", ())) != len(shape):
            continue
        for dim, axes in enumerate(placed):
            fresh = tuple(axis for axis in axes if axis not in used)
            if fresh and not merged[dim] and operand.shape[dim] == shape[dim]:
                merged[dim] = fresh
                used.update(fresh)
    return tuple(merged)


def _loop(operation: Operation, at: int, dims: list[Dims], found: Placements) -> list[Dims]:
    body = operation.loop
    assert body is not None
    if operation.kind == "scan":
        consts, carries = scan_counts(operation.params)
    else:
        dims = dims[operation.params["cond_nconsts"] :]
        consts = operation.params["body_nconsts"]
        carries = len(dims) - consts
    sizes = _left(operation, found)
    xs = [placed[1:] for placed in dims[consts + carries :]]
    state = list(dims[consts : consts + carries])
    inside = place(body, [*dims[:consts], *state, *xs], sizes, tiled=found.tiled)
    for _ in range(_FIXPOINT):
        after = [
            _whole(body.shapes[i]) if v is None else inside.dims[v]
            for v, i in zip(body.outputs[:carries], body.inputs[consts:], strict=False)
        ]
        joined = [a if _parts(found, a) > _parts(found, b) else b for a, b in zip(after, state, strict=True)]
        if joined == state:
            break
        state = joined
        inside = place(body, [*dims[:consts], *state, *xs], sizes, tiled=found.tiled)
    found.loops[at] = inside
    stacked = [((), *(inside.dims[value] if value is not None else ())) for value in body.outputs[carries:]]
    return [*state, *stacked]


def _left(operation: Operation, found: Placements) -> dict[str, int]:
    """The mesh axes that shapes within an operation do not know of."""
    return {axis: size for axis, size in found.sizes.items() if axis not in operation.manual}


def _cond(program: Program, operation: Operation, at: int, dims: list[Dims], found: Placements) -> list[Dims]:
    """As the branch places it that spreads it most."""
    sizes = _left(operation, found)
    found.branches[at] = tuple(place(one, dims[1:], sizes, tiled=found.tiled) for one in operation.branches)
    outs = []
    for number, value in enumerate(operation.outputs):
        told = [
            inside.dims[made]
            for inside, one in zip(found.branches[at], operation.branches, strict=True)
            if (made := one.outputs[number]) is not None
        ]
        outs.append(max(told, key=lambda dims: _parts(found, dims), default=_whole(program.shapes[value])))
    return outs


def _dot(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    """Batch dims, then those of the left operand, then of the right; the bigger operand keeps its axes."""
    contracted, batched = params["dimension_numbers"]
    rank = len(batched[0])
    ranges: list[dict[int, int]] = []  # of each operand, its dim per dim of the result
    for side in (0, 1):
        free = [d for d in range(len(dims[side])) if d not in contracted[side] and d not in batched[side]]
        ranges.append(dict(enumerate(batched[side])) | {rank + n: d for n, d in enumerate(free)})
        rank += len(free)
    sizes = [
        found.bytes_of(shape, placed) if shape is not None else 0 for shape, placed in zip(shapes, dims, strict=True)
    ]
    out: list[tuple[str, ...]] = [()] * rank
    used: set[str] = set()
    for side in sorted((0, 1), key=lambda side: -sizes[side]):
        for target, source in ranges[side].items():
            fresh = tuple(axis for axis in dims[side][source] if axis not in used)
            if fresh and not out[target]:
                out[target] = fresh
                used.update(fresh)
    # an axis along which both operands are summed is spent
    for a, b in zip(*contracted, strict=True):
        spent = set(dims[0][a]) & set(dims[1][b])
        out = [tuple(axis for axis in axes if axis not in spent) for axes in out]
    return tuple(out)


def _gathered(operation: Operation, shapes: Any, dims: Any, found: Placements) -> int:
    """Bytes of an operand that is brought together, since the other one splits its batch over the same axes."""
    (left, right), (left_batch, right_batch) = operation.params["dimension_numbers"]
    total = 0
    sides = ((0, 1, left, right, right_batch), (1, 0, right, left, left_batch))
    for mine, other, contracted, its, batched in sides:
        theirs = {axis for d, axes in enumerate(dims[other]) if d not in (*its, *batched) for axis in axes}
        summed = {
            axis for a, b in zip(contracted, its, strict=True) for axis in set(dims[mine][a]) & set(dims[other][b])
        }
        kept = tuple(
            tuple(axis for axis in axes if axis not in theirs and (d not in contracted or axis in summed))
            for d, axes in enumerate(dims[mine])
        )
        if any("fsdp" in axes for axes in dims[mine]) and kept != dims[mine] and shapes[mine] is not None:
            whole = found.bytes_of(shapes[mine], kept)
            smaller = found.bytes_of(shapes[other], dims[other]) if shapes[other] is not None else whole + 1
            total += whole if whole <= smaller else 0
    return total


def _broadcast(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    out: list[tuple[str, ...]] = [()] * len(made.shape)
    for source, target in enumerate(params["broadcast_dimensions"]):
        if shapes[0] is not None and shapes[0].shape[source] == made.shape[target]:
            out[target] = dims[0][source]
    return tuple(out)


def _transpose(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    return tuple(dims[0][d] for d in params["permutation"])


def _reshape(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    """Dims are matched from the left by their products; a group keeps the axes of its first dim."""
    out: list[tuple[str, ...]] = [()] * len(made.shape)
    old, new = list(shapes[0].shape), list(made.shape)
    i = j = 0
    while i < len(old) and j < len(new):
        first_i, first_j, a, b = i, j, old[i], new[j]
        while a != b:
            if a < b and i + 1 < len(old):
                i += 1
                a *= old[i]
            elif b < a and j + 1 < len(new):
                j += 1
                b *= new[j]
            else:
                return tuple(out)
        sources = [d for d in range(first_i, i + 1) if old[d] > 1] or [first_i]
        targets = [d for d in range(first_j, j + 1) if new[d] > 1] or [first_j]
        axes = dims[0][sources[0]]
        if len(sources) == len(targets):
            for source, target in zip(sources, targets, strict=True):
                out[target] = dims[0][source]
        elif axes and new[targets[0]] % found.ways(axes) == 0:
            out[targets[0]] = axes
        i, j = i + 1, j + 1
    return tuple(out)


def _reduce(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    return tuple(axes for d, axes in enumerate(dims[0]) if d not in params["axes"])


def _squeeze(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    return tuple(axes for d, axes in enumerate(dims[0]) if d not in params["dimensions"])


def _gather(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    """Rows of a table lie as their indices do; what is taken whole lies as in the table."""
    numbers = params["dimension_numbers"]
    offsets = iter(d for d in range(len(shapes[0].shape)) if d not in numbers.collapsed_slice_dims)
    rows = iter(dims[1][:-1] if shapes[1] is not None else ())
    out: list[tuple[str, ...]] = []
    for d in range(len(made.shape)):
        if d in numbers.offset_dims:
            source = next(offsets)
            out.append(dims[0][source] if shapes[0].shape[source] == made.shape[d] else ())
        else:
            out.append(next(rows, ()))
    used: set[str] = {axis for d, axes in enumerate(out) if d not in numbers.offset_dims for axis in axes}
    return tuple(
        axes if d not in numbers.offset_dims else tuple(axis for axis in axes if axis not in used)
        for d, axes in enumerate(out)
    )


def _first(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    """As the first operand, where the dim keeps its size."""
    if shapes[0] is None:
        return _whole(made)
    return _like(made, shapes[:1], dims[:1])


def _conv(params: Any, shapes: Any, dims: Any, made: Any, found: Placements) -> Dims:
    numbers = params["dimension_numbers"]
    out: list[tuple[str, ...]] = [()] * len(made.shape)
    out[numbers.out_spec[0]] = dims[0][numbers.lhs_spec[0]]
    return tuple(out)


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
    **{f"scatter{name}": _first for name in ("", "-add", "_add", "-mul")},
    **dict.fromkeys(
        ("slice", "dynamic_slice", "pad", "rev", "cumsum", "sort", "top_k", "dynamic_update_slice"), _first
    ),
}
