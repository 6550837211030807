"""Mesh axes along each dim of each value of a program, propagated as a compiler would do.

The placement of a value (`Placement`) lists the mesh axes along each of its dims. The placements of some inputs and of
the program's sharding constraints are known. Every other dim gets the axes of the nearest dim that corresponds to it. A
dim of a matrix product's result corresponds to the operand's dim with the same elements. A dim that is reshaped into
several dims corresponds to the first of them. In a kernel, a loop or a function with a custom derivative, dims of the
same position and size correspond.

Left out: costs that a compiler compares (the bytes of a resharding, uneven parts), and correspondence in gathers.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from jaxscale.programs.dims import Axes, DimLink, Placement, Shape, dim_links, placement_of, shape_of, summed_dim_pairs
from jaxscale.programs.inline import InlinedProgram, Step

ValueDim = tuple[int, int]
"""The number of a value, and the index of one of its dims."""


def propagate(
    program: InlinedProgram, known_placements: Mapping[int, Placement], axis_sizes: Mapping[str, int]
) -> dict[int, Placement]:
    """Propagate known placements to all values of a program.

    Args:
        program: the program, as a list of steps.
        known_placements: placement of each input for which it is known, by the number of the input.
        axis_sizes: number of devices along each mesh axis.

    Returns:
        The placement of each value, by the number of the value. No axis appears in two dims of a value, and no dim is
        split into more parts than its size.
    """
    ranks = [len(shape_of(aval)) for aval in program.avals]  # number of dims of each value
    if math.prod(axis_sizes.values()) == 1:
        return {value_number: ((),) * rank for value_number, rank in enumerate(ranks)}
    linked_by_value_dim: dict[ValueDim, list[ValueDim]] = {}
    axes_by_value_dim: dict[ValueDim, Axes] = {}
    # of each value with a known placement: its number, the placement, and the dims that the compiler places
    numbers_and_placements = [(value_number, placement, ()) for value_number, placement in known_placements.items()]
    for step in program.steps:
        if step.primitive != "sharding_constraint":
            for first_value_dim, second_value_dim in _linked_value_dims(step, program):
                linked_by_value_dim.setdefault(first_value_dim, []).append(second_value_dim)
                linked_by_value_dim.setdefault(second_value_dim, []).append(first_value_dim)
        elif (output := step.outputs[0]) is not None:
            placement = placement_of(step.eqn.params["sharding"], ranks[output])
            open_dims = step.eqn.params.get("unconstrained_dims") or ()
            numbers_and_placements.append((output, placement, open_dims))
            operand = step.inputs[0]
            for dim, axes in enumerate(placement):
                if axes and isinstance(operand, int):  # placed like the result, unless the constraint gathers it
                    linked_by_value_dim.setdefault((output, dim), []).append((operand, dim))
                elif dim in open_dims and isinstance(operand, int):
                    linked_by_value_dim.setdefault((output, dim), []).append((operand, dim))
                    linked_by_value_dim.setdefault((operand, dim), []).append((output, dim))
    pending_value_dims: deque[ValueDim] = deque()
    for value_number, placement, open_dims in numbers_and_placements:
        for dim, axes in enumerate(placement):
            if dim in open_dims:
                continue
            axes_by_value_dim[value_number, dim] = tuple(axis for axis in axes if axis_sizes.get(axis, 1) > 1)
            pending_value_dims.append((value_number, dim))
    while pending_value_dims:
        source_value_dim = pending_value_dims.popleft()
        source_axes = axes_by_value_dim[source_value_dim]
        for value_number, dim in linked_by_value_dim.get(source_value_dim, ()):
            if (value_number, dim) not in axes_by_value_dim:
                used_axes = {
                    a for d in range(ranks[value_number]) for a in axes_by_value_dim.get((value_number, d), ())
                }
                part_count = math.prod(axis_sizes[axis] for axis in source_axes)
                is_possible = part_count <= program.avals[value_number].shape[dim] and not used_axes & set(source_axes)
                axes_by_value_dim[value_number, dim] = source_axes if is_possible else ()
                pending_value_dims.append((value_number, dim))
    return {
        value_number: tuple(axes_by_value_dim.get((value_number, dim), ()) for dim in range(rank))
        for value_number, rank in enumerate(ranks)
    }


def _linked_value_dims(step: Step, program: InlinedProgram) -> Iterator[tuple[ValueDim, ValueDim]]:
    """Yield the pairs of corresponding dims among a step's operands and results."""
    operands = [atom if isinstance(atom, int) else None for atom in step.inputs]  # numbers; `None` for a constant
    operand_shapes = [shape_of(program.avals[atom] if isinstance(atom, int) else atom.value) for atom in step.inputs]
    for result in step.outputs:
        if result is None:
            continue
        result_shape = shape_of(program.avals[result])
        result_links = dim_links(step.primitive, step.eqn.params, operand_shapes, result_shape)
        for index, dim, result_dim in (
            _same_position_links(operand_shapes, result_shape) if result_links is None else result_links
        ):
            operand = operands[index]
            if operand is not None:
                yield (operand, dim), (result, result_dim)
    for left_dim, right_dim in summed_dim_pairs(step.primitive, step.eqn.params):
        left_operand, right_operand = operands[:2]
        if left_operand is not None and right_operand is not None:
            yield (left_operand, left_dim), (right_operand, right_dim)


def _same_position_links(operand_shapes: Sequence[Shape], result_shape: Shape) -> Iterator[DimLink]:
    """Yield the pairs of dims of the same position and size; if the ranks differ, only those of the first dims."""
    for operand_index, shape in enumerate(operand_shapes):
        for dim, (size, result_size) in enumerate(zip(shape, result_shape, strict=False)):
            if size == result_size and (dim == 0 or len(shape) == len(result_shape)):
                yield operand_index, dim, dim
