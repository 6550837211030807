"""Which values of float32 a TPU keeps in bfloat16, because only matrix products read them.

At the default precision a TPU's matrix unit rounds operands of float32 to bfloat16. XLA moves the conversion to the
operation that computes the value, also out of loops: what a block keeps in float32 for the gradients of its weights
takes two bytes an element, and a loop over microbatches reads weights from copies in bfloat16.
"""

import jax

from jaxscale.programs.flat import FlatProgram, Operation, loop_parts
from jaxscale.programs.looped import is_large, with_copied_inputs
from jaxscale.programs.tiles import RETILE

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Matrix products and convolutions."""

VIEWS = (
    "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast",
    "enter", "leave", "transpose", RETILE,
)  # fmt: skip
"""Operations whose result is rounded like the operand."""


def is_rounded(value: int, program: FlatProgram) -> bool:
    """Return whether nothing reads a value of float32 but matrix products whose operands a TPU rounds to bfloat16.

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
    return bool(readers) and all(_rounds(reader, value, program) for reader in readers)


def _rounds(reader: Operation, value: int, program: FlatProgram) -> bool:
    """Return whether a reader of a value is a product of the default precision, or leads to such products alone."""
    if reader.kind in PRODUCTS:
        precision = reader.params.get("precision")
        precisions = precision if isinstance(precision, tuple) else (precision,)
        return all(entry in (None, jax.lax.Precision.DEFAULT) for entry in precisions)
    if reader.kind in VIEWS:
        return is_rounded(reader.outputs[0], program)
    if reader.loop_body is None:
        return False
    constants, states, stacks = loop_parts(reader, reader.inputs)
    body = reader.loop_body
    first_stack = len(constants) + len(states)
    inner_values = [body.inputs[index] for index, operand in enumerate(constants) if operand == value]
    inner_values += [body.inputs[first_stack + index] for index, operand in enumerate(stacks) if operand == value]
    return value not in states and all(is_rounded(inner_value, body) for inner_value in inner_values)


def with_rounded_copies(program: FlatProgram) -> FlatProgram:
    """Return a program that copies large inputs to bfloat16 before a loop with both passes whose products read them.

    Args:
        program: program of a step.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> def step(weight, xs):
        ...     gradient = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)))
        ...     add = lambda total, x: (total + gradient(weight, x), None)
        ...     return weight - jax.lax.scan(add, jnp.zeros_like(weight), xs)[0]
        >>> program = flatten(jax.make_jaxpr(step)(jnp.ones((256, 256)), jnp.ones((2, 8, 256))))
        >>> [operation.kind for operation in with_rounded_copies(program).operations]
        ['broadcast_in_dim', 'retile', 'scan', 'sub']
    """

    def is_rounded_copy(value: int, loop: Operation) -> bool:
        """Whether the products of a loop alone read a large input of float32."""
        return is_large(program.avals[value]) and _rounds(loop, value, program)

    return with_copied_inputs(program, is_rounded_copy, "bfloat16")
