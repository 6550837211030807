"""Pools of slots inside a compiled program, and the few operations on trees of arrays that the executor is made of."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.compat import varying_axes


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """A tree marked as varying over manual axes.

    `vjp` in a branch with respect to a value that is the same on all devices would put the sum over those devices, a
    collective, into a branch that not all of them take, and hang (hazard 1); so everything is marked outside.
    """

    def mark(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def empty(tree: Any, slots: int) -> Any:
    """A pool: zeros of the shape of `tree`, its leaves with a first dim of `slots`."""
    return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), tree)


def read(pool: Any, slot: Any) -> Any:
    """What lies in a slot; of a pool with one slot without looking at the number."""
    return jax.tree.map(
        lambda leaf: leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), pool
    )


def write(pool: Any, slot: Any, value: Any) -> Any:
    """The pool with a value in a slot."""
    return jax.tree.map(
        lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new.astype(leaf.dtype), slot, 0), pool, value
    )


def where(condition: Any, tree: Any) -> Any:
    """The tree, or zeros."""
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)


def differentiable(leaf: Any) -> bool:
    """Whether a leaf has a gradient; whole numbers and booleans have none."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def cotangents(tree: Any, like: Any) -> Any:
    """A message as the gradient of what was sent: `float0` where the leaf has none."""
    return jax.tree.map(
        lambda leaf, sent: leaf if differentiable(sent) else np.zeros(sent.shape, jax.dtypes.float0), tree, like
    )


def gradients(tree: Any, like: Any) -> Any:
    """A gradient as arrays of the type of `like`: zeros where the leaf has none."""
    return jax.tree.map(lambda leaf, of: leaf if differentiable(of) else jnp.zeros_like(of), tree, like)
