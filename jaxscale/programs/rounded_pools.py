"""Pools of waiting values that a TPU keeps in bfloat16, because only matrix products read their slots.

The two halves of a split backward pass pass values on through a pool: the first half computes the gradient of a
projection's result, and the second multiplies it by the projection's input. Nothing else reads it. XLA therefore moves
the rounding from the product (`rounded`) to the operation that writes the slot, and the pool has bfloat16 elements.
"""

import dataclasses
from collections.abc import Set
from typing import Any

import jax

from jaxscale.programs.flat import VIEWS, FlatProgram, Operation, carries, loop_parts
from jaxscale.programs.looped import is_large_float32
from jaxscale.programs.regions import is_tick_loop
from jaxscale.programs.rounded import is_rounded, is_rounding


def with_rounded_pools(program: FlatProgram) -> FlatProgram:
    """Return a program whose loops over ticks keep pools in bfloat16 if only matrix products read their slots.

    Such a pool is written slot by slot, and every branch of a tick that does not write it returns it unchanged. The
    rule was inferred from one compiled step.

    Args:
        program: program of a step.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> program = flatten(jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 512)), jnp.ones((512, 512))))
        >>> with_rounded_pools(program) is program  # without a pipeline
        True
    """
    avals = dict(program.avals)
    operations = list(program.operations)
    for index, operation in enumerate(operations):
        if not is_tick_loop(operation):
            continue
        for state_index, initial_value in enumerate(carries(operation)):
            body = operation.loop_body
            assert body is not None
            final_value = operation.outputs[state_index]
            state_value = body.inputs[len(loop_parts(operation, operation.inputs)[0]) + state_index]
            if not is_large_float32(body.avals[state_value]) or not _is_private(initial_value, final_value, program):
                continue
            body_and_positions = _with_rounded_pool(body, state_value)
            if body_and_positions is None or body_and_positions[1] != {state_index}:
                continue
            operation = dataclasses.replace(operation, loop_body=body_and_positions[0])
            for value in (initial_value, final_value):
                if value is not None:
                    avals[value] = _in_bfloat16(avals[value])
        operations[index] = operation
    if all(new is old for new, old in zip(operations, program.operations, strict=True)):
        return program
    return dataclasses.replace(program, operations=operations, avals=avals)


def _is_private(initial_value: int | None, final_value: int, program: FlatProgram) -> bool:
    """Return whether only the loop reads a state's initial value, which is not an argument, and nothing its final one.

    An argument in flight of an asynchronous pipeline enters the loop through views.
    """
    if program.readers.get(final_value) or final_value in program.outputs:
        return False
    if initial_value is None:
        return True
    source_value: int | None = initial_value
    operation_by_result = {value: operation for operation in program.operations for value in operation.outputs}
    while source_value in operation_by_result and operation_by_result[source_value].kind in VIEWS:
        source_value = operation_by_result[source_value].inputs[0]
    is_read_once = len(program.readers[initial_value]) == 1 and initial_value not in program.outputs
    return is_read_once and source_value not in program.inputs


def _in_bfloat16(aval: Any) -> jax.ShapeDtypeStruct:
    """Return an abstract value of the same shape in bfloat16."""
    return jax.ShapeDtypeStruct(aval.shape, "bfloat16")


def _with_rounded_pool(program: FlatProgram, pool: int) -> tuple[FlatProgram, Set[int]] | None:
    """Return a program in which a pool, and all versions of it, are in bfloat16; `None` if a reader needs float32.

    Args:
        program: body of a loop over ticks, or a branch in it.
        pool: value of the pool, an input of the program.

    Returns:
        The program, and the positions of the outputs that are versions of the pool.
    """
    versions = {pool}
    operations = list(program.operations)
    for index, operation in enumerate(operations):
        if versions.isdisjoint(operation.inputs):
            continue
        if operation.kind == "dynamic_update_slice" and operation.inputs[0] in versions:
            if versions.intersection(operation.inputs[1:]):
                return None
            versions.update(operation.outputs)
        elif operation.branches and operation.inputs[0] not in versions:
            operation_and_positions = _with_rounded_branches(operation, versions)
            if operation_and_positions is None:
                return None
            operations[index], positions = operation_and_positions
            versions.update(operation.outputs[position] for position in positions)
        elif not all(is_rounding(operation, value, program) for value in versions.intersection(operation.inputs)):
            return None
    avals = program.avals | {value: _in_bfloat16(program.avals[value]) for value in versions}
    rounded_program = dataclasses.replace(program, operations=operations, avals=avals)
    positions = {position for position, value in enumerate(program.outputs) if value in versions}
    return _with_rounded_sources(rounded_program), positions


def _with_rounded_branches(operation: Operation, versions: Set[int]) -> tuple[Operation, Set[int]] | None:
    """Return a `cond` whose branches read a pool in bfloat16, and the positions of the results that are the pool."""
    operand_positions = [index for index, value in enumerate(operation.inputs[1:]) if value in versions]
    branches = []
    positions_by_branch = []
    for branch in operation.branches:
        positions: Set[int] = set()
        for operand_position in operand_positions:
            branch_and_positions = _with_rounded_pool(branch, branch.inputs[operand_position])
            if branch_and_positions is None:
                return None
            branch, branch_positions = branch_and_positions
            positions |= branch_positions
        branches.append(branch)
        positions_by_branch.append(positions)
    if any(positions != positions_by_branch[0] for positions in positions_by_branch):
        return None  # a branch computes a new array in place of the pool
    return dataclasses.replace(operation, branches=tuple(branches)), positions_by_branch[0]


def _with_rounded_sources(program: FlatProgram) -> FlatProgram:
    """Return a program whose branches and loops return in bfloat16 what is only written to pools in bfloat16."""
    operations = [
        _with_rounded_results(operation, program) if operation.branches else operation
        for operation in program.operations
    ]
    return dataclasses.replace(program, operations=operations)


def _with_rounded_results(operation: Operation, program: FlatProgram) -> Operation:
    """Return a `cond` whose branches compute in bfloat16 the results of which all readers round."""
    positions = {position for position, value in enumerate(operation.outputs) if is_rounded(value, program)}
    branches = []
    for branch in operation.branches:
        avals = dict(branch.avals)
        for position in positions:
            value = branch.outputs[position]
            if value is not None and _is_rounded_result(value, positions, branch):
                avals[value] = _in_bfloat16(avals[value])
        branches.append(dataclasses.replace(branch, avals=avals))
    return dataclasses.replace(operation, branches=tuple(branches))


def _is_rounded_result(value: int, positions: Set[int], branch: FlatProgram) -> bool:
    """Return whether a large float32 value of a branch is used in bfloat16 alone.

    Args:
        value: value that the branch computes.
        positions: positions of the results that the branch may return in bfloat16.
        branch: program of the branch.
    """
    readers = [branch.operations[index] for index in branch.readers.get(value, ())]
    return (
        value not in branch.inputs
        and is_large_float32(branch.avals[value])
        and all(position in positions for position, output in enumerate(branch.outputs) if output == value)
        and all(is_rounding(reader, value, branch) for reader in readers)
    )
