"""Pools of slots inside a compiled program, and other operations of the executors on trees of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.compat import varying_axes
from jaxscale.sharding.memory_space import on_host, row_major, to_device, to_host

STEP_FROM_ORIGIN = {"from_left": 1, "from_right": -1}
"""For each origin of messages, the receiving rank minus the sending rank (modulo the number of ranks)."""


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Return a tree with its leaves marked as varying over manual axes. Their values are unchanged.

    If the type of a leaf does not vary over a manual axis, `vjp` sums its gradient over the axis with a collective. In
    a branch that not all devices take, this collective would hang. So leaves are marked as varying before any branch.
    """

    def mark(leaf: Any) -> Any:
        """Mark a leaf as varying over those of `axes` that its type lacks."""
        missing_axes = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing_axes, to="varying") if missing_axes else leaf

    return jax.tree.map(mark, tree)


def empty_pool(tree: Any, slot_count: int, is_hosted: Any = False) -> Any:
    """Return a pool of zeros with slots for values like `tree`. Each leaf gets a first dim of `slot_count`.

    Args:
        tree: tree of arrays or their shapes.
        slot_count: number of slots.
        is_hosted: for each leaf, whether its slots are in host memory: a boolean for all leaves, or a tree of booleans
            that is a prefix of `tree`.
    """

    def empty_slots(leaf: Any, is_leaf_hosted: bool) -> Any:
        """Return the slots for one leaf."""
        slots = jnp.zeros((slot_count, *leaf.shape), leaf.dtype)
        return to_host(slots) if is_leaf_hosted else slots

    return jax.tree.map(empty_slots, tree, jax.tree.broadcast(is_hosted, tree))


def zeros(tree: Any, dtype: Any = None) -> Any:
    """Return zeros with the shapes of a tree. Their dtype is `dtype`, or by default that of each leaf."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), tree)


def exchange(message: Any, axis: str, rank_count: int, origin: str) -> Any:
    """Send a message to one neighbor, and return the message that arrives from the other neighbor.

    Args:
        message: tree of arrays.
        axis: name of the mesh axis of the ranks.
        rank_count: number of ranks.
        origin: side from which the message arrives, "from_left" or "from_right".
    """
    rank_pairs = [(rank, (rank + STEP_FROM_ORIGIN[origin]) % rank_count) for rank in range(rank_count)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, rank_pairs), message)


def read(pool: Any, slot: Any) -> Any:
    """Return the value in a slot, in device memory. If the pool has only one slot, `slot` is ignored."""

    def take(leaf: Any) -> Any:
        """Return the slot of one leaf of the pool."""
        slot_array = leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False)
        # on a TPU, a move between host and device fails if the layouts differ; that of host memory is row-major
        return row_major(to_device(slot_array)) if on_host(leaf) else slot_array

    return jax.tree.map(take, pool)


def read_in_place(pool: Any, slot: Any) -> Any:
    """Return the value in a slot, in the memory of the pool. If the pool has only one slot, `slot` is ignored."""

    def take(leaf: Any) -> Any:
        """Return the slot of one leaf of the pool."""
        if leaf.shape[0] == 1:
            return leaf.reshape(leaf.shape[1:])
        return lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False)

    return jax.tree.map(take, pool)


def write(pool: Any, slot: Any, value: Any) -> Any:
    """Return the pool with a value written to a slot."""

    def put(leaf: Any, array: Any) -> Any:
        """Return the leaf of the pool with `array`, a leaf of the value, written to the slot."""
        cast_array = array.astype(leaf.dtype)
        placed_array = to_host(row_major(cast_array)) if on_host(leaf) else cast_array
        return lax.dynamic_update_index_in_dim(leaf, placed_array, slot, 0)

    return jax.tree.map(put, pool, value)


def tree_or_zeros(condition: Any, tree: Any) -> Any:
    """Return the tree if a condition is true, otherwise zeros. The condition is a boolean and may be traced."""
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)


def is_differentiable(leaf: Any) -> bool:
    """Return whether a leaf has a gradient; integers and booleans have none."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def cotangents(gradient_message: Any, primals: Any) -> Any:
    """Return the gradient of `primals` as cotangents for a vjp function, with `float0` for integers and booleans."""

    def cotangent(gradient: Any, primal: Any) -> Any:
        """Return the cotangent of one leaf."""
        return gradient if is_differentiable(primal) else np.zeros(primal.shape, jax.dtypes.float0)

    return jax.tree.map(cotangent, gradient_message, primals)


def gradient_arrays(cotangent_tree: Any, primals: Any) -> Any:
    """Return cotangents of `primals` as arrays that can be sent, with zeros in place of `float0`."""
    return jax.tree.map(
        lambda g, primal: g if is_differentiable(primal) else jnp.zeros_like(primal), cotangent_tree, primals
    )
