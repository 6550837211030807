"""Rotary position embedding (Su et al. 2021). Dim i is paired with dim i + H/2, as in Hugging Face's Llama; the paper
pairs neighbors, so weights for its layer are a permutation of weights for this one. Any function may scale the
frequencies, such as `models.Llama3Scaling`. Left out: scaling by the length of the input.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxscale.errors import UserError
from jaxscale.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of pairs of dims by angles proportional to the position.

    Args:
        head_dim: width of a head, even.
        base: ratio of the longest wavelength (in the limit of wide heads) to the shortest one, which is 2 pi positions.
        scaling: function from frequencies, float64 (head_dim / 2,) in radians per position, to scaled frequencies;
            `None` leaves them unchanged.

    Example:
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> y = Rotary(4).apply(x, jnp.array([[0, 1]]))
        >>> bool((y[0, 0] == 1).all()), [round(float(v), 3) for v in y[0, 1, 0]]
        (True, [-0.301, 0.99, 1.382, 1.01])
    """

    head_dim: int
    base: float = 10000.0
    scaling: Callable[[np.ndarray], np.ndarray] | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"rotary head_dim: got {self.head_dim}, expected an even number >= 2")
        if not self.base > 0:
            raise UserError(f"rotary base: got {self.base!r}, expected a number > 0")

    @property
    def frequencies(self) -> np.ndarray:
        """Frequency of each pair of dims in radians per position, float32 (head_dim / 2,)."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        unscaled_frequencies = self.base**-exponents
        return np.asarray(
            unscaled_frequencies if self.scaling is None else self.scaling(unscaled_frequencies), np.float32
        )

    def apply(self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]) -> Float[Array, "B T N H"]:
        """Rotate `x` by the angles of its positions, in float32; the result has the type of `x`."""
        angles = positions.astype(jnp.float32)[:, :, None, None] * self.frequencies[None, None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first_half, second_half = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated_halves = first_half * cos - second_half * sin, second_half * cos + first_half * sin
        return jnp.concatenate(rotated_halves, -1).astype(x.dtype)
