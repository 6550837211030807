"""Rotary position embedding (Su et al. 2021), halves convention: dim i is paired with dim i + H/2, as in Hugging Face's
Llama (the paper pairs neighbours; weights of one convention are a permutation of the other's). Llama 3's scaling of the
frequencies, and linear scaling; YaRN and dynamic scaling are left out.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxscale.errors import UserError
from jaxscale.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretch of the context: slow frequencies are divided by `factor`, fast ones kept, others in between.

    Args:
        factor: by which slow frequencies are divided.
        low_freq_factor: wavelengths longer than original_context / low_freq_factor are slow.
        high_freq_factor: wavelengths shorter than original_context / high_freq_factor are fast.
        original_context: positions the model was first trained on.

    References:
        transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_context > 0):
            raise UserError(
                f"{self}: expected factor > 0, 0 < low_freq_factor < high_freq_factor and original_context > 0"
            )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies, radians per position."""
        turns = self.original_context * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return smooth * frequencies + (1 - smooth) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise UserError(f"linear rotary scaling: got factor {self.factor!r}, expected more than 0")

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies, radians per position."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of pairs of dims by angles proportional to the position.

    Args:
        head_dim: width of a head, even.
        base: wavelengths run from 2 pi to 2 pi * base.
        scaling: how the frequencies are stretched; `None` leaves them.

    Example:
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> y = Rotary(4).apply(x, jnp.array([[0, 1]]))
        >>> bool((y[0, 0] == 1).all()), [round(float(v), 3) for v in y[0, 1, 0]]
        (True, [-0.301, 0.99, 1.382, 1.01])
    """

    head_dim: int
    base: float = 10000.0
    scaling: RotaryScaling | LinearScaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"rotary positions turn pairs of dims: got head_dim {self.head_dim}, expected it even")
        if not self.base > 0:
            raise UserError(f"rotary base: got {self.base!r}, expected more than 0")

    @property
    def frequencies(self) -> np.ndarray:
        """Radians per position of every pair, float32 (head_dim / 2,)."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = self.base**-exponents
        return np.asarray(frequencies if self.scaling is None else self.scaling(frequencies), np.float32)

    def apply(self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]) -> Float[Array, "B T N H"]:
        """`x` turned by its positions; angles and the rotation in float32, the result in the type of `x`."""
        angles = positions.astype(jnp.float32)[:, :, None, None] * self.frequencies[None, None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
