"""What the values of a traced train step are for: kept activations, gradients, the loss, a compute copy."""

from collections.abc import Sequence

from jaxscale.planning.flat import PIPE, Operation, Program, carries
from jaxscale.planning.regions import tick_loops

MOVES = ("enter", "slice", "dynamic_slice", "squeeze", "broadcast_in_dim", "ppermute", "concatenate")
"""What becomes of a pipelined step's weights on their way to the stages; Chimera joins two copies of them."""

EXPRESSIONS = ("convert_element_type", "sharding_constraint", "optimization_barrier", "copy", "reshape", "transpose")


def kinds_of(program: Program) -> dict[int, str]:
    """The kind of each value of a step's program, or of the body of its loop over microbatches.

    A value that is made in the forward pass and read in the backward pass is kept; between the last loop of the one and
    the first of the other it belongs to the loss; one of the backward pass that is read after it is a gradient. A
    program that is neither step nor microbatch has transients alone. What a pipeline hands from tick to tick is a sum
    of gradients where something reads it afterwards, else stash: messages, and what forwards keep.
    """
    operations = program.operations
    ticks = tick_loops(program)
    if ticks:
        return _of_pipeline(program, ticks)
    copies = _made_of(program, set(program.inputs))
    microbatches = [operation for operation in operations if operation.loop is not None and both_passes(operation.loop)]
    if microbatches and not any(operation.params.get("reverse") for operation in operations):
        sums = {value for operation in microbatches for value in (*operation.inputs, *operation.outputs)}
        return {value: "gradients" for value in sums if value is not None} | dict.fromkeys(copies, "compute copy")
    if not both_passes(program):
        return {}
    found: dict[int, str] = {}
    last_read: dict[int, int] = {}
    for at, operation in enumerate(operations):
        for value in operation.inputs:
            if value is not None:
                last_read[value] = at
    for value in program.outputs:
        if value is not None:
            last_read[value] = len(operations)
    head, tail = loss_range(operations)
    end = max(at for at, operation in enumerate(operations) if operation.backward)
    for at, operation in enumerate(operations):
        for value in operation.outputs:
            last = last_read.get(value, at)
            if value in copies:
                found[value] = "compute copy"
            elif at <= end < last and operation.backward:
                found[value] = "gradients"
            elif head < at < tail:
                found[value] = "loss"
            elif not operation.backward and any(user.backward for user in operations[at : last + 1]):
                found[value] = "kept activations"
    return found


def both_passes(program: Program) -> bool:
    """Whether a program has operations of the forward and of the backward pass."""
    return len({operation.backward for operation in program.operations}) == 2


def loss_range(operations: Sequence[Operation]) -> tuple[int, int]:
    """Places of the last loop over layers of the forward pass, and of the first of the backward pass."""
    first_back = next(at for at, operation in enumerate(operations) if operation.backward)
    tails = [at for at, o in enumerate(operations) if o.loop is not None and o.params.get("reverse")]
    read = {value for at in tails for value in operations[at].inputs}
    heads = [
        at
        for at, operation in enumerate(operations[:first_back])
        if operation.loop is not None and any(value in read for value in operation.outputs)
    ]
    return (heads[-1] if heads else first_back, tails[0] if tails else first_back)


def _of_pipeline(program: Program, ticks: Sequence[Operation]) -> dict[int, str]:
    found = dict.fromkeys(_made_of(program, set(program.inputs), (*EXPRESSIONS, *MOVES)), "compute copy")
    read = {value for operation in program.operations for value in operation.inputs}
    for operation in ticks:
        for start, end in zip(carries(operation), operation.outputs, strict=False):
            kind = "gradients" if end in read else "stash"
            found |= {value: kind for value in (start, end) if value is not None}
    after = max(map(program.operations.index, ticks))
    for operation in program.operations[after + 1 :]:
        if PIPE in operation.manual:  # they are reduced
            found |= dict.fromkeys(operation.outputs, "gradients")
    return found


def _made_of(program: Program, given: set[int], kinds: Sequence[str] = EXPRESSIONS) -> set[int]:
    """Values that are arguments in another type or place."""
    found: set[int] = set()
    for operation in program.operations:
        if operation.kind in kinds and not operation.backward:
            read = {value for value in operation.inputs if value is not None}
            if read and read <= given | found:
                found.update(operation.outputs)
    return found
