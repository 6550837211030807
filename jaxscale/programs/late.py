"""Results that a TPU's compiler computes late: the gradient of a head's weight, if summed around a ring of devices.

A product around a ring is computed in steps, between which partial sums move to the next device. The operands of this
gradient are available after the loss. Yet XLA schedules some or all steps of the ring after the backward pass of the
blocks, because nothing reads the gradient sooner and the blocks hide its messages. The logits, or the gradient of the
logits in the compute type, stay alive until then. Programs differ in which of these arrays stays alive and in how many
steps are late. This module assumes that the logits, which are larger, stay alive. Left out: rings that XLA finishes
before the blocks.
"""

from collections.abc import Callable, Iterable

from jaxscale.programs.flat import FlatProgram, Operation


def late_arrays(
    program: FlatProgram, ring_products: Iterable[int], is_stored: Callable[[Operation], bool]
) -> dict[int, int]:
    """Return the arrays that products around a ring need until the backward pass of the blocks ends.

    Args:
        program: program of a step, or of the body of its loop over microbatches.
        ring_products: indices of the products that are summed around a ring.
        is_stored: function that returns whether an operation's results are stored as arrays; if not, the operation's
            operands stay alive instead.

    Returns:
        A dict from the number of each array to the index of the last loop of the blocks' backward pass.
    """
    operations = program.operations
    backward_loops = [i for i, op in enumerate(operations) if op.loop_body is not None and op.params.get("reverse")]
    if not backward_loops:
        return {}
    producer_by_value = {value: op for op in operations[: backward_loops[0]] for value in op.outputs}
    early_products = [operations[index] for index in ring_products if index < backward_loops[0]]
    pending_values = [value for product in early_products if product.is_backward for value in product.inputs]
    last_reader_by_array: dict[int, int] = {}
    visited_values: set[int | None] = set()
    while pending_values:
        value = pending_values.pop()
        if value is None or value in visited_values or value not in producer_by_value:
            continue
        visited_values.add(value)
        if is_stored(producer_by_value[value]):
            last_reader_by_array[value] = backward_loops[-1]
        else:
            pending_values += producer_by_value[value].inputs
    return last_reader_by_array
