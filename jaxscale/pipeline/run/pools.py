"""Pools of slots inside a compiled program, and the executor's operations on trees of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxscale.compat import varying_axes
from jaxscale.sharding.memory_space import on_host, to_device, to_host

WAYS = {"from_left": 1, "from_right": -1}
"""For each origin of messages from other ranks, the step along the ranks that such a message makes."""


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Mark a tree as varying over manual axes.

    `vjp` with respect to a value that is the same on all devices sums over the devices, by a collective. In a branch
    that not all devices take, this collective would hang. So every value is marked outside the branches.
    """

    def mark(leaf: Any) -> Any:
        """Mark a leaf as varying over those axes that it does not vary over yet."""
        missing_axes = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing_axes, to="varying") if missing_axes else leaf

    return jax.tree.map(mark, tree)


def empty_pool(tree: Any, slots: int, hosted: Any = False) -> Any:
    """Make a pool: zeros of the shapes of `tree`, with a first dim of `slots` before those of each leaf.

    Args:
        tree: tree of arrays or their shapes.
        slots: number of slots.
        hosted: for each leaf, whether its slots are in host memory: a tree of booleans like `tree`, or a prefix of one.
    """

    def make_slots(leaf: Any, is_hosted: bool) -> Any:
        """Make the slots of one leaf."""
        empty_slots = jnp.zeros((slots, *leaf.shape), leaf.dtype)
        return to_host(empty_slots) if is_hosted else empty_slots

    return jax.tree.map(make_slots, tree, jax.tree.broadcast(hosted, tree))


def zeros(tree: Any, dtype: Any = None) -> Any:
    """Make zeros of the shapes of a tree, and of its types unless `dtype` is given."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), tree)


def exchange(message: Any, axis: str, ranks: int, way: str) -> Any:
    """Send a message to a neighbour, for which its origin is `way`, and return the message that arrives from `way`."""
    rank_pairs = [(rank, (rank + WAYS[way]) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, rank_pairs), message)


def read(pool: Any, slot: Any) -> Any:
    """Return the value in a slot, in device memory; a pool with one slot ignores the number."""

    def take(leaf: Any) -> Any:
        value = leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False)
        return _row_major(to_device(value)) if on_host(leaf) else value

    return jax.tree.map(take, pool)


def read_in_place(pool: Any, slot: Any) -> Any:
    """Return the value in a slot, in the memory of the pool."""

    def take(leaf: Any) -> Any:
        if leaf.shape[0] == 1:
            return leaf.reshape(leaf.shape[1:])
        return lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False)

    return jax.tree.map(take, pool)


def write(pool: Any, slot: Any, value: Any) -> Any:
    """Return the pool with a value in a slot."""

    def put(leaf: Any, new: Any) -> Any:
        new = new.astype(leaf.dtype)
        new = to_host(_row_major(new)) if on_host(leaf) else new
        return lax.dynamic_update_index_in_dim(leaf, new, slot, 0)

    return jax.tree.map(put, pool, value)


def _row_major(value: Any) -> Any:
    """Give a value to or from the host the host's layout: a TPU's compiler fails if the layouts differ."""
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def where(condition: Any, tree: Any) -> Any:
    """Return the tree if the condition holds, otherwise zeros."""
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)


def is_differentiable(leaf: Any) -> bool:
    """Return whether a leaf has a gradient; whole numbers and booleans have none."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def cotangents(tree: Any, like: Any) -> Any:
    """Return a message as cotangents of `like`, the tree that was sent: `float0` for leaves without gradients."""
    no_gradient = jax.dtypes.float0
    return jax.tree.map(lambda g, x: g if is_differentiable(x) else np.zeros(x.shape, no_gradient), tree, like)


def gradients(tree: Any, like: Any) -> Any:
    """Return a gradient as arrays of the types of `like`: zeros for leaves without gradients."""
    return jax.tree.map(lambda leaf, primal: leaf if is_differentiable(primal) else jnp.zeros_like(primal), tree, like)
