"""RMS norm (Zhang and Sennrich, arXiv 1910.07467) and layer norm (Ba et al., arXiv 1607.06450): the definition."""

from typing import Any

import jax
import jax.numpy as jnp

FLOP = 8
"""FLOP per element of x, in either pass."""


def forward(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, *, eps: float, center: bool
) -> tuple[Any, Any]:
    """Compute the norm of `h = x + residual`, and `h`; sums, statistics and the product with the weight are float32.

    `f = h - center * mean(h)`, `y = f / sqrt(mean(f^2) + eps) * weight + bias`.

    Args:
        x: the input (R, D).
        weight: (D,).
        bias: (D,), or None.
        residual: (R, D); if it is None, `h` is `x` itself.
        eps: number that is added to the mean square.
        center: whether to subtract the mean: True for layer norm, False for RMS norm.

    Returns:
        The norm y, and h, both (R, D) in the dtype of x. The norm is computed from h after h is rounded to that dtype.

    Example:
        >>> y, _ = forward(jnp.array([[1.0, 3.0]]), jnp.ones(2), eps=0.0, center=True)
        >>> y.tolist()
        [[-1.0, 1.0]]
    """
    h = x if residual is None else (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
    f = h.astype(jnp.float32)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    # not jnp.square, since its derivative would keep 2 * f besides f
    y = f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)[None]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.astype(x.dtype), h


def backward(
    h: Any, weight: Any, bias: Any, dy: Any, dh: Any = None, *, eps: float, center: bool
) -> tuple[Any, Any, Any]:
    """Compute the gradients of x + residual, weight and bias; of the forward pass only h is kept.

    With `f = h - center * mean(h)`, `u = f / sqrt(mean(f^2) + eps)` and `g = dy * weight`:
    `dx = (g - center * mean(g) - u * mean(g * u)) / sqrt(mean(f^2) + eps) + dh`, `dweight = sum(dy * u)`,
    `dbias = sum(dy)`.

    Args:
        h: the sum that `forward` returned, (R, D).
        weight: (D,).
        bias: (D,) or None; only its dtype matters.
        dy: the gradient of y, (R, D).
        dh: the gradient of h as a result, (R, D), or None.
        eps, center: as in `forward`.

    Returns:
        dx in the dtype of h, dweight in the dtype of weight, and dbias in the dtype of bias (None without a bias).

    Example:
        >>> ones = jnp.ones((1, 2))
        >>> backward(ones, jnp.ones(2), None, ones, eps=0.0, center=False)[0].tolist()
        [[0.0, 0.0]]
    """
    f, dy_wide = h.astype(jnp.float32), dy.astype(jnp.float32)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)
    u = f * scale
    d_weight = jnp.sum(dy_wide * u, 0).astype(weight.dtype)
    d_bias = None if bias is None else jnp.sum(dy_wide, 0).astype(bias.dtype)
    g = dy_wide * weight.astype(jnp.float32)[None]
    dx = g - u * jnp.mean(g * u, -1, keepdims=True)
    if center:
        dx = dx - jnp.mean(g, -1, keepdims=True)
    dx = dx * scale
    if dh is not None:
        dx = dx + dh.astype(jnp.float32)
    return dx.astype(h.dtype), d_weight, d_bias
