"""Values of float32 that a TPU keeps in bfloat16, because only matrix products read them.

At the default precision, a TPU's matrix unit rounds operands of float32 to bfloat16. XLA moves the conversion to the
operation that computes the value, even if this moves it out of a loop. The values that a block keeps in float32 for the
gradients of its weights therefore take two bytes an element, and a loop over microbatches, or over the ticks of a
pipeline, reads bfloat16 copies of the weights.
"""

import dataclasses
import itertools
import math

import jax

from jaxscale.programs.flat import VIEWS, FlatProgram, Operation, loop_parts
from jaxscale.programs.flop import FORMULAS
from jaxscale.programs.looped import is_large_float32, with_copied_inputs
from jaxscale.programs.regions import tick_loops
from jaxscale.programs.tiles import RETILE


def is_rounded(value: int, program: FlatProgram) -> bool:
    """Return whether a float32 value is read only by matrix products whose operands a TPU rounds to bfloat16.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> program = flatten(jax.make_jaxpr(lambda x, w: (x + x) @ w)(jnp.ones((2, 4)), jnp.ones((4, 4))))
        >>> [is_rounded(value, program) for value in (*program.inputs, program.operations[0].outputs[0])]
        [False, True, True]
    """
    if str(getattr(program.avals[value], "dtype", "")) != "float32" or value in program.outputs:
        return False
    readers = [program.operations[index] for index in program.readers.get(value, ())]
    return bool(readers) and all(is_rounding(reader, value, program) for reader in readers)


def is_rounding(reader: Operation, value: int, program: FlatProgram) -> bool:
    """Return whether a reader rounds a value: it is, or leads only to, matrix products of default precision."""
    if reader.kind in FORMULAS:
        precision = reader.params.get("precision")
        precisions = precision if isinstance(precision, tuple) else (precision,)
        return all(entry in (None, jax.lax.Precision.DEFAULT) for entry in precisions)
    if reader.kind == "dynamic_update_slice":  # a pool in bfloat16 (`rounded_pools`)
        return value == reader.inputs[1] and str(program.avals[reader.outputs[0]].dtype) == "bfloat16"
    adds_dims = reader.kind == "broadcast_in_dim" and _element_count(reader.outputs[0], program) == _element_count(
        value, program
    )
    if adds_dims or reader.kind in (*VIEWS, "dynamic_slice", "transpose", RETILE):
        # a barrier has a result for each operand; the other operands of a slice are indices
        results = [reader.outputs[index] for index, operand in enumerate(reader.inputs) if operand == value]
        return all(is_rounded(result, program) for result in results)
    if reader.branches and value != reader.inputs[0]:  # the first operand selects the branch
        operand_indices = [index for index, operand in enumerate(reader.inputs[1:]) if operand == value]
        return all(
            is_rounded(branch.inputs[index], branch)
            for branch in reader.branches
            for index in operand_indices
            if branch.readers.get(branch.inputs[index]) or branch.inputs[index] in branch.outputs
        )
    if reader.loop_body is None:
        return False
    const_values, state_values, stacked_values = loop_parts(reader, reader.inputs)
    body = reader.loop_body
    stack_start = len(const_values) + len(state_values)
    inner_values = [body.inputs[index] for index, operand in enumerate(const_values) if operand == value]
    inner_values += [
        body.inputs[stack_start + index] for index, operand in enumerate(stacked_values) if operand == value
    ]
    return value not in state_values and all(is_rounded(inner_value, body) for inner_value in inner_values)


def _element_count(value: int, program: FlatProgram) -> int:
    """Return the number of elements of a value."""
    return math.prod(program.avals[value].shape)


def with_rounded_copies(program: FlatProgram) -> FlatProgram:
    """Return a program that copies large float32 inputs to bfloat16 before a loop with both passes.

    An input is copied only if all its reads in the loop are by matrix products.

    Args:
        program: program of a step.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> gradient = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)))
        >>> step = lambda weight, xs: jax.lax.scan(lambda sum, x: (sum + gradient(weight, x), None), 0 * weight, xs)[0]
        >>> program = with_rounded_copies(flatten(jax.make_jaxpr(step)(jnp.ones((256, 256)), jnp.ones((2, 8, 256)))))
        >>> [str(program.avals[op.outputs[0]].dtype) for op in program.operations if op.kind == "retile"]
        ['bfloat16']
    """

    def is_rounded_copy(value: int, loop: Operation) -> bool:
        """Return whether a value is a large float32 array that only matrix products of the loop read."""
        return is_large_float32(program.avals[value]) and is_rounding(loop, value, program)

    return with_copied_inputs(program, is_rounded_copy, "bfloat16")


def with_entered_copies(program: FlatProgram, dtype: str | None = None) -> FlatProgram:
    """Return a program that copies large float32 weights that only matrix products read for the ticks of a pipeline.

    The rule was inferred from two compiled steps.

    Args:
        program: program of a step.
        dtype: "bfloat16" if the ticks read a rounded copy; `None` if they read a copy in float32, which a rounded copy
            accompanies.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> program = flatten(jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 512)), jnp.ones((512, 512))))
        >>> with_entered_copies(program) is program  # without a pipeline
        True
    """
    if not tick_loops(program):
        return program
    avals = dict(program.avals)
    new_numbers = itertools.count(max(avals) + 1)
    copy_by_weight: dict[int | None, int] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        inputs = tuple(copy_by_weight.get(value, value) for value in operation.inputs)
        operations.append(dataclasses.replace(operation, inputs=inputs))
        weight = operation.outputs[0] if operation.kind == "enter" else None
        if weight is None or not is_large_float32(avals[weight]) or not is_rounded(weight, program):
            continue
        copy_by_weight[weight] = copy_number = next(new_numbers)
        avals[copy_number] = avals[weight] if dtype is None else jax.ShapeDtypeStruct(avals[weight].shape, dtype)
        operations.append(
            dataclasses.replace(operation, kind=RETILE, inputs=(weight,), outputs=(copy_number,), params={})
        )
    return dataclasses.replace(program, operations=operations, avals=avals)
