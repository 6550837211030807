"""GradZip: alternating least squares a gradient, from where the last one ended (Cho et al., 2019, "GradZip: Gradient
Compression using Alternating Matrix Factorization for Large-scale Deep Learning").

    P = mean(M Q) (Q^T Q + r I)^-1,  Q = mean(M^T P) (P^T P + r I)^-1

The paper's text was not at hand: the order of the updates and the ridge are ours. It spans what PowerSGD spans and
needs no orthogonal columns; the ridge shrinks the weakest directions.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.compat import one_by_one
from jaxscale.compression.low_rank import LowRank, times
from jaxscale.errors import UserError
from jaxscale.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class GradZip(LowRank):
    """The factors of least squared error, each given the other.

    Args:
        rank: columns of P and Q, at most the smaller dim of every matrix.
        ridge: r as a part of the mean of the squared columns' norms.

    Example:
        >>> GradZip(4).wire_bytes((576, 128), 2) == 4 * 4 * (576 + 128)
        True
    """

    name: ClassVar[str] = "gradzip"
    value: ClassVar[str | None] = "rank"

    ridge: float = dataclasses.field(default=1e-5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= self.ridge <= 1:
            raise UserError(f"ridge: got {self.ridge}, expected 1e-6 (below which float32 can't divide) to 1")

    def left(self, product: Float[Array, "rows rank"], q: Float[Array, "columns rank"], axis: str) -> Array:
        """The mean over the squares of Q."""
        return lax.pmean(self._over(product, q), axis)

    def right(self, product: Float[Array, "columns rank"], p: Float[Array, "rows rank"], axis: str) -> Array:
        """The mean over the squares of P."""
        return lax.pmean(self._over(product, p), axis)

    def _over(self, product: Array, factor: Array) -> Array:
        squares = times(factor.T, factor)
        mean = jnp.trace(squares) / self.rank
        # scaled to a mean of 1, so that gradients of any magnitude are far from what float32 can't hold
        scaled = squares / jnp.maximum(mean, 2.0**-100) + self.ridge * jnp.eye(self.rank)
        solved = _solved(scaled, product.T).T
        return solved / jnp.maximum(mean, 2.0**-100)


@one_by_one
def _solved(matrix: Array, right: Array) -> Array:
    """X of `matrix @ X = right`, for a symmetric positive definite matrix."""
    lower = jnp.linalg.cholesky(matrix, symmetrize_input=False)
    return jax.scipy.linalg.cho_solve((lower, True), right)
