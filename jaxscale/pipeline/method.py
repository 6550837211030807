"""Method: a named way to make a schedule. Each file of `schedules/` defines one method."""

import dataclasses
from collections.abc import Callable

from jaxscale.errors import UserError
from jaxscale.pipeline.orders import Schedule
from jaxscale.values.limits import MAX_SCHEDULE_FORWARDS, check_at_most


def _accept_all_numbers(ranks: int, microbatches: int, chunks: int) -> None:
    """Accept any numbers of ranks, microbatches and chunks."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A named way to make a schedule.

    Args:
        name: name in the text form of a plan, such as `1f1b`.
        title: description in one line, for tables and charts.
        make: function that makes the schedule from (ranks, microbatches). It also gets the keyword `chunks` if
            `interleaves` is true, and the keyword `updates` if `steps` is true.
        chunks: number of stages per rank; if `interleaves` is true, the default number.
        interleaves: whether the user may choose `chunks`, with `v=` in the text form.
        steps: whether the schedule is asynchronous: the weights are updated inside the schedule.
        streams: whether each microbatch has its own update. The text form then has no number of microbatches, for
            example `pipedream:4`.
        refuse: function of (ranks, microbatches, chunks) that raises UserError if `make` has no schedule for these
            numbers. It does not make the schedule.
    """

    name: str
    title: str
    make: Callable[..., Schedule]
    chunks: int = 1
    interleaves: bool = False
    steps: bool = False
    streams: bool = False
    refuse: Callable[[int, int, int], None] = _accept_all_numbers

    def check(self, ranks: int, microbatches: int, chunks: int | None = None) -> None:
        """Check the numbers of a schedule without making the schedule, because a large schedule takes long to make.

        Args:
            ranks: p, number of devices on the pipe axis.
            microbatches: m, number of microbatches per update of the weights.
            chunks: v, number of stages per device; `None`: the default of the method.

        Raises:
            UserError: the method is not defined for these numbers, or the schedule would be too large.

        Example:
            >>> from jaxscale.pipeline.schedules import METHODS
            >>> METHODS["1f1b"].check(2, 99_999_999)
            Traceback (most recent call last):
            jaxscale.errors.UserError: schedule 1f1b: forwards of its table: got 199,999,998, expected at most 524,288
        """
        count_of_noun = {"devices": ranks, "microbatches": microbatches}
        count_of_noun["stages per device"] = 1 if chunks is None else chunks
        for noun, count in count_of_noun.items():
            if count < 1:
                raise UserError(f"schedule {self.name}: got {count} {noun}, expected 1 or more")
        if chunks not in (None, self.chunks) and not self.interleaves:
            reason = f"each device holds {self.chunks} stages" if self.chunks > 1 else "a device holds one stage"
            raise UserError(f"schedule {self.name}: got v={chunks}, but {reason}; only interleaved and lockstep take v")
        if self.streams and microbatches != 1:
            raise UserError(
                f"schedule {self.name}: got {microbatches} microbatches per update, expected 1; 2bw takes more"
            )
        forward_count = ranks * microbatches * (chunks or self.chunks)
        check_at_most(f"schedule {self.name}: forwards of its table", forward_count, MAX_SCHEDULE_FORWARDS)
        self.refuse(ranks, microbatches, chunks or self.chunks)

    def schedule(self, ranks: int, microbatches: int, chunks: int | None = None, updates: int = 1) -> Schedule:
        """Make the schedule for given numbers of devices and microbatches.

        Args:
            ranks: p, number of devices on the pipe axis.
            microbatches: m, number of microbatches per update of the weights.
            chunks: v, number of stages per device; `None`: the default of the method.
            updates: number of updates of an asynchronous schedule.

        Raises:
            UserError: the method is not defined for these numbers; the message gives the expected numbers.

        Example:
            >>> from jaxscale.pipeline.schedules import METHODS
            >>> METHODS["interleaved"].schedule(4, 8, chunks=3).stages
            12
            >>> METHODS["2bw"].schedule(4, 8, updates=3).microbatches
            24
        """
        self.check(ranks, microbatches, chunks)
        if updates < 1:
            raise UserError(f"schedule {self.name}: got {updates} updates, expected 1 or more")
        if not self.steps and updates != 1:
            raise UserError(f"schedule {self.name}: got {updates} updates, expected 1: it is a synchronous schedule")
        return self.make(
            ranks,
            microbatches,
            **({"chunks": chunks or self.chunks} if self.interleaves else {}),
            **({"updates": updates} if self.steps else {}),
        )
