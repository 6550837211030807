"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), over the last dim. Statistics and gain are in
float32; the result has the type of the input.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.typing import Array, Float


def as_row(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Return a vector (C,) in float32 with the rank of `x`, (1, ..., 1, C)."""
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector.shape)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * w`; with `plus_one`, as in Gemma, the factor `w` is replaced by `1 + w`.

    Args:
        size: size of the last dim, which is normalized.
        eps: constant added to the mean square.
        plus_one: whether to multiply by `1 + w`, with `w` initially zeros, rather than by `w`, initially ones.
        rngs: random streams, which are not used.

    Example:
        >>> from flax import nnx
        >>> RMSNorm(4, rngs=nnx.Rngs(0))(jnp.full((1, 4), 3.0)).round(3).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(self, size: int, *, eps: float = 1e-6, plus_one: bool = False, rngs: nnx.Rngs | None = None):
        self.eps, self.plus_one = eps, plus_one
        make_weight = jnp.zeros if plus_one else jnp.ones
        self.weight = nnx.Param(make_weight((size,), jnp.float32), out_sharding=("norm",))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalize `x` over its last dim, in the type of `x`."""
        x_float32 = x.astype(jnp.float32)
        # jnp.square would keep 2 * x_float32 for the backward pass, besides x_float32
        normalized = x_float32 * jax.lax.rsqrt(jnp.mean(x_float32 * x_float32, -1, keepdims=True) + self.eps)
        gain = as_row(self.weight[...], x)
        return (normalized * (1 + gain if self.plus_one else gain)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * w + b`.

    Args:
        size: size of the last dim, which is normalized.
        eps: constant added to the variance.
        bias: whether the layer has a `b`.
        rngs: random streams, which are not used.

    Example:
        >>> from flax import nnx
        >>> LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0]])).round(3).tolist()
        [[-1.0, 1.0]]
    """

    def __init__(self, size: int, *, eps: float = 1e-5, bias: bool = True, rngs: nnx.Rngs | None = None):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32), out_sharding=("norm",))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32), out_sharding=("norm",)) if bias else None

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalize `x` over its last dim, in the type of `x`."""
        x_float32 = x.astype(jnp.float32)
        centered = x_float32 - jnp.mean(x_float32, -1, keepdims=True)
        normalized = centered * jax.lax.rsqrt(jnp.mean(centered * centered, -1, keepdims=True) + self.eps)
        y = normalized * as_row(self.weight[...], x)
        if self.bias is not None:
            y = y + as_row(self.bias[...], x)
        return y.astype(x.dtype)
