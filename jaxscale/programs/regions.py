"""Arrays that the loop over ticks of a pipelined step updates in place.

In each tick (one round of the schedule) a device runs one branch of a `cond`: a pass of a stage, or no pass. Messages
and activations wait in slots, the entries of arrays called pools; sums of gradients are other arrays. A branch updates
some of these arrays and returns the others unchanged; none of these results is a new array. Values computed in a branch
are alive only within the branch, so the branch that needs the most memory determines the peak. Values are represented
by their numbers in a `FlatProgram`.
"""

import math
from collections.abc import Iterator, Sequence, Set

from jaxscale.programs.flat import PIPE, FlatProgram, Operation, carries

SLICES = ("slice", "dynamic_slice")
"""Operations that return a slice."""
ELEMENT_PRESERVING = (*SLICES, "squeeze", "reshape", "broadcast_in_dim", "pcast")
"""Operations that return all elements of their operand, unchanged, if the result has as many elements."""


def results_and_unchanged_operands(operation: Operation) -> Iterator[tuple[int, int]]:
    """Yield each pair (result, operand) of a `cond` for which a branch returns the operand unchanged as the result."""
    for output_index, result in enumerate(operation.outputs):
        for branch in operation.branches:
            branch_output = branch.outputs[output_index]
            if branch_output is not None and branch_output in branch.inputs:
                operand_index = 1 + branch.inputs.index(branch_output)  # the first operand selects the branch
                operand = operation.inputs[operand_index] if operand_index < len(operation.inputs) else None
                if operand is not None:
                    yield result, operand
                    break


def in_place_results(operation: Operation, caller_values: Set[int], program: FlatProgram) -> set[int]:
    """Return an operation's results that need no new memory: they are the caller's values or overwrite them.

    Args:
        operation: an operation of a pipelined step.
        caller_values: the values that the caller has in memory.
        program: program of the operation.
    """
    if PIPE not in operation.manual_axes:
        return set()
    if operation.kind == "enter" or is_whole_array(operation, program, ELEMENT_PRESERVING):
        return set(operation.outputs) if operation.inputs[0] in caller_values else set()
    if is_tick_loop(operation):  # of an asynchronous step, which also receives and returns the messages in transit
        results_and_initial_values = zip(operation.outputs, carries(operation), strict=False)
        return {result for result, operand in results_and_initial_values if operand in caller_values}
    if operation.kind == "dynamic_update_slice":
        return set(operation.outputs) if operation.inputs[0] in caller_values else set()
    return {result for result, operand in results_and_unchanged_operands(operation) if operand in caller_values}


def reshaped_outputs(program: FlatProgram, renaming_primitives: Sequence[str]) -> set[int]:
    """Return the values of a branch that share a result's memory because they differ from it only in shape or type.

    Args:
        program: program of the branch.
        renaming_primitives: names of the primitives that only change shape or type.
    """
    sharing_values = {value for value in program.outputs if value is not None}
    for operation in reversed(program.operations):
        if operation.kind not in renaming_primitives or operation.outputs[0] not in sharing_values:
            continue
        operand = operation.inputs[0]
        if operand is not None and len(program.readers.get(operand, ())) == 1:
            sharing_values.update(value for value in operation.inputs if value is not None)
    return sharing_values - {None, *program.inputs}


def is_whole_array(operation: Operation, program: FlatProgram, kinds: Sequence[str] = SLICES) -> bool:
    """Return whether an operation is in a pipelined step, is of one of `kinds`, and returns its whole operand.

    An example is the slice of a pool's only slot, or of a device's only stage.
    """
    if PIPE not in operation.manual_axes or operation.kind not in kinds or operation.inputs[0] is None:
        return False
    operand, result = program.avals[operation.inputs[0]], program.avals[operation.outputs[0]]
    return math.prod(operand.shape) == math.prod(result.shape)


def tick_loops(program: FlatProgram) -> list[Operation]:
    """Return the loops over ticks of a pipelined step."""
    return [operation for operation in program.operations if is_tick_loop(operation)]


def is_tick_loop(operation: Operation) -> bool:
    """Return whether an operation is a loop over ticks: a loop over branches within a pipelined step."""
    body = operation.loop_body if PIPE in operation.manual_axes else None
    return body is not None and any(body_operation.branches for body_operation in body.operations)
