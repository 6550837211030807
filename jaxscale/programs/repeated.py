"""Scores of attention that XLA computes twice for a TPU v6e, instead of keeping them for the backward pass.

A block that keeps the results of its matrix products keeps queries, keys and the scores of its attention. For a v6e,
XLA computes the scores of blocks outside of loops again from queries and keys, inside the operations that read them; a
v5e and a v5p keep them. A loop over layers has no such freedom: what it keeps is written into stacked arrays. Products
with a weight, and products that are smaller than their operands, are kept.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.programs.flat import VIEWS, FlatProgram, Operation
from jaxscale.programs.kinds import has_both_passes

_COPIES = (*VIEWS, "convert_element_type", "transpose", "copy", "sharding_constraint", "reduce_precision", "retile")
"""Operations whose result is a weight if their operand is one."""


def with_repeated_scores(program: FlatProgram) -> FlatProgram:
    """Return a program that repeats products of two activations in the backward pass, if that pass reads them.

    Args:
        program: program of a step; the body of its loop over microbatches is changed, too.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.programs.flat import flatten
        >>> scores = lambda x: jnp.sin(jnp.einsum("btd,bsd->bts", jnp.exp(x), jnp.cos(x)))
        >>> kept = jax.checkpoint(scores, policy=jax.checkpoint_policies.dots_saveable)
        >>> program = flatten(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(kept(x))))(jnp.ones((2, 16, 4))))
        >>> count = lambda program: sum(operation.kind == "dot_general" for operation in program.operations)
        >>> count(program), count(with_repeated_scores(program))
        (3, 4)
    """
    avals = dict(program.avals)
    operations: list[Operation] = []
    weights: set[int | None] = {*program.inputs, None}
    repeated_by_kept: dict[int, int] = {}  # by the number of a kept value, that of the repeated one
    product_by_kept: dict[int, Operation] = {}
    for operation in program.operations:
        body = operation.loop_body
        if body is not None and has_both_passes(body):
            operation = dataclasses.replace(operation, loop_body=with_repeated_scores(body))
        if operation.kind in _COPIES and weights.issuperset(operation.inputs):
            weights.update(operation.outputs)
        if operation.is_backward:
            for kept_value in product_by_kept.keys() & set(operation.inputs):
                if kept_value not in repeated_by_kept:
                    repeated_value = repeated_by_kept[kept_value] = max(avals) + 1
                    avals[repeated_value] = avals[kept_value]
                    product = product_by_kept[kept_value]
                    operations.append(dataclasses.replace(product, outputs=(repeated_value,), is_backward=True))
            inputs = tuple(value if value is None else repeated_by_kept.get(value, value) for value in operation.inputs)
            operation = dataclasses.replace(operation, inputs=inputs)
        elif operation.kind == "dot_general" and weights.isdisjoint(operation.inputs):
            if _is_expanding(operation, avals):
                product_by_kept |= dict.fromkeys(operation.outputs, operation)
        elif operation.kind == "reduce_precision" and operation.inputs[0] in product_by_kept:
            product_by_kept[operation.outputs[0]] = product_by_kept[operation.inputs[0]]
        operations.append(operation)
    return dataclasses.replace(program, operations=operations, avals=avals)


def _is_expanding(product: Operation, avals: Mapping[int, Any]) -> bool:
    """Return whether both operands of a product have batch dims and are smaller than the result together."""
    has_batch_dims = bool(product.params["dimension_numbers"][1][0])
    operand_sizes = [avals[value].size for value in product.inputs if value is not None]
    return has_batch_dims and sum(operand_sizes) < avals[product.outputs[0]].size
