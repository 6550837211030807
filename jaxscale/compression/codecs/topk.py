"""Top-k: the largest elements of each gradient, the rest later (Aji and Heafield, 2017, arXiv:1704.05021).

At 1 % 68 times fewer bytes between two replicas, 17 times between eight: each hears from all others. How many are kept
tells more than feedback does in short runs. Momentum correction, clipping and warm-up: `dgc`.
"""

import dataclasses
from typing import ClassVar

from jaxscale.compression.largest import Kept, Largest
from jaxscale.compression.one_phase import OnePhase
from jaxscale.typing import Array, Float, Key


@dataclasses.dataclass(frozen=True)
class TopK(OnePhase):
    """The elements of largest magnitude, as float32 and their offsets.

    Args:
        fraction: of the elements that are sent, in (0, 1].
        block: elements of which each sends its largest; `None`: the largest of the whole leaf, by a sort.

    Example:
        >>> str(TopK(0.01)), str(TopK(0.001, block=None))
        ('topk:0.01', 'topk:0.001,block=none')
        >>> TopK(0.0001)
        Traceback (most recent call last):
        jaxscale.errors.UserError: fraction 0.0001 of blocks of 1024 is no element: give block=16384
    """

    name: ClassVar[str] = "topk"
    value: ClassVar[str | None] = "fraction"

    fraction: float
    block: int | None = dataclasses.field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        Largest(self.fraction, self.block)

    def encode(self, flat: Float[Array, "elements"], key: Key | None) -> Kept:
        """The largest, and where they lie."""
        return Largest(self.fraction, self.block).encode(flat)

    def decode(self, message: Kept, elements: int) -> Float[Array, "elements"]:
        """A leaf with them, and zeros."""
        return Largest(self.fraction, self.block).decode(message, elements)
