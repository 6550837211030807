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
        make: from (ranks, microbatches), chunks if it interleaves, and updates if it steps, to the schedule.
        chunks: stages a rank holds; the default of v if `interleaves`.
        interleaves: whether the user may choose `chunks`: `v=`.
        steps: whether the weights are updated inside the schedule (asynchronous).
        streams: whether each microbatch is an update, so the text form has no microbatches: `pipedream:4`.
    """

    name: str
    title: str
    make: Callable[..., Schedule]
    chunks: int = 1
    interleaves: bool = False
    steps: bool = False
    streams: bool = False

    def schedule(self, ranks: int, microbatches: int, chunks: int | None = None, updates: int = 1) -> Schedule:
        """The schedule for some devices and microbatches.

        Args:
            ranks: p, devices on the pipe axis.
            microbatches: m, per update of the weights.
            chunks: v, stages a device; `None`: the method's.
            updates: number of updates of an asynchronous schedule.

        Raises:
            UserError: numbers for which the method is not defined; the message has the expected ones.

        Example:
            >>> from jaxscale.pipeline.schedules import METHODS
            >>> METHODS["interleaved"].schedule(4, 8, chunks=3).stages
            12
            >>> METHODS["2bw"].schedule(4, 8, updates=3).microbatches
            24
        """
        counts = {"devices": ranks, "microbatches": microbatches, "updates": updates}
        counts["stages a device"] = 1 if chunks is None else chunks
        for noun, number in counts.items():
            if number < 1:
                raise UserError(f"schedule {self.name}: got {number} {noun}, expected 1 or more")
        if chunks not in (None, self.chunks) and not self.interleaves:
            rule = f"each device holds {self.chunks} of its stages" if self.chunks > 1 else "a device holds one stage"
            raise UserError(f"schedule {self.name}: got v={chunks}, but {rule}; interleaved and lockstep take v")
        if self.streams and microbatches != 1:
            raise UserError(
                f"schedule {self.name}: got {microbatches} microbatches per update, expected 1; 2bw has more"
            )
        if not self.steps and updates != 1:
            raise UserError(f"schedule {self.name}: got {updates} updates, expected 1: it is synchronous")
        return self.make(
            ranks,
            microbatches,
            **({"chunks": chunks or self.chunks} if self.interleaves else {}),
            **({"updates": updates} if self.steps else {}),
        )
