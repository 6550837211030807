"""What the values of a traced train step are for: kept activations, gradients, the loss, a compute copy."""

from jaxscale.planning.flat import Operation, Program

EXPRESSIONS = ("convert_element_type", "sharding_constraint", "optimization_barrier", "copy", "reshape", "transpose")


def kinds_of(program: Program) -> dict[int, str]:
    """The kind of each value of a step's program, or of the body of its loop over microbatches.

    A value that is made in the forward pass and read in the backward pass is kept; between the last loop of the one and
    the first of the other it belongs to the loss. A program that is neither step nor microbatch has transients alone.
    """
    operations = program.operations
    if not any(operation.backward for operation in operations) or all(operation.backward for operation in operations):
        return {}
    found: dict[int, str] = {}
    last_read: dict[int, int] = {}
    for at, operation in enumerate(operations):
        for value in operation.inputs:
            if value is not None:
                last_read[value] = at
    head, tail = _loss(operations)
    copies = _made_of(program, set(program.inputs))
    gradients = _leading_to(program)
    for at, operation in enumerate(operations):
        for value in operation.outputs:
            if value in copies:
                found[value] = "compute copy"
            elif value in gradients and operation.backward:
                found[value] = "gradients"
            elif head < at < tail:
                found[value] = "loss"
            elif not operation.backward and any(
                user.backward for user in operations[at : last_read.get(value, at) + 1]
            ):
                found[value] = "kept activations"
    return found


def _loss(operations: list[Operation]) -> tuple[int, int]:
    """Places of the last loop of the forward pass, and the first of the backward pass, over layers."""
    first_back = next(at for at, operation in enumerate(operations) if operation.backward)
    heads = [at for at, o in enumerate(operations[:first_back]) if o.loop is not None and _stacks(o)]
    tails = [
        at for at, o in enumerate(operations) if at > first_back and o.loop is not None and o.params.get("reverse")
    ]
    return (heads[-1] if heads else first_back, tails[0] if tails else first_back)


def _stacks(operation: Operation) -> bool:
    """Whether a loop is one over layers: it stacks what its backward pass reads."""
    return operation.kind == "scan" and len(operation.outputs) > operation.params["num_carry"]


def _made_of(program: Program, given: set[int]) -> set[int]:
    """Values that are arguments in another type or place."""
    found: set[int] = set()
    for operation in program.operations:
        if operation.kind in EXPRESSIONS and not operation.backward:
            read = {value for value in operation.inputs if value is not None}
            if read and read <= given | found:
                found.update(operation.outputs)
    return found


def _leading_to(program: Program) -> set[int]:
    """Values that are results in another type or place, and the results."""
    found = {value for value in program.outputs if value is not None}
    for operation in reversed(program.operations):
        if any(value in found for value in operation.outputs):
            if operation.kind in (*EXPRESSIONS, "mul", "add", "add_any"):
                found.update(value for value in operation.inputs if value is not None)
            elif operation.loop is not None and not operation.params.get("reverse"):
                # the sums of a loop over microbatches
                first = operation.params.get("num_consts", 0)
                found.update(value for value in operation.inputs[first:] if value is not None)
    return found - set(program.inputs)
