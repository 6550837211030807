"""MemoryPlan: what the backward pass keeps of each block's forward pass."""

import dataclasses
from typing import Literal, cast, get_args

from jaxscale.errors import unknown

Keep = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Rematerialization of every block, by its text form.

    Args:
        remat: "none" keeps every residual; "dots" keeps the results of matrix products and recomputes what lies
            between; "full" keeps each block's input alone and recomputes the block.

    Example:
        >>> str(MemoryPlan.parse("full"))
        'full'
    """

    remat: Keep = "none"

    def __post_init__(self) -> None:
        if self.remat not in get_args(Keep):
            raise unknown("memory plan", str(self.remat), get_args(Keep))

    @classmethod
    def parse(cls, text: str) -> "MemoryPlan":
        """The plan of its text form."""
        return cls(cast(Keep, text.strip()))

    def __str__(self) -> str:
        return self.remat
