"""QSGD rounds at random, so that the expected value of the mean is exact and no residual is needed.

Source: Alistarh et al., 2017, arXiv:1610.02132. Blocks are scaled by their largest magnitude, as in the paper's code,
and not by their norm. All codes have the same number of bits; the paper uses Elias coding. Both phases round at random.
"""

import dataclasses
from typing import ClassVar

from jaxscale.errors import UserError
from jaxscale.replicas.codecs.block_codes import BlockCodes


@dataclasses.dataclass(frozen=True)
class QSGD(BlockCodes):
    """A codec that rounds at random to integers, with a float32 scale for each block.

    Args:
        bits: number of bits of each code, 4 or 8.
        block: number of elements that share a scale.

    Example:
        >>> str(QSGD(4)), QSGD(4).feedback, QSGD.parse("qsgd:8,block=64").block
        ('qsgd:4bit', False, 64)
    """

    name: ClassVar[str] = "qsgd"
    value: ClassVar[str | None] = "bits"
    unit: ClassVar[str] = "bit"
    random: ClassVar[bool] = True

    bits: int
    feedback: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise UserError(f"bits: got {self.bits}, expected 4 or 8, because codes of other widths save no bytes")

    def _code_bits(self) -> int:
        """Return the number of bits of a code."""
        return self.bits
