"""Action: one cell of a pipeline schedule, a pass of one microbatch through one stage.

The text form is PyTorch's: `0F3` is the forward of microbatch 3 on stage 0. The kind `U`, the update of an asynchronous
schedule, does not exist in PyTorch.
"""

import enum
import re
from typing import NamedTuple

from jaxscale.errors import UserError


class Kind(enum.StrEnum):
    """The kind of an action."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: the input gradient and the weight gradient together."""
    I = "I"  # noqa: E741 - the letter of the zero-bubble papers and of PyTorch
    """Backward for the input: the input gradient alone, which the previous stage waits for."""
    W = "W"
    """Backward for the weights: the weight gradient alone, which no stage waits for."""
    U = "U"
    """Update of a stage's weights inside the schedule; only asynchronous schedules have updates."""


KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds of passes: all kinds but U. Searches encode a kind as its index in this tuple."""
GRADIENT = (Kind.B, Kind.I)
"""The kinds that compute the input gradient."""

_CELL = re.compile(r"(\d+)([FBIWU])(\d+)")


class Action(NamedTuple):
    """One pass of a microbatch through a stage.

    Args:
        kind: kind of the pass.
        stage: index of the stage, from 0; stage 0 has the embedding.
        microbatch: index of the microbatch, from 0. For `U`, the last microbatch whose gradient is in the update.

    Example:
        >>> str(Action(Kind.F, stage=0, microbatch=3))
        '0F3'
        >>> Action.parse("7B12")
        Action(kind=<Kind.B: 'B'>, stage=7, microbatch=12)
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the text form of an action, such as `0F3`, the forward of microbatch 3 on stage 0.

        Raises:
            UserError: the text does not consist of a stage, one of the letters F, B, I, W and U, and a microbatch.
        """
        match = _CELL.fullmatch(text)
        if not match:
            raise UserError(f"got {text!r}, expected an action such as 0F3: a stage, one of F B I W U, a microbatch")
        stage, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch))
