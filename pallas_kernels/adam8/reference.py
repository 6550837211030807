r"""8-bit AdamW, one step: the definition, in plain jax.numpy.

A block is `block` numbers below one another in a column, so codes keep the parameter's shape and scales have its
second-minor dim divided by the block: on TPU a view, where blocks along the last dim would be a relayout. With
:math:`t` updates made, this one included, and a gradient g,

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p),

and m and v are kept as codes of what they are, divided by the largest of their block (`maps.py`). An element whose g^2
is not a float32 number below 2^126 (NaN, infinity, beyond 9e18) is left out: its p, m and v are as they were, but for
the rounding of m and v where their block gets another scale. Where `go` is 0 nothing changes, not a bit.
Left out: bias-corrected epsilon, stochastic rounding, moments in 4 bits.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.adam8.maps import MAPS

FLOP = 45
"""Of a parameter."""
LEAST = 2.0**-126
"""The smallest normal float32: scales below it are not divided by, since what is smaller is flushed to zero."""
MOST = 2.0**126
"""The largest float32 whose inverse is a normal number."""
HYPER = 5
"""Numbers that change from step to step: learning rate, 1 / (1 - b1^t), 1 / (1 - b2^t), factor of the gradient, go."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What does not change from step to step.

    Args:
        block: rows of a column that share a scale.
        b1: decay of m, in [0, 1).
        b2: decay of v, in [0, 1).
        eps: added to the root.
        weight_decay: decoupled.
        map: of the codes, a name of `maps.MAPS`.

    Raises:
        ValueError: one of them is out of range.

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
    """One step.

    Args:
        p: parameters (L, R, C), float32.
        g: gradients, float32 or bfloat16.
        m: codes (L, R, C) and scales (L, R / block, C) of the first moment.
        v: the same of the second.
        hyper: float32 (5,), see `HYPER`.
        settings: the rest.

    Returns:
        p, m and v after the step.
    """
    maps = MAPS[settings.map]
    blocked = (p.shape[0], p.shape[1] // settings.block, settings.block, p.shape[2])
    lr, correct_m, correct_v, factor, go = hyper
    weight, grad = p.reshape(blocked), g.astype(jnp.float32).reshape(blocked)
    ok = jnp.square(grad) < MOST
    grad = jnp.where(ok, grad * factor, 0)
    old_m = maps.decode_m(m[0].reshape(blocked)) * m[1][:, :, None]
    old_v = maps.decode_v(v[0].reshape(blocked)) * v[1][:, :, None]
    new_m = jnp.where(ok, settings.b1 * old_m + (1 - settings.b1) * grad, old_m)
    new_v = jnp.where(ok, settings.b2 * old_v + (1 - settings.b2) * jnp.square(grad), old_v)
    root = jnp.sqrt(new_v * correct_v) + settings.eps
    new_weight = weight - lr * (new_m * correct_m / root + settings.weight_decay * weight)
    scale_m, scale_v = jnp.max(jnp.abs(new_m), 2), jnp.max(new_v, 2)
    codes_m = maps.encode_m(new_m * (1 / jnp.maximum(scale_m, LEAST))[:, :, None])
    codes_v = maps.encode_v(new_v * (1 / jnp.maximum(scale_v, LEAST))[:, :, None], jnp.sqrt)
    new = (
        jnp.where(ok, new_weight, weight).reshape(p.shape),
        (codes_m.astype(m[0].dtype).reshape(p.shape), scale_m),
        (codes_v.astype(v[0].dtype).reshape(p.shape), scale_v),
    )
    is_good = go > 0
    moments = [
        (jnp.where(is_good, a, b), jnp.where(is_good, c, d)) for (a, c), (b, d) in zip(new[1:], (m, v), strict=True)
    ]
    return jnp.where(is_good, new[0], p), moments[0], moments[1]
