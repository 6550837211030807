"""Late results of a TPU's compiler: the gradient of a head's weight, if it is summed around a ring of devices.

A product around a ring is computed in steps, between which partial sums move to the next device. The operands of this
gradient are ready after the loss. Yet XLA schedules some or all steps of the ring after the backward pass of the
blocks, because nothing reads the gradient sooner and the blocks hide its messages. The logits, or their gradient in the
compute type, stay alive until then. Which of the two it is, and how many steps are late, varies between programs. This
module assumes the logits, which are larger. Left out: rings that XLA finishes before the blocks.
"""

from collections.abc import Callable, Iterable

from jaxscale.programs.flat import FlatProgram, Operation


def late_arrays(program: FlatProgram, rings: Iterable[int], is_array: Callable[[Operation], bool]) -> dict[int, int]:
    """Return the arrays that products around a ring need until the backward pass of the blocks ends.

    Args:
        program: program of a step, or of the body of its loop over microbatches.
        rings: indices of the products that are summed around a ring.
        is_array: function that returns whether an operation's results are stored; if not, its operands stay alive.

    Returns:
        For each array, the index of the last loop of the blocks' backward pass.
    """
    operations = program.operations
    backward_loops = [i for i, op in enumerate(operations) if op.loop is not None and op.params.get("reverse")]
    if not backward_loops:
        return {}
    producer_of = {value: operation for operation in operations[: backward_loops[0]] for value in operation.outputs}
    head_products = [operations[index] for index in rings if index < backward_loops[0] and operations[index].backward]
    pending_values = [value for product in head_products for value in product.inputs]
    last_reader_of: dict[int, int] = {}
    visited_values: set[int | None] = set()
    while pending_values:
        value = pending_values.pop()
        if value is None or value in visited_values or value not in producer_of:
            continue
        visited_values.add(value)
        if is_array(producer_of[value]):
            last_reader_of[value] = backward_loops[-1]
        else:
            pending_values += producer_of[value].inputs
    return last_reader_of
