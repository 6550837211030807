"""RMS norm (Zhang and Sennrich, arXiv 1910.07467) and layer norm (Ba et al., arXiv 1607.06450): the definition."""

from typing import Any

import jax
import jax.numpy as jnp

FLOP = 8
"""Of a number, in either pass."""


def forward(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, *, eps: float, center: bool
) -> tuple[Any, Any]:
    """The norm of `h = x + residual`, and `h`. Sums, statistics and the gain in float32.

    `f = h - center * mean(h)`, `y = f / sqrt(mean(f^2) + eps) * weight + bias`.

    Args:
        x: (R, D).
        weight: (D,).
        bias: (D,), or None.
        residual: (R, D), or None, where `h` is `x` itself.
        eps: added to the mean square.
        center: subtract the mean (layer norm); else not (RMS norm).

    Returns:
        y and h, (R, D), in the type of x. What is normalised is h as rounded to that type.

    Example:
        >>> y, _ = forward(jnp.array([[1.0, 3.0]]), jnp.ones(2), eps=0.0, center=True)
        >>> y.tolist()
        [[-1.0, 1.0]]
    """
    h = x if residual is None else (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
    wide = h.astype(jnp.float32)
    if center:
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    # not jnp.square, whose derivative keeps 2 * wide beside wide
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)[None]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.astype(x.dtype), h


def backward(
    h: Any, weight: Any, bias: Any, dy: Any, dh: Any = None, *, eps: float, center: bool
) -> tuple[Any, Any, Any]:
    """Gradients of (x + residual), weight and bias, from h alone: the statistics are computed again.

    With `u = f / sqrt(mean(f^2) + eps)` and `g = dy * weight`:
    `dx = (g - center * mean(g) - u * mean(g * u)) / sqrt(mean(f^2) + eps) + dh`, `dweight = sum(dy * u)`,
    `dbias = sum(dy)`.

    Args:
        h: (R, D), what was normalised.
        weight: (D,).
        bias: (D,) or None, of which only the type is read.
        dy: (R, D).
        dh: (R, D), the gradient of h as an output, or None.
        eps: as in the forward.
        center: as in the forward.

    Returns:
        dx in the type of h, dweight and dbias (None without one) in theirs.

    Example:
        >>> one = jnp.ones((1, 2))
        >>> backward(one, jnp.ones(2), None, one, eps=0.0, center=False)[0].tolist()  # a longer vector: the same norm
        [[0.0, 0.0]]
    """
    f, g = h.astype(jnp.float32), dy.astype(jnp.float32)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)
    unit = f * scale
    d_weight = jnp.sum(g * unit, 0).astype(weight.dtype)
    d_bias = None if bias is None else jnp.sum(g, 0).astype(bias.dtype)
    g = g * weight.astype(jnp.float32)[None]
    dx = g - unit * jnp.mean(g * unit, -1, keepdims=True)
    if center:
        dx = dx - jnp.mean(g, -1, keepdims=True)
    dx = dx * scale
    if dh is not None:
        dx = dx + dh.astype(jnp.float32)
    return dx.astype(h.dtype), d_weight, d_bias
