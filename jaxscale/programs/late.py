"""Results that compilers compute late: gradients of weights, which nothing in the backward pass reads.

On a TPU this is the gradient of a head's weight, if it is summed around a ring of devices. A product around a ring is
computed in steps, between which partial sums move to the next device. The operands of this gradient are available after
the loss. Yet XLA schedules some or all steps of the ring after the backward pass of the blocks, because nothing reads
the gradient sooner and the blocks hide its messages. The logits, or the gradient of the logits in the compute type,
stay alive until then. Programs differ in which of these arrays stays alive and in how many steps are late. This module
assumes that the logits, which are larger, stay alive. Left out: rings that XLA finishes before the blocks.

XLA's latency-hiding scheduler for GPUs of compute capability 9.0 and more orders operations from the last to the first.
An operation is ready when all its readers are placed. Gradients of weights are therefore placed first, that is, late in
the program, and their operands stay alive until then. A loop over layers limits this to the layer, whose gradients are
computed at the end of its backward pass; blocks outside of loops have no such limit. A sum over rows, such as the
gradient of a bias, is computed with the operation that reads the same array. Left out: the order of a program that
would not fit, in which the scheduler saves memory instead.

On TPU slices with a two-dimensional topology, XLA does the same with blocks outside of loops that keep all values or
the results of their products, but not with convolutions. One step did so with gradients that are summed around a ring
under another memory rule.

On TPUs without flat slices, the gradient of a head's weight was late in most steps without a loop over microbatches,
and then it kept the logits. It was early in all but one of the steps under ZeRO 0, and in some other steps, for which
the estimate is up to 14 % too high.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from jaxscale.programs.flat import FlatProgram, Operation
from jaxscale.programs.flop import FORMULAS
from jaxscale.programs.kinds import has_both_passes


def late_arrays(
    program: FlatProgram, ring_product_indices: Iterable[int], is_stored: Callable[[Operation], bool]
) -> dict[int, int]:
    """Return the arrays that stay alive for matrix products around a ring until the blocks' backward pass ends.

    Args:
        program: program of a step, or of the body of its loop over microbatches.
        ring_product_indices: indices of the products that are summed around a ring.
        is_stored: function that returns whether an operation's results are stored as arrays. If they are not, the
            operation's operands stay alive instead.

    Returns:
        A dict from the number of each array to the index of the last loop of the blocks' backward pass.
    """
    operations = program.operations
    backward_loop_indices = [
        i for i, op in enumerate(operations) if op.loop_body is not None and op.params.get("reverse")
    ]
    if not backward_loop_indices:
        return {}
    producer_by_value = {value: op for op in operations[: backward_loop_indices[0]] for value in op.outputs}
    early_products = [operations[index] for index in ring_product_indices if index < backward_loop_indices[0]]
    pending_values = [value for product in early_products if product.is_backward for value in product.inputs]
    last_reader_by_array: dict[int, int] = {}
    visited_values: set[int | None] = set()
    while pending_values:
        value = pending_values.pop()
        if value is None or value in visited_values or value not in producer_by_value:
            continue
        visited_values.add(value)
        if is_stored(producer_by_value[value]):
            last_reader_by_array[value] = backward_loop_indices[-1]
        else:
            pending_values += producer_by_value[value].inputs
    return last_reader_by_array


def gradient_product_indices(program: FlatProgram) -> list[int]:
    """Return the indices of the matrix products before the blocks' backward pass on which that pass does not depend.

    An example is the gradient of a head's weight.

    Args:
        program: program of a step with a loop over layers.
    """
    operations = program.operations
    loop_indices = [i for i, op in enumerate(operations) if op.loop_body is not None and op.params.get("reverse")]
    if not loop_indices:
        return []
    needed_values = {value for index in loop_indices for value in operations[index].inputs}
    product_indices: list[int] = []
    for index in reversed(range(loop_indices[0])):
        operation = operations[index]
        if not needed_values.isdisjoint(operation.outputs):
            needed_values.update(operation.inputs)
        elif operation.is_backward and operation.kind in FORMULAS:
            product_indices.append(index)
    return product_indices


def with_late_gradients(
    program: FlatProgram, *, in_layers: bool = False, product_kinds: Collection[str] = FORMULAS
) -> FlatProgram:
    """Return a program that runs an operation after the backward pass if no matrix product of that pass needs it.

    Args:
        program: program of a step; the body of its loop over microbatches is changed, too.
        in_layers: whether to do the same in a loop over layers: in each layer's backward pass, such operations run
            last. Otherwise a backward pass with a loop over layers remains unchanged.
        product_kinds: kinds of the products that run late, with the operations that read them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> fn = jax.grad(lambda v, w: jnp.sum((2.0 * v @ w) @ w), argnums=(0, 1))
        >>> program = flatten(jax.make_jaxpr(fn)(jnp.ones((2, 4)), jnp.ones((4, 4))))
        >>> len(with_late_gradients(program).operations) == len(program.operations)
        True
    """
    operations: list[Operation] = []
    for operation in program.operations:
        body = operation.loop_body
        if body is None:
            operations.append(operation)
            continue
        late_body = with_late_gradients(body, in_layers=in_layers, product_kinds=product_kinds)
        if in_layers and operation.params.get("reverse"):
            late_operations = _with_late_operations(late_body.operations, product_kinds, is_layer=True)
            late_body = dataclasses.replace(late_body, operations=late_operations)
        operations.append(dataclasses.replace(operation, loop_body=late_body))
    if has_both_passes(program) and not any(operation.params.get("reverse") for operation in operations):
        operations = _with_late_operations(operations, product_kinds)
    return dataclasses.replace(program, operations=operations)


def _with_late_operations(
    operations: Sequence[Operation], product_kinds: Collection[str], *, is_layer: bool = False
) -> list[Operation]:
    """Return operations in a new order: those of the backward pass that none of its matrix products needs run late.

    Args:
        operations: operations of both passes, or of a layer's backward pass.
        product_kinds: kinds of the products that run late, with the operations that read them.
        is_layer: whether the operations are a layer's backward pass. If so, they need no `is_backward`, and a loop
            counts as a matrix product.
    """
    needed_values: set[int | None] = set()  # a product of the backward pass depends on them
    for operation in reversed(operations):
        is_product = operation.kind in FORMULAS and (is_layer or operation.is_backward)
        is_inner_loop = is_layer and operation.loop_body is not None
        if is_product or is_inner_loop or not needed_values.isdisjoint(operation.outputs):
            needed_values.update(operation.inputs)
    ordered_operations: list[Operation] = []
    late_operations: list[Operation] = []
    late_values: set[int] = set()
    for operation in operations:
        is_unneeded = (is_layer or operation.is_backward) and needed_values.isdisjoint(operation.outputs)
        if is_unneeded and (operation.kind in product_kinds or not late_values.isdisjoint(operation.inputs)):
            late_operations.append(operation)
            late_values.update(operation.outputs)
        else:
            if not late_values.isdisjoint(operation.inputs):
                ordered_operations += late_operations
                late_operations, late_values = [], set()
            ordered_operations.append(operation)
    return ordered_operations + late_operations
