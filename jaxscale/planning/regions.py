"""The loop over ticks of a pipelined step: which arrays its branches change in their place.

A tick puts a message into its slot and hands pools and sums to a `cond`, whose branches change some of them and hand on
the rest; none of it is an array of its own. What a branch computes lives and dies within it, so that the branch which
needs the most decides.
"""

import collections
import math
from collections.abc import Iterator, Sequence, Set

from jaxscale.planning.flat import PIPE, Operation, Program, carries

SLICES = ("slice", "dynamic_slice")
SAME = (*SLICES, "squeeze", "reshape", "broadcast_in_dim", "pcast")
"""Operations that keep an array as it is, where they keep its size."""


def handed_on(operation: Operation) -> Iterator[tuple[int, int]]:
    """Results of a `cond` that some branch takes from an operand as it is, each with this operand."""
    for number, made in enumerate(operation.outputs):
        for branch in operation.branches:
            inside = branch.outputs[number]
            if inside is not None and inside in branch.inputs:
                at = 1 + branch.inputs.index(inside)  # the first operand says which branch
                read = operation.inputs[at] if at < len(operation.inputs) else None
                if read is not None:
                    yield made, read
                    break


def within(operation: Operation, given: Set[int], program: Program) -> set[int]:
    """Results that are, or take the place of, what the caller gave: slots are written, sums are added to."""
    if PIPE not in operation.manual:
        return set()
    if operation.kind in ("enter", *SAME) and (operation.kind == "enter" or whole(operation, program, SAME)):
        return set(operation.outputs) if operation.inputs[0] in given else set()
    if _ticks(operation):  # what is in flight in an asynchronous pipeline: the step's argument, and given back
        pairs = zip(operation.outputs, carries(operation), strict=False)
        return {made for made, read in pairs if read in given}
    if operation.kind == "dynamic_update_slice":
        return set(operation.outputs) if operation.inputs[0] in given else set()
    return {made for made, read in handed_on(operation) if read in given}


def returned(program: Program, renamed: Sequence[str]) -> set[int]:
    """Values of a branch that it returns in another shape or type: they are made where the result lies.

    Args:
        program: the branch.
        renamed: operations that change shape or type alone.
    """
    readers = collections.Counter(value for operation in program.operations for value in set(operation.inputs))
    found = {value for value in program.outputs if value is not None}
    for operation in reversed(program.operations):
        if operation.kind in renamed and operation.outputs[0] in found and readers[operation.inputs[0]] == 1:
            found.update(value for value in operation.inputs if value is not None)
    return found - {None, *program.inputs}


def whole(operation: Operation, program: Program, kinds: Sequence[str] = SLICES) -> bool:
    """Whether a slice is of all there is: the only slot of a pool, the only stage of a device."""
    if PIPE not in operation.manual or operation.kind not in kinds or operation.inputs[0] is None:
        return False
    read, made = program.shapes[operation.inputs[0]], program.shapes[operation.outputs[0]]
    return math.prod(read.shape) == math.prod(made.shape)


def tick_loops(program: Program) -> list[Operation]:
    """The loops over ticks of a pipelined step."""
    return [operation for operation in program.operations if _ticks(operation)]


def _ticks(operation: Operation) -> bool:
    return (
        operation.loop is not None and PIPE in operation.manual and any(o.branches for o in operation.loop.operations)
    )
