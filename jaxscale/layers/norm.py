"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), over the last dim. Statistics and gain are in
float32; the result has the type of the input.

For the backward pass, a norm keeps only its input, and recomputes the norm. JAX would keep two float32 arrays.
"""

import functools
from typing import Any

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
        gain = as_row(self.weight[...], x)
        return _norm(x, 1 + gain if self.plus_one else gain, None, self.eps, False)


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
        bias = None if self.bias is None else as_row(self.bias[...], x)
        return _norm(x, as_row(self.weight[...], x), bias, self.eps, True)


def _normalize(x: Any, gain: Any, bias: Any, eps: float, is_centered: bool) -> Any:
    """Return `x / sqrt(mean(x^2) + eps) * gain + bias` in the type of `x`, for `x` minus its mean if `is_centered`."""
    x_float32 = x.astype(jnp.float32)
    if is_centered:
        x_float32 = x_float32 - jnp.mean(x_float32, -1, keepdims=True)
    y = x_float32 * jax.lax.rsqrt(jnp.mean(x_float32 * x_float32, -1, keepdims=True) + eps) * gain
    return (y if bias is None else y + bias).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(x: Any, gain: Any, bias: Any, eps: float, is_centered: bool) -> Any:
    """Compute `_normalize`, but keep only the arguments for the backward pass."""
    return _normalize(x, gain, bias, eps, is_centered)


def _norm_forward(x: Any, gain: Any, bias: Any, eps: float, is_centered: bool) -> Any:
    return _normalize(x, gain, bias, eps, is_centered), (x, gain, bias)


def _norm_backward(eps: float, is_centered: bool, inputs: Any, dy: Any) -> Any:
    """Return the gradients of `inputs`, which are (x, gain, bias); `dy` is the gradient of the output."""
    return jax.vjp(lambda x, gain, bias: _normalize(x, gain, bias, eps, is_centered), *inputs)[1](dy)


_norm.defvjp(_norm_forward, _norm_backward)
