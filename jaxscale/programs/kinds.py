"""The kinds of a traced train step's values: kept activations, gradients, loss, compute copy, stash.

The compute copy is the parameters in the type of the forward pass. The stash is the activations and messages that a
pipeline stores between ticks, the rounds in which each of its devices runs one pass of a stage or none. Values are
represented by their numbers in a `FlatProgram`.
"""

from collections.abc import Sequence

from jaxscale.programs.flat import PIPE, FlatProgram, Operation, carries
from jaxscale.programs.regions import tick_loops

MOVES = ("enter", "slice", "dynamic_slice", "squeeze", "broadcast_in_dim", "ppermute", "concatenate")
"""Operations between a pipelined step's weights and its stages; Chimera's schedule concatenates two copies."""

EXPRESSIONS = ("convert_element_type", "sharding_constraint", "optimization_barrier", "copy", "reshape", "transpose")
"""Operations between a step's parameters and their compute copy."""


def kinds_of(program: FlatProgram) -> dict[int, str]:
    """Return the kind of each value of a step's program, or of its loop over microbatches; transients are omitted.

    A value that is computed in the forward pass and read in the backward pass is a kept activation. A value between the
    last loop of the forward pass and the first of the backward pass belongs to the loss. A value of the backward pass
    that is read after it is a gradient. Any other program has only transients. The state of a pipeline's tick loop is a
    sum of gradients if it is read after the loop, and stash if not.
    """
    operations = program.operations
    loops = tick_loops(program)
    if loops:
        return _kinds_of_pipeline(program, loops)
    compute_copies = _conversions_of(program, set(program.inputs))
    microbatch_loops = [op for op in operations if op.loop is not None and has_both_passes(op.loop)]
    if microbatch_loops and not any(operation.params.get("reverse") for operation in operations):
        sum_values = {value for operation in microbatch_loops for value in (*operation.inputs, *operation.outputs)}
        sum_kinds = {value: "gradients" for value in sum_values if value is not None}
        return sum_kinds | dict.fromkeys(compute_copies, "compute copy")
    if not has_both_passes(program):
        return {}
    kinds: dict[int, str] = {}
    last_read_by_value = {value: indices[-1] for value, indices in program.readers.items()}
    last_read_by_value |= {value: len(operations) for value in program.outputs if value is not None}
    forward_end, backward_start = loss_range(operations)
    backward_end = max(index for index, operation in enumerate(operations) if operation.backward)
    for index, operation in enumerate(operations):
        for value in operation.outputs:
            last_read_index = last_read_by_value.get(value, index)
            if value in compute_copies:
                kinds[value] = "compute copy"
            elif index <= backward_end < last_read_index and operation.backward:
                kinds[value] = "gradients"
            elif forward_end < index < backward_start:
                kinds[value] = "loss"
            elif not operation.backward and any(op.backward for op in operations[index : last_read_index + 1]):
                kinds[value] = "kept activations"
    return kinds


def has_both_passes(program: FlatProgram) -> bool:
    """Return whether a program has operations of the forward pass and of the backward pass."""
    return len({operation.backward for operation in program.operations}) == 2


def loss_range(operations: Sequence[Operation]) -> tuple[int, int]:
    """Return the index of the forward pass's last loop over layers, then that of the backward pass's first one.

    If there is no such loop, the index of the turn, the first operation of the backward pass, is returned instead.
    """
    turn = next(index for index, operation in enumerate(operations) if operation.backward)
    loops = [(index, operation) for index, operation in enumerate(operations) if operation.loop is not None]
    backward_loops = [index for index, loop in loops if loop.params.get("reverse")]
    backward_inputs = {value for index in backward_loops for value in operations[index].inputs}
    forward_loops = [i for i, loop in loops if i < turn and any(value in backward_inputs for value in loop.outputs)]
    return (forward_loops[-1] if forward_loops else turn, backward_loops[0] if backward_loops else turn)


def _kinds_of_pipeline(program: FlatProgram, loops_over_ticks: Sequence[Operation]) -> dict[int, str]:
    """Return the kind of each value of a pipelined step with these loops over ticks; transients are omitted."""
    kinds = dict.fromkeys(_conversions_of(program, set(program.inputs), (*EXPRESSIONS, *MOVES)), "compute copy")
    for operation in loops_over_ticks:
        for initial, final in zip(carries(operation), operation.outputs, strict=False):
            kind = "gradients" if final in program.readers else "stash"
            kinds |= {value: kind for value in (initial, final) if value is not None}
    last_loop_index = max(map(program.operations.index, loops_over_ticks))
    for operation in program.operations[last_loop_index + 1 :]:
        if PIPE in operation.manual:  # reductions of gradients
            kinds |= dict.fromkeys(operation.outputs, "gradients")
    return kinds


def _conversions_of(program: FlatProgram, inputs: set[int], primitives: Sequence[str] = EXPRESSIONS) -> set[int]:
    """Return the values that operations of these primitives alone compute from `inputs` in the forward pass."""
    values: set[int] = set()
    for operation in program.operations:
        if operation.kind in primitives and not operation.backward:
            operands = {value for value in operation.inputs if value is not None}
            if operands and operands <= inputs | values:
                values.update(operation.outputs)
    return values
