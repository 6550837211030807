"""The kinds of a traced train step's values: kept activations, gradients, loss, compute copy, stash.

The compute copy is the parameters in the type of the forward pass. The stash is the activations and messages that a
pipeline stores between ticks. In each tick, every device of the pipeline runs at most one pass of a stage. Values are
represented by their numbers in a `FlatProgram`.
"""

from collections.abc import Sequence

from jaxscale.programs.flat import PIPE, FlatProgram, Operation, carries
from jaxscale.programs.regions import tick_loops
from jaxscale.programs.tiles import RETILE

STAGE_WEIGHT_PRIMITIVES = ("enter", "slice", "dynamic_slice", "squeeze", "broadcast_in_dim", "ppermute", "concatenate")
"""Operations that turn a pipelined step's weights into weights of stages; Chimera concatenates two copies."""

COMPUTE_COPY_PRIMITIVES = (
    "convert_element_type", "sharding_constraint", "optimization_barrier", "copy", "reshape", "transpose", RETILE,
)  # fmt: skip
"""Operations that turn a step's parameters into their compute copy."""


def kinds_of(program: FlatProgram) -> dict[int, str]:
    """Return the kind of each value of a program, by the value's number; transients are omitted.

    The program is that of a step, or the body of its loop over microbatches.

    A value that is computed in the forward pass and read in the backward pass is a kept activation. A value between the
    last loop of the forward pass and the first loop of the backward pass belongs to the loss. A value that is computed
    in the backward pass and read after it is a gradient. The state of a pipeline's tick loop is a sum of gradients if
    it is read after the loop; otherwise it is stash. A program without both passes has only transients.
    """
    operations = program.operations
    loops = tick_loops(program)
    if loops:
        return _kinds_of_pipeline(program, loops)
    compute_copies = _converted_values(program, set(program.inputs))
    microbatch_loops = [op for op in operations if op.loop_body is not None and has_both_passes(op.loop_body)]
    if microbatch_loops and not any(operation.params.get("reverse") for operation in operations):
        loop_values = {value for operation in microbatch_loops for value in (*operation.inputs, *operation.outputs)}
        kind_by_loop_value = {value: "gradients" for value in loop_values if value is not None}
        return kind_by_loop_value | dict.fromkeys(compute_copies, "compute copy")
    if not has_both_passes(program):
        return {}
    kind_by_value: dict[int, str] = {}
    last_read_index_by_value = {value: indices[-1] for value, indices in program.readers.items()}
    last_read_index_by_value |= {value: len(operations) for value in program.outputs if value is not None}
    forward_end, backward_start = loss_range(operations)
    backward_end = max(index for index, operation in enumerate(operations) if operation.is_backward)
    for index, operation in enumerate(operations):
        for value in operation.outputs:
            last_read_index = last_read_index_by_value.get(value, index)
            if value in compute_copies:
                kind_by_value[value] = "compute copy"
            elif index <= backward_end < last_read_index and operation.is_backward:
                kind_by_value[value] = "gradients"
            elif forward_end < index < backward_start:
                kind_by_value[value] = "loss"
            elif not operation.is_backward and any(op.is_backward for op in operations[index : last_read_index + 1]):
                kind_by_value[value] = "kept activations"
    return kind_by_value


def has_both_passes(program: FlatProgram) -> bool:
    """Return whether a program has operations of the forward pass and of the backward pass."""
    return len({operation.is_backward for operation in program.operations}) == 2


def loss_range(operations: Sequence[Operation]) -> tuple[int, int]:
    """Return the indices of the forward pass's last loop over layers and of the backward pass's first loop over layers.

    If a pass has no such loop, the index of the first operation of the backward pass is returned instead.
    """
    first_backward_index = next(index for index, operation in enumerate(operations) if operation.is_backward)
    indices_and_loops = [
        (index, operation) for index, operation in enumerate(operations) if operation.loop_body is not None
    ]
    backward_loop_indices = [index for index, loop in indices_and_loops if loop.params.get("reverse")]
    backward_input_values = {value for index in backward_loop_indices for value in operations[index].inputs}
    forward_loop_indices = [
        index
        for index, loop in indices_and_loops
        if index < first_backward_index and any(value in backward_input_values for value in loop.outputs)
    ]
    forward_end = forward_loop_indices[-1] if forward_loop_indices else first_backward_index
    return forward_end, backward_loop_indices[0] if backward_loop_indices else first_backward_index


def _kinds_of_pipeline(program: FlatProgram, loops: Sequence[Operation]) -> dict[int, str]:
    """Return the kind of each value of a pipelined step with these loops over ticks; transients are omitted."""
    primitives = (*COMPUTE_COPY_PRIMITIVES, *STAGE_WEIGHT_PRIMITIVES)
    kind_by_value = dict.fromkeys(_converted_values(program, set(program.inputs), primitives), "compute copy")
    for operation in loops:
        for initial_value, final_value in zip(carries(operation), operation.outputs, strict=False):
            kind = "gradients" if final_value in program.readers else "stash"
            kind_by_value |= {value: kind for value in (initial_value, final_value) if value is not None}
    last_loop_index = max(map(program.operations.index, loops))
    for operation in program.operations[last_loop_index + 1 :]:
        if PIPE in operation.manual_axes:  # a reduction of gradients
            kind_by_value |= dict.fromkeys(operation.outputs, "gradients")
    return kind_by_value


def _converted_values(
    program: FlatProgram, input_values: set[int], primitives: Sequence[str] = COMPUTE_COPY_PRIMITIVES
) -> set[int]:
    """Return the values that the forward pass computes from `input_values` by operations of these primitives alone."""
    converted_values: set[int] = set()
    for operation in program.operations:
        if operation.kind in primitives and not operation.is_backward:
            operands = {value for value in operation.inputs if value is not None}
            if operands and operands <= input_values | converted_values:
                converted_values.update(operation.outputs)
    return converted_values
