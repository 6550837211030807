"""Method: a named way to make a schedule; each file of `schedules/` defines one."""

import dataclasses
from collections.abc import Callable

from jaxscale.errors import UserError
from jaxscale.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Method:
    """A named way to make a schedule.

    Args:
        name: the word of the text form: `1f1b`.
        title: one line for tables and charts.
        make: the schedule of (ranks, microbatches), and of chunks where it interleaves; refuses by `UserError` what is
            not defined.
        chunks: stages a rank holds, where the method says; the default where `interleaves`.
        interleaves: whether the user may choose the chunks: `v=`.
        streams: whether one microbatch is an update (`pipedream:4`), so that none are counted in the text form.
        steps: whether weights are updated inside the schedule (asynchronous).
    """

    name: str
    title: str
    make: Callable[..., Schedule]
    chunks: int = 1
    interleaves: bool = False
    streams: bool = False
    steps: bool = False

    def schedule(self, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """The schedule for so many devices and microbatches.

        Raises:
            UserError: numbers for which the method is not defined, with those for which it is.
        """
        for what, number in (("devices", ranks), ("microbatches", microbatches)):
            if number < 1:
                raise UserError(f"schedule {self.name}: got {number} {what}, expected 1 or more")
        if chunks is not None and not self.interleaves and chunks != self.chunks:
            raise UserError(
                f"schedule {self.name}: got v={chunks}, expected none: each device holds {self.chunks} of its stages; "
                "choose v with interleaved or lockstep"
            )
        if self.interleaves:
            return self.make(ranks, microbatches, self.chunks if chunks is None else chunks)
        return self.make(ranks, microbatches)
