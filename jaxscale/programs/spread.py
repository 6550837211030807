"""Mesh axes along each dim of each value of a program, propagated as the compiler would.

Some inputs and the program's sharding constraints have known placements; every other dim has that of the nearest dim
linked to it: a dim of a matrix product is linked to its operands', a part of a reshaped dim to the whole.

Left out: the costs that the compiler's propagation weighs (bytes of a resharding, uneven parts), and links through
gathers. A kernel, a loop or a function with a custom derivative links dims of the same position and length.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.programs.inline import InlinedProgram, Step
from jaxscale.sharding.partition import dim_axes
from jaxscale.trees import leaf_bytes

Axes = tuple[str, ...]
Spread = tuple[Axes, ...]
"""Mesh axes of each dim of an array; `()` for an unsharded dim."""
Dim = tuple[int, int]
"""A value's number and one of its dims."""


def propagate(
    program: InlinedProgram, known_spreads: Mapping[int, Spread], sizes: Mapping[str, int]
) -> dict[int, Spread]:
    """The spread of every value.

    Args:
        program: a flat program.
        known_spreads: by the number of the value.
        sizes: devices along each mesh axis.

    Returns:
        By the value's number, one entry per dim. No axis is along two dims of a value or along a shorter dim.
    """
    if math.prod(sizes.values()) == 1:
        return {number: ((),) * len(_shape(program, number)) for number in range(len(program.avals))}
    links: dict[Dim, list[Dim]] = {}
    axes_of: dict[Dim, Axes] = {}
    queue: deque[Dim] = deque()

    def set_spread(number: int, spread: Spread) -> None:
        for dim, axes in enumerate(spread):
            axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
            axes_of[number, dim] = axes
            queue.append((number, dim))

    for number, spread in known_spreads.items():
        set_spread(number, spread)
    for step in program.steps:
        if step.primitive == "sharding_constraint":
            output, operand = step.outputs[0], step.inputs[0]
            spread = constraint_spread(step.eqn)
            if output is not None:
                set_spread(output, spread)
            if isinstance(operand, int) and output is not None:
                # an operand has the placement of its constraint, unless that gathers it
                for dim, axes in enumerate(spread):
                    if axes:
                        links.setdefault((output, dim), []).append((operand, dim))
            continue
        for first, second in _links(step, program):
            links.setdefault(first, []).append(second)
            links.setdefault(second, []).append(first)
    while queue:
        dim = queue.popleft()
        for linked in links.get(dim, ()):
            if linked not in axes_of:
                shape = _shape(program, linked[0])
                used_axes = {axis for d in range(len(shape)) for axis in axes_of.get((linked[0], d), ())}
                fits = math.prod(sizes[axis] for axis in axes_of[dim]) <= shape[linked[1]]
                axes_of[linked] = axes_of[dim] if fits and not used_axes & set(axes_of[dim]) else ()
                queue.append(linked)
    return {
        number: tuple(axes_of.get((number, dim), ()) for dim in range(len(_shape(program, number))))
        for number in range(len(program.avals))
    }


def constraint_spread(eqn: Any) -> Spread:
    """The spread of a `sharding_constraint`."""
    rank = len(eqn.outvars[0].aval.shape)
    spec = getattr(eqn.params["sharding"], "spec", None)
    return ((),) * rank if spec is None else spread_of_spec(spec, rank)


def spread_of_spec(spec: Any, rank: int) -> Spread:
    """The spread of a `PartitionSpec` for an array of `rank` dims.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> spread_of_spec(P(("data", "fsdp"), None, "tensor"), 4)
        (('data', 'fsdp'), (), ('tensor',), ())
    """
    return dim_axes(spec, rank)


def parts(spread: Spread, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Number of parts into which each dim is split.

    Example:
        >>> parts((("data", "fsdp"), ()), {"data": 2, "fsdp": 4})
        (8, 1)
    """
    return tuple(math.prod(sizes.get(axis, 1) for axis in axes) for axes in spread)


def local_bytes(aval: Any, spread: Spread, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's part of an array; dims that do not divide are padded."""
    if not hasattr(aval, "shape"):
        return 0
    import jax

    shape = tuple(-(-size // part) for size, part in zip(aval.shape, parts(spread, sizes), strict=True))
    return leaf_bytes(jax.ShapeDtypeStruct(shape, aval.dtype))


def _shape(program: InlinedProgram, number: int) -> tuple[int, ...]:
    return getattr(program.avals[number], "shape", ())


def _links(step: Step, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    """Linked pairs of dims of a step's operands and results."""
    results = [number for number in step.outputs if number is not None]
    operand_numbers = [number for number in step.inputs if isinstance(number, int)]
    rule = _RULES.get(step.primitive, _link_reduced if step.primitive.startswith(("reduce_", "arg")) else None)
    if rule is not None and isinstance(step.inputs[0], int) and step.outputs[0] is not None:
        operands = [number if isinstance(number, int) else None for number in step.inputs]
        yield from rule(step.eqn.params, operands, step.outputs[0], program)
        return
    for source in operand_numbers:
        for target in results:
            source_shape, target_shape = _shape(program, source), _shape(program, target)
            same_rank = len(source_shape) == len(target_shape)
            for dim, (source_size, target_size) in enumerate(zip(source_shape, target_shape, strict=False)):
                if source_size == target_size and (same_rank or dim == 0):
                    yield (source, dim), (target, dim)


def _link_broadcast(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    for dim, result_dim in enumerate(params["broadcast_dimensions"]):
        if _shape(program, operands[0])[dim] == _shape(program, result)[result_dim]:
            yield (operands[0], dim), (result, result_dim)


def _link_transposed(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    for result_dim, dim in enumerate(params["permutation"]):
        yield (operands[0], dim), (result, result_dim)


def _link_squeezed(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    rank = len(_shape(program, operands[0]))
    remaining_dims = [dim for dim in range(rank) if dim not in params["dimensions"]]
    for result_dim, dim in enumerate(remaining_dims):
        yield (operands[0], dim), (result, result_dim)


def _link_reduced(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    remaining_dims = [dim for dim in range(len(_shape(program, operands[0]))) if dim not in params["axes"]]
    for result_dim, dim in enumerate(remaining_dims):
        yield (operands[0], dim), (result, result_dim)


def _link_reshaped(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    """Dims with the same elements, and the first dim of a group with the dim that the group forms."""
    old, new = _shape(program, operands[0]), _shape(program, result)
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == 1 != new[j]:
            i += 1
            continue
        if new[j] == 1 != old[i]:
            j += 1
            continue
        yield (operands[0], i), (result, j)
        old_size, new_size = old[i], new[j]
        while old_size != new_size:  # advance to the end of a common group
            if old_size < new_size:
                i += 1
                old_size *= old[i]
            else:
                j += 1
                new_size *= new[j]
        i, j = i + 1, j + 1


def _link_product(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    (contracted, batched) = params["dimension_numbers"]
    operand_pair = list(operands[:2])
    for result_dim, dim_pair in enumerate(zip(*batched, strict=True)):
        for operand, dim in zip(operand_pair, dim_pair, strict=True):
            if operand is not None:
                yield (operand, dim), (result, result_dim)
    result_dim = len(batched[0])
    for i, operand in enumerate(operand_pair):
        if operand is None:
            return
        free_dims = [d for d in range(len(_shape(program, operand))) if d not in contracted[i] and d not in batched[i]]
        for dim in free_dims:
            yield (operand, dim), (result, result_dim)
            result_dim += 1
    for left_dim, right_dim in zip(*contracted, strict=True):
        yield (operand_pair[0], left_dim), (operand_pair[1], right_dim)


def _link_convolved(params: Any, operands: Any, result: int, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    numbers = params["dimension_numbers"]
    yield (operands[0], numbers.lhs_spec[0]), (result, numbers.out_spec[0])
    if operands[1] is not None:
        yield (operands[1], numbers.rhs_spec[0]), (result, numbers.out_spec[1])
        yield (operands[0], numbers.lhs_spec[1]), (operands[1], numbers.rhs_spec[1])


_RULES = {
    "broadcast_in_dim": _link_broadcast,
    "transpose": _link_transposed,
    "squeeze": _link_squeezed,
    "reshape": _link_reshaped,
    "dot_general": _link_product,
    "conv_general_dilated": _link_convolved,
}
