"""GradZip: for each gradient, one step of alternating least squares, which starts from the previous step's factor Q.

Source: Cho et al., 2019, "GradZip: Gradient Compression using Alternating Matrix Factorization for Large-scale Deep
Learning".

    P = mean(M Q) (Q^T Q + r I)^-1,  Q = mean(M^T P) (P^T P + r I)^-1

M is the gradient of one replica plus its residual, and the means are over replicas.

The text of the paper was not available, so the order of the updates and the ridge r are our choice. The factors span
the same space as those of PowerSGD, but their columns need not be orthogonal. The ridge shrinks the weakest directions.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.compat import sequential_on_cpu
from jaxscale.errors import UserError
from jaxscale.replicas.low_rank import LowRank, multiply
from jaxscale.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class GradZip(LowRank):
    """A codec that sends two factors, each of which is the least-squares solution given the other factor.

    Args:
        rank: number of columns of P and Q, at most the smaller dim of every matrix.
        ridge: r, as a fraction of the mean of the columns' squared norms.

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
            raise UserError(f"ridge: got {self.ridge}, expected 1e-6 to 1 (float32 is too inexact for less)")

    def left(self, product: Float[Array, "rows rank"], q: Float[Array, "columns rank"], axis: str) -> Array:
        """Return P: the mean over the axis of the devices' least-squares solutions for Q; `product` is M Q."""
        return lax.pmean(self._least_squares(product, q), axis)

    def right(self, product: Float[Array, "columns rank"], p: Float[Array, "rows rank"], axis: str) -> Array:
        """Return Q: the mean over the axis of the devices' least-squares solutions for P; `product` is M^T P."""
        return lax.pmean(self._least_squares(product, p), axis)

    def _least_squares(self, product: Array, factor: Array) -> Array:
        """Return the least-squares solution with the ridge r: product (factor^T factor + r I)^-1."""
        gram = multiply(factor.T, factor)
        mean_squared_norm = jnp.trace(gram) / self.rank
        # the diagonal is scaled to a mean of 1, so that gradients of any magnitude stay within the range of float32
        scaled_gram = gram / jnp.maximum(mean_squared_norm, 2.0**-100) + self.ridge * jnp.eye(self.rank)
        solution = _solve(scaled_gram, product.T).T
        return solution / jnp.maximum(mean_squared_norm, 2.0**-100)


@sequential_on_cpu
def _solve(matrix: Array, right_side: Array) -> Array:
    """Return the solution X of `matrix @ X = right_side`, for a symmetric positive definite matrix."""
    lower_factor = jnp.linalg.cholesky(matrix, symmetrize_input=False)
    return jax.scipy.linalg.cho_solve((lower_factor, True), right_side)
