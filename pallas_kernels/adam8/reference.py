r"""8-bit AdamW, one step: the definition, in plain jax.numpy.

A block is `block` consecutive elements of a column. Codes have the shape of the parameters, and so have scales, except
that their second-minor dim is divided by the block. On TPU, splitting the second-minor dim into blocks is a view;
splitting the last dim would need a new layout. For the update number :math:`t`, counted from 1, and a gradient g,

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p),

and m and v are stored as codes (`maps.py`), after division by the largest magnitude in their block. An element whose
g^2 is not a float32 number below 2^126 (NaN, infinity, |g| beyond 9e18) is not updated: its p stays the same, and its m
and v change only by rounding, if their block gets another scale. If `is_applied` is 0, nothing changes, not even a bit.
Left out: bias-corrected epsilon, stochastic rounding, moments in 4 bits.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.adam8.maps import MAPS

FLOP = 45
"""FLOP per parameter and step."""
MIN_SCALE = 2.0**-126
"""The smallest normal float32: no number is divided by a smaller scale, because smaller numbers are flushed to zero."""
MAX_SQUARE = 2.0**126
"""Squares of gradient elements must be below this, the largest float32 whose inverse is a normal number."""
HYPER = 5
"""Length of `hyper`: learning rate, 1 / (1 - b1^t), 1 / (1 - b2^t), factor of the gradient, is_applied (1 or 0)."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The hyperparameters that do not change from step to step.

    Args:
        block: number of consecutive elements of a column that share a scale.
        b1: decay of m, in [0, 1).
        b2: decay of v, in [0, 1).
        eps: number that is added to the square root of v.
        weight_decay: factor of the decoupled weight decay.
        map: name of the map between moments and codes, in `maps.MAPS`.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> Settings(map="linear")
        Traceback (most recent call last):
        ValueError: adam8: got map 'linear', expected soft8 or dynamic8
    """

    block: int = 128
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    map: str = "soft8"

    def __post_init__(self) -> None:
        if self.map not in MAPS:
            raise ValueError(f"adam8: got map {self.map!r}, expected {' or '.join(MAPS)}")
        if isinstance(self.block, bool) or not hasattr(self.block, "__index__") or self.block < 1:
            raise ValueError(
                f"adam8: got blocks of {self.block!r} rows, expected a whole number, 1 or more; 128 fits both kernels"
            )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"adam8: got {name} {getattr(self, name)}, expected a decay in [0, 1)")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"adam8: got eps {self.eps}, expected a finite number above 0, such as 1e-8")
        if not math.isfinite(self.weight_decay):
            raise ValueError(f"adam8: got weight_decay {self.weight_decay}, expected a finite number; 0 for none")


def step(
    p: Array, g: Array, m: tuple[Array, Array], v: tuple[Array, Array], hyper: Array, settings: Settings
) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
    """Update the parameters and both moments.

    Args:
        p: parameters (L, R, C), float32.
        g: gradients (L, R, C), float32 or bfloat16.
        m: codes (L, R, C) and scales (L, R / block, C) of the first moment.
        v: codes and scales of the second moment, in the same shapes.
        hyper: hyperparameters that change from step to step, float32 (5,), see `HYPER`.
        settings: hyperparameters that do not change.

    Returns:
        p, m and v after the step.
    """
    code_map = MAPS[settings.map]
    block_shape = (p.shape[0], p.shape[1] // settings.block, settings.block, p.shape[2])
    lr, correct_m, correct_v, factor, applied = hyper
    weight, raw_grad = p.reshape(block_shape), g.astype(jnp.float32).reshape(block_shape)
    is_usable = jnp.square(raw_grad) < MAX_SQUARE
    grad = jnp.where(is_usable, raw_grad * factor, 0)
    (m_codes, m_scales), (v_codes, v_scales) = m, v
    old_m = code_map.decode_m(m_codes.reshape(block_shape)) * m_scales[:, :, None]
    old_v = code_map.decode_v(v_codes.reshape(block_shape)) * v_scales[:, :, None]
    new_m = jnp.where(is_usable, settings.b1 * old_m + (1 - settings.b1) * grad, old_m)
    new_v = jnp.where(is_usable, settings.b2 * old_v + (1 - settings.b2) * jnp.square(grad), old_v)
    denominator = jnp.sqrt(new_v * correct_v) + settings.eps
    new_weight = weight - lr * (new_m * correct_m / denominator + settings.weight_decay * weight)
    new_m_scales, new_v_scales = jnp.max(jnp.abs(new_m), 2), jnp.max(new_v, 2)
    new_m_codes = code_map.encode_m(new_m * (1 / jnp.maximum(new_m_scales, MIN_SCALE))[:, :, None])
    new_v_codes = code_map.encode_v(new_v * (1 / jnp.maximum(new_v_scales, MIN_SCALE))[:, :, None], jnp.sqrt)
    new_p = jnp.where(is_usable, new_weight, weight).reshape(p.shape)
    new_m_codes = new_m_codes.astype(m_codes.dtype).reshape(p.shape)
    new_v_codes = new_v_codes.astype(v_codes.dtype).reshape(p.shape)
    is_applied = applied > 0
    selected_m = jnp.where(is_applied, new_m_codes, m_codes), jnp.where(is_applied, new_m_scales, m_scales)
    selected_v = jnp.where(is_applied, new_v_codes, v_codes), jnp.where(is_applied, new_v_scales, v_scales)
    return jnp.where(is_applied, new_p, p), selected_m, selected_v
