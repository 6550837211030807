"""Rows of x, sorted by group, times their group's matrix: the definition. It does E times the work."""

from typing import Any

import jax.numpy as jnp

F32 = jnp.float32


def _membership(sizes: Any, rows: int) -> Any:
    """(E, M): 1 where a row belongs to a group."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return (jnp.arange(sizes.shape[0])[:, None] == group[None]).astype(F32)


def forward(x: Any, w: Any, sizes: Any, *, transposed: bool = False) -> Any:
    """`y[m] = x[m] @ w[group of m]`; a row past the last group gives 0. Products in float32.

    Args:
        x: (M, D).
        w: (E, D, F); (E, F, D) if transposed.
        sizes: (E,) int32, rows of each group, at most M in sum.
        transposed: multiply by the transposed matrices.

    Returns:
        (M, F), in the type of x.

    Example:
        >>> forward(jnp.ones((3, 1)), jnp.array([[[2.0]], [[5.0]]]), jnp.array([1, 1])).tolist()
        [[2.0], [5.0], [0.0]]
    """
    product = "em,md,efd->mf" if transposed else "em,md,edf->mf"
    # rows of no group are cleared rather than multiplied by 0: they may hold anything
    inside = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
    x = jnp.where(inside, x, jnp.zeros((), x.dtype))
    return jnp.einsum(product, _membership(sizes, x.shape[0]), x.astype(F32), w.astype(F32)).astype(x.dtype)


def gradient_of_weights(x: Any, dy: Any, sizes: Any) -> Any:
    """`dw[e]`, the sum over its rows of `x[m]^T dy[m]`; an empty group gives 0.

    Args:
        x: (M, D).
        dy: (M, F).
        sizes: (E,) int32.

    Returns:
        (E, D, F), in the type of x.
    """
    inside = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
    wide = (jnp.where(inside, a, jnp.zeros((), a.dtype)).astype(F32) for a in (x, dy))
    return jnp.einsum("em,md,mf->edf", _membership(sizes, x.shape[0]), *wide).astype(x.dtype)
