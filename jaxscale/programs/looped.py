"""Copies of a train step's arguments for loops that run both passes, as XLA makes them on a TPU.

If such a loop reads a float32 weight without a conversion, XLA gives the loop a copy, because the weight is overwritten
at the end of the step. Weights that are converted before the loop are not copied. The rule was inferred from three
compiled steps with ZeRO 1 and 2, whose new weights are gathered at the end. The caller applies it only to such steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.programs.flat import FlatProgram, Operation
from jaxscale.programs.kinds import has_both_passes
from jaxscale.programs.tiles import RETILE, SMALL_COUNT


def with_looped_copies(program: FlatProgram) -> FlatProgram:
    """Return a program that copies each large input in float32 before a loop with both passes reads it.

    Args:
        program: program of a step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> def step(weight, xs):
        ...     gradient = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)))
        ...     add = lambda total, x: (total + gradient(weight, x), None)
        ...     return weight - jax.lax.scan(add, jnp.zeros_like(weight), xs)[0]
        >>> program = flatten(jax.make_jaxpr(step)(jnp.ones((256, 256)), jnp.ones((2, 8, 256))))
        >>> [operation.kind for operation in with_looped_copies(program).operations]
        ['broadcast_in_dim', 'retile', 'scan', 'sub']
    """
    return with_copied_inputs(program, lambda value, _loop: _is_copied(value, program))


def with_copied_inputs(
    program: FlatProgram, is_copied: Callable[[int, Operation], bool], dtype: str | None = None
) -> FlatProgram:
    """Return a program that copies some inputs before a loop with both passes reads them.

    Args:
        program: program of a step.
        is_copied: function of an input and the loop that returns whether the input is copied.
        dtype: type of the copies; `None` for the type of the inputs.
    """
    new_numbers = itertools.count(max(program.avals, default=0) + 1)
    avals = dict(program.avals)
    operations: list[Operation] = []
    for operation in program.operations:
        if operation.loop_body is not None and has_both_passes(operation.loop_body):
            operands = dict.fromkeys(value for value in operation.inputs if value is not None)
            inputs_to_copy = [value for value in operands if value in program.inputs and is_copied(value, operation)]
            copy_by_input = dict(zip(inputs_to_copy, new_numbers, strict=False))
            for value, copy_value in copy_by_input.items():
                aval = avals[value]
                avals[copy_value] = aval if dtype is None else jax.ShapeDtypeStruct(aval.shape, dtype)
            operations += [
                Operation(RETILE, (value,), (copy_value,), {}) for value, copy_value in copy_by_input.items()
            ]
            new_inputs = tuple(
                value if value is None else copy_by_input.get(value, value) for value in operation.inputs
            )
            operation = dataclasses.replace(operation, inputs=new_inputs)
        operations.append(operation)
    return dataclasses.replace(program, operations=operations, avals=avals)


def is_large_float32(aval: Any) -> bool:
    """Return whether an abstract value is a large array of float32 of at least two dims."""
    shape = getattr(aval, "shape", ())
    return len(shape) >= 2 and math.prod(shape) >= SMALL_COUNT and str(aval.dtype) == "float32"


def _is_copied(value: int, program: FlatProgram) -> bool:
    """Return whether a value is a large array of float32 that several operations read."""
    return is_large_float32(program.avals[value]) and len(program.readers[value]) > 1
