"""Two-phase codecs of integers in blocks: the base of int8, int4 and QSGD."""

import abc
import dataclasses

from jaxscale.errors import UserError
from jaxscale.replicas.integers import Coded, Integers
from jaxscale.replicas.two_phase import TwoPhase
from jaxscale.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class BlockCodes(TwoPhase):
    """Integers of `width` bits with a scale for each block.

    Args:
        block: elements that share a float32 scale; a smaller chunk has one scale.
    """

    block: int = dataclasses.field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 2 or self.block % 2:
            raise UserError(f"block: got {self.block}, expected an even number of elements >= 2")

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Bits of a code."""

    def multiple(self, elements: int) -> int:
        """A block, or the whole chunk if it is smaller, rounded up to a whole byte."""
        return min(self.block, elements + elements % 2)

    def _rule(self, length: int) -> Integers:
        return Integers(self.width, min(self.block, length))

    def encode(self, chunks: Array, filled: Array, key: Key | None) -> Coded:
        """Codes and scales."""
        return self._rule(chunks.shape[-1]).encode(chunks, key if self.random else None)

    def decode(self, message: Coded, elements: int) -> Array:
        """The decoded chunks, float32."""
        return self._rule(elements).decode(message)
