"""Codecs with eight or four bits per element, which send 3.9 or 7.7 times fewer bytes than float32.

They compute a two-phase mean of block-wise integers, as in 1-bit Adam and ZeRO++ (arXiv:2306.10209), with error
feedback in both phases. QSGD uses the same integers, but rounds at random.
"""

import dataclasses
from typing import ClassVar

from jaxscale.errors import UserError
from jaxscale.replicas import integers
from jaxscale.replicas.integers import IntegerCodes
from jaxscale.replicas.two_phase import TwoPhase
from jaxscale.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class BlockCodes(TwoPhase):
    """A codec whose messages are integers of `width` bits, with a scale for each block.

    Args:
        block: number of elements that share a float32 scale; a chunk that is shorter than a block has one scale.
    """

    width: ClassVar[int]
    """Number of bits of a code."""
    block: int = dataclasses.field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 2 or self.block % 2:
            raise UserError(f"block: got {self.block}, expected an even number of elements >= 2")

    def divisor(self, elements: int) -> int:
        """Return the length of a block or, for a shorter chunk, the chunk's length rounded up to an even number.

        With an even length, the 4-bit codes of a chunk fill whole bytes.
        """
        return min(self.block, elements + elements % 2)

    def _code_bits(self) -> int:
        """Return the number of bits of a code."""
        return self.width

    def encode(self, chunks: Array, filled_counts: Array, key: Key | None) -> IntegerCodes:
        """Return the codes and scales of chunks, float32 (chunks, elements)."""
        block_length = min(self.block, chunks.shape[-1])
        return integers.encode_integers(chunks, self._code_bits(), block_length, key if self.random else None)

    def decode(self, message: IntegerCodes, elements: int) -> Array:
        """Return the chunks that codes and scales stand for, float32 (chunks, elements)."""
        return integers.decode_integers(message, self._code_bits())


@dataclasses.dataclass(frozen=True)
class Int8(BlockCodes):
    """A codec that rounds to the nearest of 255 levels, with a float32 scale for each block.

    Args:
        block: number of elements that share a scale.

    Example:
        >>> Int8().wire_bytes((1024, 1024), n=8) / 2**20
        1.77734375
    """

    name: ClassVar[str] = "int8"
    width: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True)
class Int4(BlockCodes):
    """A codec that rounds to the nearest of 15 levels, with a float32 scale for each block.

    Args:
        block: number of elements that share a scale.

    Example:
        >>> Int4().wire_bytes((1024, 1024), n=8) / 2**20
        0.90234375
    """

    name: ClassVar[str] = "int4"
    width: ClassVar[int] = 4
