"""Four bits an element, two in a byte, 7.7 times fewer bytes: int8's scheme with 15 levels."""

import dataclasses
from typing import ClassVar

from jaxscale.replicas.block_codes import BlockCodes


@dataclasses.dataclass(frozen=True)
class Int4(BlockCodes):
    """Nearest of 15 levels, a float32 scale for each block.

    Args:
        block: elements that share a scale.

    Example:
        >>> Int4().wire_bytes((1024, 1024), n=8) / 2**20
        0.90234375
    """

    name: ClassVar[str] = "int4"

    @property
    def width(self) -> int:
        """Four."""
        return 4
