"""Copies of weights in two-byte types to other tiles, as XLA makes them for a TPU 7x.

TPU 7x multiplies arrays of two-byte types in tiles of 16 x 128 elements, but a program's arguments are in tiles of
8 x 128. XLA therefore copies each such argument that a product or a loop reads, such as the weights of a plan whose
parameters are in two-byte types.

Weights that are gathered before the passes (ZeRO 1 and 2) are gathered in tiles of 8 x 128, too. XLA copies them once
for each loop that reads them. The sparse cores make all these copies ahead of time: while the forward loop runs, the
gathered weights, the forward pass's copy and the backward pass's copy are all in memory, and after it the last one
alone. A weight whose shard pads less in another layout is gathered in that layout, and only its two copies stay. A loop
over microbatches reads one copy. The rule was inferred from three compiled steps.
Left out: weights between whose gather and whose loop another operation stands, as with memory sqrt, codecs of replicas
and pipelines.

An asynchronous pipeline keeps pools of activations between steps. As arguments, they have the layout with the least
padding, which need not be row-major; the loop over ticks computes with another, and copies them (`with_retiled_pools`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax

from jaxscale.programs.flat import VIEWS, FlatProgram, Operation, loop_parts
from jaxscale.programs.regions import is_tick_loop
from jaxscale.programs.tiles import RETILE, SMALL_COUNT, pads_less_in_other_layout

RETILED_OPERANDS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "transpose", "reshape", "squeeze",
    "sharding_constraint", "optimization_barrier",
)  # fmt: skip
"""Operations that read arguments in tiles of 16 x 128 elements, or that lead to such operations."""


def with_retiled_weights(program: FlatProgram) -> FlatProgram:
    """Return a program that copies large weights in two-byte types before products and loops read them.

    Args:
        program: program of a step.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> weight = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
        >>> program = flatten(jax.make_jaxpr(lambda x, w: (x.astype(w.dtype) @ w, w + 1))(jnp.ones((8, 512)), weight))
        >>> [operation.kind for operation in with_retiled_weights(program).operations]
        ['convert_element_type', 'retile', 'dot_general', 'add']
    """
    avals = dict(program.avals)
    new_numbers = itertools.count(max(avals, default=0) + 1)
    gathered_weights = _gathered_weights(program)
    gathering_values = _values_before(gathered_weights, program)
    arguments_to_copy = {value for value in program.inputs if _is_retiled(avals[value])}
    copy_by_argument: dict[int, int] = {}
    copies_by_weight: dict[int, list[int]] = {}  # copies of each gathered weight for loops that have not been reached
    operations: list[Operation] = []

    def append_copy(value: int, aval: Any) -> int:
        """Append an operation that copies a value to a new array, and return the array."""
        copy_number = next(new_numbers)
        avals[copy_number] = aval
        operations.append(Operation(RETILE, (value,), (copy_number,), {}))
        return copy_number

    for operation in program.operations:
        is_loop = operation.loop_body is not None
        copy_by_operand: dict[int | None, int] = {}
        weights_of_new_copies: list[int] = []
        if (is_loop or operation.kind in RETILED_OPERANDS) and gathering_values.isdisjoint(operation.outputs):
            for value in operation.inputs:
                if value in arguments_to_copy:
                    if value not in copy_by_argument:
                        copy_by_argument[value] = append_copy(value, avals[value])
                    copy_by_operand[value] = copy_by_argument[value]
                elif is_loop and value in gathered_weights and value not in copy_by_operand:
                    if value not in copies_by_weight:
                        readers = dict.fromkeys(program.readers[value])
                        loops = [index for index in readers if program.operations[index].loop_body is not None]
                        copies_by_weight[value] = [append_copy(value, avals[value]) for _ in loops]
                        weights_of_new_copies.append(value)
                    copy_by_operand[value] = copies_by_weight[value].pop(0)
            inputs = tuple(copy_by_operand.get(value, value) for value in operation.inputs)
            operation = dataclasses.replace(operation, inputs=inputs)
        operations.append(operation)
        for weight in weights_of_new_copies:
            # these copies are complete when this loop is; until then the weight stays
            if copies_by_weight[weight] and not gathered_weights[weight]:
                append_copy(weight, jax.ShapeDtypeStruct((), "uint32"))
    return dataclasses.replace(program, operations=operations, avals=avals)


def with_retiled_pools(program: FlatProgram, *, retiles_weights: bool) -> FlatProgram:
    """Return a program that copies the arguments of a loop over ticks for which a row-major layout has more padding.

    The rule was inferred from two compiled steps of vision transformers, whose numbers of tokens are odd, and the
    copies on a 7x from a step of a decoder. Left out: mesh axes that split the dims within the loop.

    Args:
        program: program of a step; only an asynchronous pipeline has such arguments.
        retiles_weights: whether large arguments of two-byte types are copied, too, as on a 7x.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> program = flatten(jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 512)), jnp.ones((512, 512))))
        >>> with_retiled_pools(program, retiles_weights=True) is program  # without a pipeline
        True
    """
    avals = dict(program.avals)
    new_numbers = itertools.count(max(avals, default=0) + 1)
    producer_by_value = {value: operation for operation in program.operations for value in operation.outputs}

    def is_retiled_argument(value: int | None) -> bool:
        """Return whether a value is an argument, up to views, that the loop reads in other tiles."""
        if value is None:
            return False
        has_other_layout = pads_less_in_other_layout(getattr(avals[value], "shape", ()))
        if not has_other_layout and not (retiles_weights and _is_retiled(avals[value])):
            return False
        while value in producer_by_value and producer_by_value[value].kind in VIEWS:
            value = producer_by_value[value].inputs[0]
        return value in program.inputs

    operations: list[Operation] = []
    for operation in program.operations:
        if is_tick_loop(operation):
            _, state_values, stacked_values = loop_parts(operation, operation.inputs)
            inputs = list(operation.inputs)
            state_start = len(inputs) - len(stacked_values) - len(state_values)
            for position, value in enumerate(state_values, state_start):
                if is_retiled_argument(value):
                    assert value is not None
                    inputs[position] = copy_number = next(new_numbers)
                    avals[copy_number] = avals[value]
                    operations.append(
                        Operation(RETILE, (value,), (copy_number,), {}, manual_axes=operation.manual_axes)
                    )
            operation = dataclasses.replace(operation, inputs=tuple(inputs))
        operations.append(operation)
    if len(operations) == len(program.operations):
        return program
    return dataclasses.replace(program, operations=operations, avals=avals)


def _gathered_weights(program: FlatProgram) -> dict[int, bool]:
    """Return the large values of two-byte types that are gathered behind a barrier (ZeRO 1 and 2).

    Each has a flag: whether its shards pad less in a layout that is not row-major.
    """
    operation_by_value: dict[int | None, Operation] = {
        value: operation for operation in program.operations for value in operation.outputs
    }
    flag_by_weight: dict[int, bool] = {}
    for operation in program.operations:
        barrier = operation_by_value.get(operation.inputs[0]) if operation.kind == "sharding_constraint" else None
        if barrier is None or barrier.kind != "optimization_barrier" or operation.is_backward:
            continue
        weight = operation.outputs[0]
        if _is_retiled(program.avals[weight]):
            shape = program.avals[weight].shape
            constraint = operation_by_value.get(barrier.inputs[0])
            sharding = None if constraint is None else constraint.params.get("sharding")
            flag_by_weight[weight] = pads_less_in_other_layout(sharding.shard_shape(shape) if sharding else shape)
    return flag_by_weight


def _values_before(gathered_weights: Iterable[int], program: FlatProgram) -> set[int]:
    """Return the gathered weights and the values between them and the program's inputs."""
    values = set(gathered_weights)
    for operation in reversed(program.operations):
        if not values.isdisjoint(operation.outputs):
            values.update(value for value in operation.inputs if value is not None)
    return values


def _is_retiled(aval: Any) -> bool:
    """Return whether an abstract value is a large array of a two-byte type."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return len(shape) >= 2 and math.prod(shape) >= SMALL_COUNT and getattr(dtype, "itemsize", 0) == 2
