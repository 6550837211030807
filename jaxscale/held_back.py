"""Recomputation that waits for the gradient it is for, on a backend that would run it early.

`jax.checkpoint` ties what runs again to the gradient by an `optimization_barrier`. XLA:CPU up to jaxlib 0.10 drops the
barrier before it orders a program: outside loops the recomputation then follows the forward pass at once, its results
are kept, and all that it changes is the FLOP. A true dependence survives: what the recomputation reads is selected, row
by row of the batch, by a condition on the gradient that never holds, which no compiler knows. Nothing branches, no bit
changes, and rows stay on their devices.

It leaves alone what has no rows (weights, the number of a layer), and loops, where forward and backward pass are two.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import varying_axes
from jaxscale.typing import Array, Bool


def held_back(checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """A function under `jax.checkpoint` that runs again no sooner than the gradient of its result is there.

    Args:
        checkpointed: from pytrees of arrays to one. Arrays that it closes over are differentiated too.

    Example:
        >>> square = held_back(jax.checkpoint(lambda x: x * x))
        >>> jax.grad(lambda x: square(x).sum())(jnp.arange(3.0)).tolist()
        [0.0, 2.0, 4.0]
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(checkpointed, return_shape=True)(*args)

        def program(consts: Any, leaves: Any) -> list[Any]:
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr, consts))(*leaves)

        held = jax.custom_vjp(program)
        held.defvjp(lambda *given: jax.vjp(program, *given), _backward)
        return jax.tree.unflatten(jax.tree.structure(shapes), held(closed.consts, jax.tree.leaves(args)))

    return run


def _backward(backward: Any, gradients: list[Any]) -> Any:
    """The gradients of the inputs, from a backward pass that is itself a tree of what it reads."""
    rows = [g for g in gradients if jnp.issubdtype(g.dtype, jnp.floating) and g.ndim]
    if rows:
        never = _never(max(rows, key=lambda gradient: gradient.size))
        backward = jax.tree.map(lambda leaf: _selected(never, leaf), backward)
    return backward(gradients)


def _never(gradient: Array) -> Bool[Array, "B"]:
    """False for every row of a gradient, by arithmetic on its bits that a compiler does not see through."""
    bits = jax.lax.bitcast_convert_type(gradient, f"uint{8 * gradient.dtype.itemsize}")
    return ((bits & 1) == 2).all(range(1, bits.ndim))


def _selected(never: Bool[Array, "B"], leaf: Any) -> Any:
    """A value of the same rows, from then on depending on `never`; any other as it is."""
    kind, other = jax.typeof(never), jax.typeof(leaf)
    if (
        other.shape[:1] != kind.shape
        or jnp.issubdtype(other.dtype, jax.dtypes.extended)
        or other.memory_space != kind.memory_space
        or not varying_axes(kind) <= varying_axes(other)
    ):
        return leaf
    return jnp.where(never.reshape(never.shape + (1,) * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)
