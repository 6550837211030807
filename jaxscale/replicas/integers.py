"""Floats as integers, with a float32 scale for each block: the arithmetic that int8, int4 and QSGD share.

With L = 2^(bits-1) - 1 levels on each side, a block x of scale s = max|x| has the codes round(x L / s) and decodes to
codes * s / L: no element is off by more than s / 2L. Codes of 4 bits or fewer lie two in a byte, for XLA sends a whole
byte for each int4. A kernel rounds to the nearest in 8 or 4 bits if the chip has one (`pallas_kernels.quantize`, of the
same definition). Left out: entropy coding.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.typing import Array, Float, Int, Key
from pallas_kernels.dispatch import Explanation, listening, note
from pallas_kernels.quantize.api import quantize
from pallas_kernels.target import target


class Coded(NamedTuple):
    """Blocks as integers.

    Args:
        codes: int8; of 4 bits or fewer, two in a byte.
        scale: largest magnitude of each block.
    """

    codes: Int[Array, "*rows block"]
    scale: Float[Array, "*rows"]


@dataclasses.dataclass(frozen=True)
class Integers:
    """Encodes blocks of floats as integers, and decodes them.

    Args:
        bits: of each code, 2 to 8.
        block: elements that share a scale; even if codes lie two in a byte.

    Example:
        >>> rule = Integers(bits=4, block=4)
        >>> rule.decode(rule.encode(jnp.array([7.0, -3.4, 0.0, 1.0]), None))
        Array([ 7., -3.,  0.,  1.], dtype=float32)
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        assert 2 <= self.bits <= 8
        assert self.block % 2 == 0 or self.bits > 4

    @property
    def levels(self) -> int:
        """L: codes lie in [-L, L]."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: Float[Array, "... elements"], key: Key | None) -> Coded:
        """Codes and scales of each block of the last dim.

        Args:
            x: float32, whose last dim the block divides.
            key: rounds at random, up with the probability of the fractional part, so that the mean is right; `None`
                rounds to the nearest.
        """
        blocks = x.reshape(*x.shape[:-1], -1, self.block)
        if key is None and self.bits in (8, 4) and x.size:
            codes, scale = quantize(blocks.reshape(-1, self.block), bits=self.bits, block=self.block, axis=-1)
            return Coded(codes.reshape(*blocks.shape[:-1], -1), scale.reshape(blocks.shape[:-1]))
        if listening() and x.size:
            rounding = "at random" if key is not None else f"in {self.bits} bits"
            reason = f"kernels round to the nearest of 8 or 4 bits, and this rounds {rounding}"
            note(Explanation("quantize", target(), "reference", {}, reason))
        scale = jnp.max(jnp.abs(blocks), -1)
        # a block whose scale is zero or has an infinite inverse becomes zeros
        inverse = jnp.where(scale > 2.0**-100, self.levels / scale, 0.0)
        ratios = blocks * inverse[..., None]
        integers = jnp.round(ratios) if key is None else jnp.floor(ratios + jax.random.uniform(key, ratios.shape))
        codes = jnp.clip(integers, -self.levels, self.levels).astype(jnp.int8)
        return Coded(_two_in_a_byte(codes) if self.bits <= 4 else codes, scale)

    def decode(self, coded: Coded) -> Float[Array, "... elements"]:
        """The decoded blocks, float32."""
        codes = _one_in_a_byte(coded.codes) if self.bits <= 4 else coded.codes
        blocks = codes.astype(jnp.float32) * (coded.scale / self.levels)[..., None]
        return blocks.reshape(*blocks.shape[:-2], -1)


def _two_in_a_byte(codes: Array) -> Array:
    """The first half of each block in the low nibbles, the second in the high ones: no lane moves within a half."""
    low, high = jnp.split(codes, 2, axis=-1)
    return (low & 15) | (high << 4)


def _one_in_a_byte(packed: Array) -> Array:
    return jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=-1)
