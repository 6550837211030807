"""Bytes per device of every value of a traced program, without devices, from placements of the program's arguments.

The placement of a value (`Placement`) lists the mesh axes along each of its dims. Arguments and sharding constraints
specify placements. Matrix products, elementwise operations and reshapes propagate placements, as in XLA's partitioner
(GSPMD, Xu et al. 2021, arXiv:2105.04663). This module implements the part of that propagation that affects memory. If
two operands of a product use the same mesh axis, the activations keep the axis and the weight is gathered. Values are
represented by their numbers in a `FlatProgram`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale.programs.dims import (
    Axes,
    Placement,
    constraint_placement,
    gathered_bytes,
    in_host_memory,
    joined_placement,
    links_of,
    local_bytes,
    local_shape,
    part_counts,
    reshape_operand_placement,
    shape_of,
    summed_dim_pairs,
    without_axes,
)
from jaxscale.programs.elementwise import ELEMENTWISE
from jaxscale.programs.flat import LOOPS, FlatProgram, Operation, carries, flatten, loop_parts
from jaxscale.programs.tiles import TileDimPairs, Tiles, padding_factor
from jaxscale.sharding.partition import dim_axes

_MAX_PASSES = 3
"""Maximum number of times that a loop's body is placed again because the placement of its state has changed."""


_SUMS_OVER_DEVICES = ("psum", "psum_invariant", "reduce_scatter")
"""Collectives along manual axes, which keep the placement along the other axes."""

_PLACED_BY_READERS = ELEMENTWISE | {"transpose", "reshape", "sharding_constraint", *_SUMS_OVER_DEVICES}
"""Operations whose operands are placed like the result; the readers of the result determine its placement."""


@dataclasses.dataclass(eq=False)
class Placements:
    """The placements of a program's values.

    Args:
        program: a flat program.
        axis_sizes: number of devices along each mesh axis.
        tiles: the tiles that kernels prescribe; `None` if memory is not tiled, as on a GPU.
        by_value: placement of each value, by the value's number.
        gathered_bytes: bytes of gathered weights, by the index of the operation that reads them.
        summed_products: indices of the matrix products whose results are summed over the fsdp axis.
        loop_placements: placements in the body of each loop, by the loop's index among the operations.
        branch_placements: placements in the branches of each `cond`, by the `cond`'s index among the operations.
    """

    program: FlatProgram
    axis_sizes: Mapping[str, int]
    tiles: Tiles | None = None
    by_value: dict[int, Placement] = dataclasses.field(default_factory=dict)
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

    def bytes_of(
        self, aval: Any, placement: Placement, *, in_host: bool = False, tile_dim_pairs: TileDimPairs | None = None
    ) -> int:
        """Return the bytes per device of an abstract value in device memory, or in host memory with `in_host`.

        A value in the other memory has 0 bytes. `tile_dim_pairs` are the dims of prescribed tiles.
        """
        if in_host_memory(aval) != in_host:
            return 0
        unpadded_bytes = local_bytes(aval, placement, self.axis_sizes)
        if not unpadded_bytes or self.tiles is None or in_host:
            return unpadded_bytes
        return int(unpadded_bytes * padding_factor(local_shape(aval.shape, placement, self.axis_sizes), tile_dim_pairs))

    def value_bytes(self, value: int) -> int:
        """Return the bytes per device of a value of the program in device memory."""
        tile_dim_pairs = None if self.tiles is None else self.tiles.dim_pairs_by_value.get(value)
        return self.bytes_of(self.program.avals[value], self.by_value[value], tile_dim_pairs=tile_dim_pairs)


def place(
    program: FlatProgram,
    input_placements: Sequence[Placement],
    axis_sizes: Mapping[str, int],
    *,
    tiles: Tiles | None = None,
    output_placements: Sequence[Placement] = (),
) -> Placements:
    """Place all values of a program; return their placements.

    Args:
        program: a flat program.
        input_placements: placement of each input; inputs without an entry are unsharded.
        axis_sizes: number of devices along each mesh axis.
        tiles: the tiles that kernels prescribe (`prescribed_tiles`); `None` if memory is not tiled, as on a GPU.
        output_placements: placement of each output that its readers need; by default, they need none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
        >>> program = flatten(jax.make_jaxpr(jnp.matmul)(x, w))
        >>> placements = place(program, [(("data",), ()), ((), ("tensor",))], {"data": 2, "tensor": 4})
        >>> placements.by_value[program.outputs[0]]
        (('data',), ('tensor',))
    """
    placements = Placements(program, axis_sizes, tiles)
    for value, placement in zip(program.inputs, input_placements, strict=False):
        placements.by_value[value] = placement
    for value in program.inputs[len(input_placements) :]:
        placements.by_value[value] = _unsharded_placement(program.avals[value])
    for index, operation in enumerate(program.operations):  # forward, from operands to results
        new_placements = _output_placements(operation, index, placements)
        placements.by_value |= zip(operation.outputs, new_placements, strict=True)
    for value, placement in zip(program.outputs, output_placements, strict=False):
        if value is not None and value not in placements.fixed_values:
            _split_further(value, placement, placements)
    for index, operation in reversed(list(enumerate(program.operations))):
        # backward, so that a value is computed where its reader needs it
        if operation.kind == "dot_general":
            _place_product_operands(operation, placements)
        elif operation.kind in LOOPS:
            _place_loop_state(operation, index, placements)
            _place_stacks(operation, placements)
        elif operation.kind in ("enter", "leave"):
            _place_operand_across_region(operation, placements)
        elif operation.branches:
            _place_branches_again(operation, index, placements)
        elif operation.kind in _PLACED_BY_READERS:
            _place_operands(operation, placements)
    return placements


def _unsharded_placement(aval: Any) -> Placement:
    """Return the placement of an abstract value that no mesh axis splits."""
    return ((),) * len(shape_of(aval))


def _operand_avals(operation: Operation, placements: Placements) -> list[Any]:
    """Return the abstract value of each operand; for a literal, the literal."""
    avals = placements.program.avals
    return [
        operation.literals[index] if value is None else avals[value] for index, value in enumerate(operation.inputs)
    ]


def _operand_placements(operation: Operation, placements: Placements) -> list[Placement]:
    """Return the placement of each operand."""
    return [
        _unsharded_placement(aval) if value is None else placements.by_value[value]
        for aval, value in zip(_operand_avals(operation, placements), operation.inputs, strict=True)
    ]


def _shard_count(placements: Placements, placement: Placement) -> int:
    """Return the number of shards of a value with this placement."""
    return math.prod(part_counts(placement, placements.axis_sizes))


def _place_operands(operation: Operation, placements: Placements) -> None:
    """Place each operand like the result, if that splits the operand into more shards."""
    program = placements.program
    for value, output in zip(operation.inputs, operation.outputs * len(operation.inputs), strict=False):
        if value is None or value in placements.fixed_values:
            continue
        output_placement = operand_placement = placements.by_value[output]
        if operation.kind == "transpose":
            permutation = operation.params["permutation"]
            operand_placement = tuple(output_placement[permutation.index(dim)] for dim in range(len(permutation)))
        elif operation.kind == "reshape":
            shapes = shape_of(program.avals[value]), shape_of(program.avals[output])
            operand_placement = reshape_operand_placement(*shapes, output_placement, placements.part_count)
        elif operation.kind in _SUMS_OVER_DEVICES and len(output_placement) == len(placements.by_value[value]):
            pass  # the scattered dim differs in size
        elif shape_of(program.avals[value]) != shape_of(program.avals[output]):
            continue
        _split_further(value, operand_placement, placements)


def _split_further(value: int, placement: Placement, placements: Placements) -> None:
    """Place a value by a placement if that splits it into more shards than its own."""
    if _shard_count(placements, placement) > _shard_count(placements, placements.by_value[value]):
        placements.by_value[value] = placement


def _place_operand_across_region(operation: Operation, placements: Placements) -> None:
    """Place the operand of "enter" or "leave" like its result, apart from the region's manual axes.

    On a GPU, the gradient of a table that leaves a region was whole in a compiled step, on TPUs it was split.
    """
    value, placement = operation.inputs[0], placements.by_value[operation.outputs[0]]
    is_untiled = placements.tiles is None
    if value is None or value in placements.fixed_values or (operation.kind == "leave" and is_untiled):
        return
    if operation.kind == "enter":
        placement = joined_placement(dim_axes(operation.params["spec"], len(placement)), placement)
    else:
        placement = without_axes(operation.manual_axes, placement)
    _split_further(value, placement, placements)


def _place_branches_again(operation: Operation, index: int, placements: Placements) -> None:
    """Place the branches of a `cond` again if a branch returns a result in another placement than its readers need."""
    branch_placements = placements.branch_placements[index]
    output_placements = [placements.by_value[value] for value in operation.outputs]
    has_new_placements = any(
        value is not None and placed.by_value[value] != placement
        for placed in branch_placements
        for value, placement in zip(placed.program.outputs, output_placements, strict=True)
    )
    if not has_new_placements:
        return
    placements.branch_placements[index] = tuple(
        place(
            placed.program,
            _operand_placements(operation, placements)[1:],  # the first operand selects the branch
            placed.axis_sizes,
            tiles=placed.tiles,
            output_placements=output_placements,
        )
        for placed in branch_placements
    )


def _place_loop_state(operation: Operation, index: int, placements: Placements) -> None:
    """Place a loop's state, before, in and after the loop, as the readers of the final state need it."""
    body, body_placement_by_value = operation.loop_body, placements.loop_placements[index].by_value
    assert body is not None
    initial_values = carries(operation)
    final_values = operation.outputs[: len(initial_values)]
    final_placements = [placements.by_value[value] for value in final_values]
    operand_placements = _operand_placements(operation, placements)
    const_count = len(loop_parts(operation, operand_placements)[0])
    body_values = body.inputs[const_count : const_count + len(initial_values)]
    state_placements = [body_placement_by_value[value] for value in body_values]
    if final_placements != state_placements:
        state_placements = _place_loop(operation, index, operand_placements, placements, final_placements)[
            : len(initial_values)
        ]
    for values in (final_values, initial_values):
        for value, placement in zip(values, state_placements, strict=True):
            if value is not None and value not in placements.program.inputs:
                placements.by_value[value] = max(
                    placements.by_value[value], placement, key=partial(_shard_count, placements)
                )


def _place_stacks(operation: Operation, placements: Placements) -> None:
    """Place stacks that a loop returns, such as masks, as loops that read them element by element need their rows.

    Only stacks that nothing else splits are placed.
    """
    for stack in operation.outputs[len(carries(operation)) :]:
        if not any(placements.by_value[stack]) and stack not in placements.fixed_values:
            _split_further(stack, _placement_for_readers(stack, placements), placements)


def _placement_for_readers(value: int, placements: Placements) -> Placement:
    """Return the placement in which elementwise operations read a value, also in scans that read it or its rows."""
    program, best_placement = placements.program, placements.by_value[value]
    for index in program.readers.get(value, ()):
        reader = program.operations[index]
        placement = best_placement
        if reader.kind in ELEMENTWISE and shape_of(program.avals[reader.outputs[0]]) == shape_of(program.avals[value]):
            placement = placements.by_value[reader.outputs[0]]
        elif reader.kind == "scan" and reader.loop_body is not None:
            position = reader.inputs.index(value)
            placement = _placement_for_readers(reader.loop_body.inputs[position], placements.loop_placements[index])
            if position >= len(reader.inputs) - len(loop_parts(reader, reader.inputs)[2]):
                placement = ((), *placement)
        best_placement = max(best_placement, placement, key=partial(_shard_count, placements))
    return best_placement


def _place_product_operands(operation: Operation, placements: Placements) -> None:
    """Shard the unsharded dims of a matrix product's operands like the corresponding dims of its result."""
    output, operand_shapes = operation.outputs[0], [shape_of(aval) for aval in _operand_avals(operation, placements)]
    for operand_index, dim, output_dim in links_of(
        operation.kind, operation.params, operand_shapes, placements.program.avals[output].shape
    ):
        value = operation.inputs[operand_index]
        if value is None or value in placements.fixed_values:
            continue
        placement, axes = placements.by_value[value], placements.by_value[output][output_dim]
        if not placement[dim] and not set(axes) & {axis for other_axes in placement for axis in other_axes}:
            placements.by_value[value] = (*placement[:dim], axes, *placement[dim + 1 :])


def _output_placements(operation: Operation, index: int, placements: Placements) -> Sequence[Placement]:
    """Return the placement of each result of an operation.

    In `placements`, record the bytes that the operation gathers, whether it sums over devices, and the placements
    inside it.
    """
    operand_avals, operand_placements = (
        _operand_avals(operation, placements),
        _operand_placements(operation, placements),
    )
    kind = operation.kind
    if kind in ("scan", "while"):
        output_placements = _place_loop(operation, index, operand_placements, placements)
        if operation.manual_axes:  # slots and sums of a pipelined step start as zeros, placed as in the loop
            values_and_placements = zip(carries(operation), output_placements, strict=False)
            inputs = placements.program.inputs
            placements.by_value |= {
                v: placement for v, placement in values_and_placements if v is not None and v not in inputs
            }
        return output_placements
    if kind == "sharding_constraint":
        return [constraint_placement(operation.params, operand_placements[0])]
    if operation.branches:
        return _place_branches(operation, index, operand_placements, placements)
    if kind == "enter":
        return [without_axes(operation.manual_axes, operand_placements[0])]
    if kind == "leave":
        return [joined_placement(dim_axes(operation.params["spec"], len(operand_placements[0])), operand_placements[0])]
    if kind == "shard_map":
        return _place_region(operation, operand_placements, placements)
    if kind != "dot_general":
        return [
            _linked_placement(operation, operand_avals, operand_placements, output, placements)
            for output in operation.outputs
        ]
    dim_pairs = summed_dim_pairs(kind, operation.params)
    left_placement, right_placement = operand_placements
    summed_axes = {
        axis
        for left_dim, right_dim in dim_pairs
        for axis in left_placement[left_dim]
        if axis in right_placement[right_dim]
    }
    placements.gathered_bytes[index] = gathered_bytes(
        operation.params, operand_avals, operand_placements, summed_axes, placements.bytes_of
    )
    if "fsdp" in summed_axes:
        placements.summed_products.add(index)
    linked_placement = _linked_placement(operation, operand_avals, operand_placements, operation.outputs[0], placements)
    # a mesh axis that splits a summed dim of both operands is absent from the sum
    return [tuple(tuple(axis for axis in axes if axis not in summed_axes) for axes in linked_placement)]


def _linked_placement(
    operation: Operation,
    operand_avals: Sequence[Any],
    operand_placements: Sequence[Placement],
    result_value: int,
    placements: Placements,
) -> Placement:
    """Return the placement of a result; `result_value` is the number of the value.

    Each dim of the result gets the axes of the first sharded operand dim that corresponds to it, except for axes that
    another dim of the result uses.
    """
    result_shape = shape_of(placements.program.avals[result_value])
    operand_shapes = [shape_of(aval) for aval in operand_avals]
    links = links_of(operation.kind, operation.params, operand_shapes, result_shape)
    if operation.kind == "dot_general":  # the larger operand keeps its axes
        operand_bytes = [
            placements.bytes_of(aval, placement)
            for aval, placement in zip(operand_avals, operand_placements, strict=True)
        ]
        links = sorted(links, key=lambda link: -operand_bytes[link[0]])
    axes_by_result_dim: list[Axes] = [()] * len(result_shape)
    used_axes: set[str] = set()
    for operand_index, dim, result_dim in links:
        if axes_by_result_dim[result_dim] or not operand_placements[operand_index][dim]:
            continue
        axes = tuple(axis for axis in operand_placements[operand_index][dim] if axis not in used_axes)
        has_same_size = operand_shapes[operand_index][dim] == result_shape[result_dim]
        # a reshaped dim of another size keeps the axes if they split it evenly
        if has_same_size or result_shape[result_dim] % placements.part_count(axes) == 0:
            axes_by_result_dim[result_dim] = axes
            used_axes.update(axes)
    return tuple(axes_by_result_dim)


def _place_loop(
    operation: Operation,
    index: int,
    operand_placements: list[Placement],
    placements: Placements,
    final_placements: Sequence[Placement] | None = None,
) -> list[Placement]:
    """Place a loop's body until an iteration keeps the placement of the state; return each result's placement.

    `final_placements` are the placements that the readers of the final state need.
    """
    body = operation.loop_body
    assert body is not None
    axis_sizes = _automatic_axis_sizes(operation, placements)
    const_placements, state_placements, scanned_placements = map(list, loop_parts(operation, operand_placements))
    shard_count = partial(_shard_count, placements)
    if final_placements is not None:
        state_placements = [max(pair, key=shard_count) for pair in zip(state_placements, final_placements, strict=True)]
    slice_placements = [placement[1:] for placement in scanned_placements]
    body_tiles = None if placements.tiles is None else placements.tiles.loop_tiles[index]
    body_placements = place(
        body, [*const_placements, *state_placements, *slice_placements], axis_sizes, tiles=body_tiles
    )
    for _ in range(_MAX_PASSES):
        next_placements = [
            _unsharded_placement(body.avals[argument]) if value is None else body_placements.by_value[value]
            for value, argument in zip(
                body.outputs[: len(state_placements)], body.inputs[len(const_placements) :], strict=False
            )
        ]
        merged_placements = [max(pair, key=shard_count) for pair in zip(state_placements, next_placements, strict=True)]
        if merged_placements == state_placements:
            break
        state_placements = merged_placements
        body_placements = place(
            body, [*const_placements, *state_placements, *slice_placements], axis_sizes, tiles=body_tiles
        )
    placements.loop_placements[index] = body_placements
    stacked_outputs = body.outputs[len(state_placements) :]
    stacked_placements = [
        ((), *(body_placements.by_value[value] if value is not None else ())) for value in stacked_outputs
    ]
    return [*state_placements, *stacked_placements]


def _place_region(
    operation: Operation, operand_placements: Sequence[Placement], placements: Placements
) -> list[Placement]:
    """Return the placement of each result of a `shard_map`: its spec, and the automatic axes of its operands."""
    params = operation.params
    ranks = [len(placements.program.avals[value].shape) for value in operation.outputs]
    manual_placements = list(map(dim_axes, params["out_specs"], ranks))
    manual_axes = frozenset(params["newly_manual_axes"]) | operation.manual_axes
    automatic_placements = [without_axes(manual_axes, placement) for placement in operand_placements]
    if not any(map(any, automatic_placements)):
        return manual_placements
    body = flatten(params["jaxpr"], manual_axes)
    axis_sizes = {axis: size for axis, size in placements.axis_sizes.items() if axis not in manual_axes}
    placement_by_value = place(body, automatic_placements, axis_sizes).by_value
    return [
        manual if value is None else joined_placement(manual, placement_by_value[value])
        for manual, value in zip(manual_placements, body.outputs, strict=True)
    ]


def _automatic_axis_sizes(operation: Operation, placements: Placements) -> dict[str, int]:
    """Return the number of devices along each mesh axis that is not one of an operation's manual axes."""
    return {axis: size for axis, size in placements.axis_sizes.items() if axis not in operation.manual_axes}


def _place_branches(
    operation: Operation, index: int, operand_placements: list[Placement], placements: Placements
) -> list[Placement]:
    """Place the branches of a `cond`; return the placement of each result in the branch that shards it most."""
    axis_sizes = _automatic_axis_sizes(operation, placements)
    argument_placements = operand_placements[1:]  # the first operand selects the branch
    branch_tiles = (
        [None] * len(operation.branches) if placements.tiles is None else placements.tiles.branch_tiles[index]
    )
    branch_placements = [
        place(branch, argument_placements, axis_sizes, tiles=tiles)
        for branch, tiles in zip(operation.branches, branch_tiles, strict=True)
    ]
    placements.branch_placements[index] = tuple(branch_placements)
    output_placements = []
    for output_index, value in enumerate(operation.outputs):
        branches_and_outputs = [(placed, placed.program.outputs[output_index]) for placed in branch_placements]
        branch_output_placements = [
            placed.by_value[output] for placed, output in branches_and_outputs if output is not None
        ]
        unsharded_placement = _unsharded_placement(placements.program.avals[value])
        output_placements.append(
            max(branch_output_placements, key=partial(_shard_count, placements), default=unsharded_placement)
        )
    return output_placements
