"""PowerSGD: for each gradient, one step of power iteration, which starts from the previous step's factor Q.

Source: Vogels et al., 2019, arXiv:1905.13727, algorithms 1 and 2.

In 400 steps of a small language model (`benchmarks/convergence.py`), SGD with momentum loses 0.034 nats with rank 4 and
0.013 nats with rank 8, compared with exact means. Adam loses 0.10 nats with rank 4 and 0.018 nats with rank 16. For
Adam, use a higher rank and a later start (`start=`), or int8.

Left out: the half steps of the reference code, which alternate between P and Q.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jaxscale.replicas.low_rank import LowRank, multiply
from jaxscale.typing import Array, Float

DEPENDENT_FRACTION = 1e-6
"""A column counts as dependent if orthogonalization leaves less than this fraction of its norm (rounding error)."""


@dataclasses.dataclass(frozen=True)
class PowerSGD(LowRank):
    """A codec that sends two factors; their product converges to the gradient's best approximation of rank `rank`.

    Args:
        rank: number of columns of P and Q, at most the smaller dim of every matrix.

    Example:
        >>> from jaxscale.replicas import wire
        >>> round(wire.exact((576, 128), 2) / PowerSGD(4).wire_bytes((3, 3, 64, 128), 2), 1)
        26.2
        >>> PowerSGD(4).init((3, 768), None, 2)
        Traceback (most recent call last):
        jaxscale.errors.UserError: codec powersgd:4: got a leaf of shape (3, 768), which is a matrix of 3 x 768, \
expected dims of at least the rank 4: lower the rank, or leave the leaf out
    """

    name: ClassVar[str] = "powersgd"
    value: ClassVar[str | None] = "rank"

    def left(self, product: Float[Array, "rows rank"], q: Float[Array, "columns rank"], axis: str) -> Array:
        """Return P: orthonormal columns with the span of the mean of M Q over the axis; `product` is M Q."""
        return orthonormal(lax.pmean(product, axis))

    def right(self, product: Float[Array, "columns rank"], p: Float[Array, "rows rank"], axis: str) -> Array:
        """Return Q: the mean of M^T P over the axis; `product` is M^T P."""
        return lax.pmean(product, axis)


def orthonormal(a: Float[Array, "rows rank"]) -> Float[Array, "rows rank"]:
    """Return the columns of a matrix made orthonormal, by two passes of Gram-Schmidt; dependent columns become zero.

    Example:
        >>> orthonormal(jnp.array([[3.0, 3.0], [4.0, 4.0], [0.0, 2.0]])).round(3)
        Array([[0.6, 0. ],
               [0.8, 0. ],
               [0. , 1. ]], dtype=float32)
    """

    def orthogonalize(index: int | Array, matrix: Array) -> Array:
        """Return the matrix after column `index` was made orthogonal to the earlier columns and normalized."""
        earlier_columns = jnp.where(jnp.arange(matrix.shape[1]) < index, matrix, 0.0)
        raw_column = lax.dynamic_slice_in_dim(matrix, index, 1, 1)
        column = raw_column / jnp.maximum(jnp.max(jnp.abs(raw_column)), 2.0**-126)  # squares of small numbers vanish
        remainder = column
        for _ in range(2):
            remainder = remainder - multiply(earlier_columns, multiply(earlier_columns.T, remainder))
        norm = jnp.linalg.norm(remainder)
        unit_column = jnp.where(norm > DEPENDENT_FRACTION * jnp.linalg.norm(column), remainder / norm, 0.0)
        return lax.dynamic_update_slice_in_dim(matrix, unit_column, index, 1)

    return lax.fori_loop(0, a.shape[1], orthogonalize, a)
