"""A codec that sends the sign of each element and one scale for each chunk: 31 times fewer bytes than float32.

The codec computes the mean as in 1-bit Adam (Tang et al., 2021, arXiv:2102.02888). The scale of a chunk is its root
mean square, as in DeepSpeed's code, and zero counts as positive. The codec is meant for the momentum in 1-bit Adam,
which keeps the variance constant. Plain Adam trains badly with gradients in this form.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from jaxscale.replicas.two_phase import TwoPhase
from jaxscale.typing import Array, Float, Key, Shaped

SIGNS_PER_BYTE = 8
"""Number of signs in a byte."""


class Signs(NamedTuple):
    """Chunks encoded as signs.

    Args:
        bits: uint8; bit i of byte j is 1 if element i * (elements / 8) + j of the chunk is not negative. In this
            layout, no element moves between the lanes of the last dim when signs are packed.
        scale: for each chunk, its root mean square.
    """

    bits: Shaped[Array, "chunks bytes"]
    scale: Float[Array, "chunks"]


@dataclasses.dataclass(frozen=True)
class OneBit(TwoPhase):
    """A codec that sends each element as its sign times the root mean square of its chunk.

    Example:
        >>> from jaxscale.replicas import wire
        >>> round(wire.exact((1024, 1024), 2) / OneBit().wire_bytes((1024, 1024), 2), 2)
        32.0
    """

    name: ClassVar[str] = "onebit"

    def divisor(self, elements: int) -> int:
        """Return the number of signs in a byte, so that the signs of a chunk fill whole bytes."""
        return SIGNS_PER_BYTE

    def encode(self, chunks: Array, filled_counts: Array, key: Key | None) -> Signs:
        """Return the signs of the elements, packed eight to a byte, and the scale of each chunk.

        `chunks` is float32 (chunks, elements).
        """
        scale = jnp.sqrt(jnp.sum(jnp.square(chunks), -1) / jnp.maximum(filled_counts, 1))
        unpacked_bits = (chunks >= 0).astype(jnp.uint8).reshape(len(chunks), SIGNS_PER_BYTE, -1)
        return Signs(jnp.sum(unpacked_bits << _bit_positions(), 1, dtype=jnp.uint8), scale)

    def decode(self, message: Signs, elements: int) -> Array:
        """Return chunks, float32 (chunks, elements): each element is its sign times the scale of its chunk."""
        signs = ((message.bits[:, None] >> _bit_positions()) & 1).astype(jnp.float32) * 2 - 1
        return signs.reshape(-1, elements) * message.scale[:, None]


def _bit_positions() -> Array:
    """Return the bit positions 0 to 7, in a shape that broadcasts over (chunks, bits, bytes)."""
    return jnp.arange(SIGNS_PER_BYTE, dtype=jnp.uint8)[None, :, None]
