"""Recomputation that waits for its gradient, on a backend that would run it early.

`jax.checkpoint` ties recomputation to the gradient by an `optimization_barrier`. XLA:CPU up to jaxlib 0.10 drops the
barrier before it schedules a program. Outside loops the recomputation then directly follows the forward pass: its
results are kept, so it costs FLOP and saves no memory. XLA cannot drop a true data dependence. So every row of the
recomputation's inputs becomes zero if a condition on the gradient holds. The condition never holds, but a compiler
cannot prove that. The condition adds no branch to the program, changes no bit, and keeps rows on their devices.

Inputs without rows (weights, the index of a layer) get no condition. Recomputation in loops needs no delay, because the
forward pass and the backward pass are separate loops.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import varying_axes
from jaxscale.typing import Array, Bool


def held_back(checkpointed_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose recomputation waits until the gradient of its result is available.

    Args:
        checkpointed_function: the function, under `jax.checkpoint`; takes pytrees of arrays and returns a pytree.
            Arrays that it closes over are differentiated too.

    Example:
        >>> square = held_back(jax.checkpoint(lambda x: x * x))
        >>> jax.grad(lambda x: square(x).sum())(jnp.arange(3.0)).tolist()
        [0.0, 2.0, 4.0]
    """

    def run(*args: Any) -> Any:
        """Return the function's results. The backward pass recomputes values only once the gradient is available."""
        program, abstract_results = jax.make_jaxpr(checkpointed_function, return_shape=True)(*args)

        def run_program(consts: Any, leaves: Any) -> list[Any]:
            """Return the leaves of the results. `consts` are closed-over values; `leaves` are the arguments' leaves."""
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(program.jaxpr, consts))(*leaves)

        run_dependent = jax.custom_vjp(run_program)
        run_dependent.defvjp(lambda *inputs: jax.vjp(run_program, *inputs), _backward)
        result_leaves = run_dependent(program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(abstract_results), result_leaves)

    return run


def _backward(pullback: Any, gradients: list[Any]) -> Any:
    """Return the gradients with respect to the inputs, given those with respect to the results.

    Args:
        pullback: the function that `jax.vjp` returns; it is also a pytree of its residuals.
        gradients: gradient with respect to each result.
    """
    row_gradients = [
        gradient for gradient in gradients if jnp.issubdtype(gradient.dtype, jnp.floating) and gradient.ndim
    ]
    if row_gradients:
        false_rows = _false_rows(max(row_gradients, key=lambda gradient: gradient.size))
        pullback = jax.tree.map(lambda residual: _make_dependent(false_rows, residual), pullback)
    return pullback(gradients)


def _false_rows(gradient: Array) -> Bool[Array, "B"]:
    """Return False for each row of a gradient, bool [B], by arithmetic on bits that compilers do not simplify."""
    bits = jax.lax.bitcast_convert_type(gradient, f"uint{8 * gradient.dtype.itemsize}")
    return ((bits & 1) == 2).all(range(1, bits.ndim))


def _make_dependent(false_rows: Bool[Array, "B"], residual: Any) -> Any:
    """Return a residual that depends on `false_rows`; unchanged, if the numbers of rows differ."""
    rows_type, residual_type = jax.typeof(false_rows), jax.typeof(residual)
    if (
        residual_type.shape[:1] != rows_type.shape
        or jnp.issubdtype(residual_type.dtype, jax.dtypes.extended)
        or residual_type.memory_space != rows_type.memory_space
        or not varying_axes(rows_type) <= varying_axes(residual_type)
    ):
        return residual
    condition = false_rows.reshape(false_rows.shape + (1,) * (residual.ndim - 1))
    return jnp.where(condition, jnp.zeros_like(residual), residual)
