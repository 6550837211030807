"""Over which mesh axes each dim of each value of a program lies, as the compiler would carry placements on.

Placements are given for some inputs and held by the program's sharding constraints; every other dim takes that of the
nearest dim it is linked to: an output of a matrix product to its operands, a part of a reshaped dim to the whole.

It leaves out what the compiler's own propagation weighs (bytes of a resharding, uneven parts), and links nothing
through gathers; a kernel, a loop or a function with its own derivative links what has the same place and length.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.costs.inline import Program, Step
from jaxscale.trees import leaf_bytes

Axes = tuple[str, ...]
Spread = tuple[Axes, ...]
"""Mesh axes of each dim of an array; `()` for a dim that is whole."""
Dim = tuple[int, int]
"""A value's number and one of its dims."""


def propagate(program: Program, given: Mapping[int, Spread], sizes: Mapping[str, int]) -> dict[int, Spread]:
    """The spread of every value.

    Args:
        program: whose values are meant.
        given: spread of values that is known, by number.
        sizes: devices along each mesh axis.

    Returns:
        By number, one entry per dim. No axis lies along two dims of one value, and none along a dim it is longer than.
    """
    if math.prod(sizes.values()) == 1:
        return {number: ((),) * len(_shape(program, number)) for number in range(len(program.avals))}
    links: dict[Dim, list[Dim]] = {}
    found: dict[Dim, Axes] = {}
    queue: deque[Dim] = deque()

    def hold(number: int, spread: Spread) -> None:
        for dim, axes in enumerate(spread):
            axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
            found[number, dim] = axes
            queue.append((number, dim))

    for number, spread in given.items():
        hold(number, spread)
    for step in program.steps:
        if step.primitive == "sharding_constraint":
            made, read = step.outputs[0], step.inputs[0]
            spread = constraint(step.eqn)
            if made is not None:
                hold(made, spread)
            if isinstance(read, int) and made is not None:
                # an operand is placed as its constraint says, unless that gathers it
                for dim, axes in enumerate(spread):
                    if axes:
                        links.setdefault((made, dim), []).append((read, dim))
            continue
        for one, other in _links(step, program):
            links.setdefault(one, []).append(other)
            links.setdefault(other, []).append(one)
    while queue:
        dim = queue.popleft()
        for other in links.get(dim, ()):
            if other not in found:
                taken = {axis for d in range(len(_shape(program, other[0]))) for axis in found.get((other[0], d), ())}
                fits = math.prod(sizes[axis] for axis in found[dim]) <= _shape(program, other[0])[other[1]]
                found[other] = found[dim] if fits and not taken & set(found[dim]) else ()
                queue.append(other)
    return {
        number: tuple(found.get((number, dim), ()) for dim in range(len(_shape(program, number))))
        for number in range(len(program.avals))
    }


def constraint(eqn: Any) -> Spread:
    """What a `sharding_constraint` says of its operand."""
    rank = len(eqn.outvars[0].aval.shape)
    spec = getattr(eqn.params["sharding"], "spec", None)
    return ((),) * rank if spec is None else of_spec(spec, rank)


def of_spec(spec: Any, rank: int) -> Spread:
    """A `PartitionSpec` of an array of `rank` dims as a spread.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> of_spec(P(("data", "fsdp"), None, "tensor"), 4)
        (('data', 'fsdp'), (), ('tensor',), ())
    """
    entries = [() if not isinstance(axes, str | tuple) else (axes,) if isinstance(axes, str) else axes for axes in spec]
    return tuple(entries + [()] * (rank - len(entries)))


def parts(spread: Spread, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Into how many parts each dim is split.

    Example:
        >>> parts((("data", "fsdp"), ()), {"data": 2, "fsdp": 4})
        (8, 1)
    """
    return tuple(math.prod(sizes.get(axis, 1) for axis in axes) for axes in spread)


def local_bytes(aval: Any, spread: Spread, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's part of an array; what does not divide is padded."""
    if not hasattr(aval, "shape"):
        return 0
    import jax

    shape = tuple(-(-size // part) for size, part in zip(aval.shape, parts(spread, sizes), strict=True))
    return leaf_bytes(jax.ShapeDtypeStruct(shape, aval.dtype))


def _shape(program: Program, number: int) -> tuple[int, ...]:
    return getattr(program.avals[number], "shape", ())


def _links(step: Step, program: Program) -> Iterator[tuple[Dim, Dim]]:
    """Pairs of dims of what a step reads and makes that are one dim."""
    made = [number for number in step.outputs if number is not None]
    read = [number for number in step.inputs if isinstance(number, int)]
    rule = _RULES.get(step.primitive, _link_reduced if step.primitive.startswith(("reduce_", "arg")) else None)
    if rule is not None and isinstance(step.inputs[0], int) and step.outputs[0] is not None:
        operands = [number if isinstance(number, int) else None for number in step.inputs]
        yield from rule(step.eqn.params, operands, step.outputs[0], program)
        return
    for source in read:
        for target in made:
            first, second = _shape(program, source), _shape(program, target)
            same_rank = len(first) == len(second)
            for dim, (one, other) in enumerate(zip(first, second, strict=False)):
                if one == other and (same_rank or dim == 0):
                    yield (source, dim), (target, dim)


def _link_broadcast(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    for dim, to in enumerate(params["broadcast_dimensions"]):
        if _shape(program, operands[0])[dim] == _shape(program, made)[to]:
            yield (operands[0], dim), (made, to)


def _link_transposed(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    for to, dim in enumerate(params["permutation"]):
        yield (operands[0], dim), (made, to)


def _link_squeezed(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    rank = len(_shape(program, operands[0]))
    left = [dim for dim in range(rank) if dim not in params["dimensions"]]
    for to, dim in enumerate(left):
        yield (operands[0], dim), (made, to)


def _link_reduced(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    left = [dim for dim in range(len(_shape(program, operands[0]))) if dim not in params["axes"]]
    for to, dim in enumerate(left):
        yield (operands[0], dim), (made, to)


def _link_reshaped(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    """Dims that hold the same elements, and the first dim of several with the one they make together."""
    first, second = _shape(program, operands[0]), _shape(program, made)
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] == 1 != second[j]:
            i += 1
            continue
        if second[j] == 1 != first[i]:
            j += 1
            continue
        yield (operands[0], i), (made, j)
        left, right = first[i], second[j]
        while left != right:  # run to where both hold whole groups
            if left < right:
                i += 1
                left *= first[i]
            else:
                j += 1
                right *= second[j]
        i, j = i + 1, j + 1


def _link_product(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    (contracted, batched) = params["dimension_numbers"]
    sides = list(operands[:2])
    for to, dims in enumerate(zip(*batched, strict=True)):
        for side, dim in zip(sides, dims, strict=True):
            if side is not None:
                yield (side, dim), (made, to)
    to = len(batched[0])
    for which, side in enumerate(sides):
        if side is None:
            return
        free = [d for d in range(len(_shape(program, side))) if d not in contracted[which] and d not in batched[which]]
        for dim in free:
            yield (side, dim), (made, to)
            to += 1
    for one, other in zip(*contracted, strict=True):
        yield (sides[0], one), (sides[1], other)


def _link_convolved(params: Any, operands: Any, made: int, program: Program) -> Iterator[tuple[Dim, Dim]]:
    numbers = params["dimension_numbers"]
    yield (operands[0], numbers.lhs_spec[0]), (made, numbers.out_spec[0])
    if operands[1] is not None:
        yield (operands[1], numbers.rhs_spec[0]), (made, numbers.out_spec[1])
        yield (operands[0], numbers.lhs_spec[1]), (operands[1], numbers.rhs_spec[1])


_RULES = {
    "broadcast_in_dim": _link_broadcast,
    "transpose": _link_transposed,
    "squeeze": _link_squeezed,
    "reshape": _link_reshaped,
    "dot_general": _link_product,
    "conv_general_dilated": _link_convolved,
}
