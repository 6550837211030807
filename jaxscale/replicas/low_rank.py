"""Low-rank codecs approximate a matrix by the product of two thin matrices, each of which is averaged exactly.

    P = mean(M Q), normalized;  Q = mean(M^T P);  the mean gradient is P Q^T, and the next step starts from Q.

M is the gradient of one replica plus its residual, and the means are over replicas. The products M Q and M^T P can be
added without decoding, so two all-reduces suffice, and the bytes that a device sends do not grow with the number of
devices. PowerSGD and GradZip share this code; they differ in how they normalize P and Q.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import UserError
from jaxscale.replicas import wire
from jaxscale.replicas.codec import Codec, CodecState, matrix_shape
from jaxscale.typing import Array, Float, Key


@dataclasses.dataclass(frozen=True)
class LowRank(Codec):
    """A codec of matrices; subclasses define `left` and `right`.

    Args:
        rank: number of columns of P and Q, at most the smaller dim of the matrix.
    """

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise UserError(f"rank: got {self.rank}, expected a whole number >= 1")

    @abc.abstractmethod
    def left(self, product: Float[Array, "rows rank"], q: Float[Array, "columns rank"], axis: str) -> Array:
        """Return P, equal on all devices.

        Args:
            product: M Q of this device.
            q: Q, equal on all devices.
            axis: name of the axis over which the mean is taken.
        """

    @abc.abstractmethod
    def right(self, product: Float[Array, "columns rank"], p: Float[Array, "rows rank"], axis: str) -> Array:
        """Return Q, equal on all devices.

        Args:
            product: M^T P of this device.
            p: P, equal on all devices.
            axis: name of the axis over which the mean is taken.
        """

    def _refusal(self, shape: tuple[int, ...], n: int) -> str | None:
        """Return why this codec does not support a layer of this shape; `None` if it supports the layer."""
        row_count, column_count = matrix_shape(shape)
        if self.rank > min(row_count, column_count):
            return (
                f"got a leaf of shape {shape}, which is a matrix of {row_count} x {column_count}, "
                f"expected dims of at least the rank {self.rank}: lower the rank, or leave the leaf out"
            )
        return None

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> CodecState:
        """Return the initial state of one layer of this shape, for n replicas."""
        assert key is not None, f"codec {self} starts at random: pass a key to init"
        return super()._init(shape, key, n) | {"q": jax.random.normal(key, (matrix_shape(shape)[1], self.rank))}

    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        """Return the mean of one layer's gradient over the axis, and the layer's new state."""
        corrected_gradient, old_q = self.add_residual(gradient, state), state["q"]
        m = corrected_gradient.reshape(matrix_shape(gradient.shape))
        p = self.left(multiply(m, old_q), old_q, axis)
        q = self.right(multiply(m.T, p), p, axis)
        mean = multiply(p, q.T).reshape(gradient.shape)
        # a gradient may be zero in one step, and a zero column of Q would stay zero forever
        new_state = {"q": jnp.where(jnp.any(q != 0, 0), q, old_q)}
        return mean, ({"residual": corrected_gradient - mean} if self.feedback else {}) | new_state

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        """Return the bytes that one device sends for one layer of this shape, with n devices on the axis."""
        return sum(wire.all_reduce(wire.FLOAT32 * side * self.rank, n) for side in matrix_shape(shape))


def multiply(a: Array, b: Array) -> Array:
    """Return the product of two matrices, computed in full float32 precision on every platform."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
