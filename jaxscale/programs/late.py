"""Late results of a TPU's compiler: the gradient of a head's weight that is summed around a ring of devices.

Its operands are ready after the loss, yet XLA schedules some or all steps of the ring after the backward pass of the
blocks: nothing reads the gradient sooner, and the blocks hide its messages. The logits, or their gradient in the
compute type, stay alive until then; which of the two, and how many steps are late, varies between programs. This module
assumes the logits, which are larger. Left out: rings that XLA finishes before the blocks.
"""

from collections.abc import Callable, Iterable

from jaxscale.programs.flat import FlatProgram, Operation


def late_arrays(program: FlatProgram, rings: Iterable[int], is_array: Callable[[Operation], bool]) -> dict[int, int]:
    """The arrays that a product around a ring needs until the blocks' backward pass ends, with the index of that pass.

    Args:
        program: of a step, or of the body of its loop over microbatches.
        rings: indices of the products that are summed around a ring.
        is_array: whether the results of an operation are arrays; for an expression, its operands stay alive.
    """
    operations = program.operations
    blocks = [i for i, o in enumerate(operations) if o.loop is not None and o.params.get("reverse")]
    if not blocks:
        return {}
    producer = {value: operation for operation in operations[: blocks[0]] for value in operation.outputs}
    heads = [operations[index] for index in rings if index < blocks[0] and operations[index].backward]
    pending = [value for head in heads for value in head.inputs]
    last_reader: dict[int, int] = {}
    visited: set[int | None] = set()
    while pending:
        value = pending.pop()
        if value is None or value in visited or value not in producer:
            continue
        visited.add(value)
        if is_array(producer[value]):
            last_reader[value] = blocks[-1]
        else:
            pending += producer[value].inputs
    return last_reader
