"""The definition of grouped matmul: each row of x times the matrix of its group; this does E times the work."""

from typing import Any

import jax.numpy as jnp

F32 = jnp.float32


def _membership(sizes: Any, rows: int) -> Any:
    """A matrix (E, M) of float32 that is 1 where the row belongs to the group, and 0 elsewhere."""
    group_of_row = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return (jnp.arange(sizes.shape[0])[:, None] == group_of_row[None]).astype(F32)


def forward(x: Any, w: Any, sizes: Any, *, transposed: bool = False) -> Any:
    """Compute `y[m] = x[m] @ w[group of m]` in float32; rows after the last group give 0.

    Args:
        x: rows sorted by group (M, D).
        w: one matrix per group (E, D, F); (E, F, D) if transposed.
        sizes: number of rows of each group, (E,) int32; their sum is at most M.
        transposed: whether to multiply by the transposed matrices.

    Returns:
        y (M, F) in the dtype of x.

    Example:
        >>> forward(jnp.ones((3, 1)), jnp.array([[[2.0]], [[5.0]]]), jnp.array([1, 1])).tolist()
        [[2.0], [5.0], [0.0]]
    """
    subscripts = "em,md,efd->mf" if transposed else "em,md,edf->mf"
    # set rows of no group to 0, and do not multiply them by 0: they may contain NaN
    is_in_group = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
    group_x = jnp.where(is_in_group, x, jnp.zeros((), x.dtype))
    return jnp.einsum(subscripts, _membership(sizes, x.shape[0]), group_x.astype(F32), w.astype(F32)).astype(x.dtype)


def gradient_of_weights(x: Any, dy: Any, sizes: Any) -> Any:
    """Compute the gradient of the matrices: `dw[e]` is the sum of `x[m]^T dy[m]` over the rows of group e.

    Args:
        x: rows sorted by group (M, D).
        dy: the gradient of the result of `forward`, (M, F).
        sizes: number of rows of each group, (E,) int32.

    Returns:
        dw (E, D, F) in the dtype of x; 0 for an empty group.
    """
    is_in_group = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
    wide_rows = (jnp.where(is_in_group, array, jnp.zeros((), array.dtype)).astype(F32) for array in (x, dy))
    return jnp.einsum("em,md,mf->edf", _membership(sizes, x.shape[0]), *wide_rows).astype(x.dtype)
