"""Mesh axes along each dim of each value of a program, propagated as a compiler would do.

Some inputs and the program's sharding constraints have known placements. Every other dim has the axes of the nearest
dim that it is linked to. A dim of a matrix product is linked to the operand's dim with the same elements. If a dim is
reshaped into several dims, it is linked to the first of them.

Left out: the costs that the compiler's propagation weighs (bytes of a resharding, uneven parts), and links through
gathers. A kernel, a loop or a function with a custom derivative links dims of the same position and length.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from jaxscale.programs.dims import Axes, DimLink, Dims, Shape, dims_of, links, shape_of, summed_dims
from jaxscale.programs.inline import InlinedProgram, Step

Dim = tuple[int, int]
"""A value's number and one of its dims."""


def propagate(program: InlinedProgram, known_dims: Mapping[int, Dims], sizes: Mapping[str, int]) -> dict[int, Dims]:
    """Propagate known placements; return the mesh axes along the dims of every value.

    Args:
        program: a flat program.
        known_dims: mesh axes along the dims of each input with a known placement, by the number of the input.
        sizes: number of devices along each mesh axis.

    Returns:
        The mesh axes along each dim of each value, by the number of the value. No axis is along two dims of a value,
        and no dim is split into more parts than its size.
    """
    ranks = [len(shape_of(aval)) for aval in program.avals]
    if math.prod(sizes.values()) == 1:
        return {number: ((),) * rank for number, rank in enumerate(ranks)}
    linked_dims: dict[Dim, list[Dim]] = {}
    axes_of: dict[Dim, Axes] = {}
    all_known_dims = list(known_dims.items())
    for step in program.steps:
        if step.primitive != "sharding_constraint":
            for first_dim, second_dim in _links(step, program):
                linked_dims.setdefault(first_dim, []).append(second_dim)
                linked_dims.setdefault(second_dim, []).append(first_dim)
        elif (output := step.outputs[0]) is not None:
            dims = dims_of(step.eqn.params["sharding"], ranks[output])
            all_known_dims.append((output, dims))
            operand = step.inputs[0]
            for dim, axes in enumerate(dims):
                if axes and isinstance(operand, int):  # placed like the result, unless the constraint gathers it
                    linked_dims.setdefault((output, dim), []).append((operand, dim))
    queue: deque[Dim] = deque()
    for number, dims in all_known_dims:
        for dim, axes in enumerate(dims):
            axes_of[number, dim] = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
            queue.append((number, dim))
    while queue:
        source_dim = queue.popleft()
        for number, dim in linked_dims.get(source_dim, ()):
            if (number, dim) not in axes_of:
                used_axes = {axis for d in range(ranks[number]) for axis in axes_of.get((number, d), ())}
                fits = math.prod(sizes[axis] for axis in axes_of[source_dim]) <= program.avals[number].shape[dim]
                axes_of[number, dim] = axes_of[source_dim] if fits and not used_axes & set(axes_of[source_dim]) else ()
                queue.append((number, dim))
    return {number: tuple(axes_of.get((number, dim), ()) for dim in range(rank)) for number, rank in enumerate(ranks)}


def _links(step: Step, program: InlinedProgram) -> Iterator[tuple[Dim, Dim]]:
    """Yield the linked pairs of dims of a step's operands and results."""
    operands = [atom if isinstance(atom, int) else None for atom in step.inputs]
    shapes = [shape_of(program.avals[atom] if isinstance(atom, int) else atom.value) for atom in step.inputs]
    for result in step.outputs:
        if result is None:
            continue
        result_shape = shape_of(program.avals[result])
        result_links = links(step.primitive, step.eqn.params, shapes, result_shape)
        for index, dim, result_dim in _same_positions(shapes, result_shape) if result_links is None else result_links:
            operand = operands[index]
            if operand is not None:
                yield (operand, dim), (result, result_dim)
    for left_dim, right_dim in summed_dims(step.primitive, step.eqn.params):
        left, right = operands[:2]
        if left is not None and right is not None:
            yield (left, left_dim), (right, right_dim)


def _same_positions(shapes: Sequence[Shape], result_shape: Shape) -> Iterator[DimLink]:
    """Yield the links of dims with the same position and length; if the ranks differ, only of the first dims."""
    for index, shape in enumerate(shapes):
        for dim, (size, result_size) in enumerate(zip(shape, result_shape, strict=False)):
            if size == result_size and (dim == 0 or len(shape) == len(result_shape)):
                yield index, dim, dim
