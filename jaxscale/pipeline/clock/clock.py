"""Clock: the seconds of a schedule on the `neighbour` machine, for many costs at once.

On the `neighbour` machine (`simulate.py`), after a tick with any message, a rank waits for the messages of both its
neighbors on the ring. The ticks of a schedule do not depend on the seconds of its passes. So the table of the schedule
is made once and then timed for a whole batch of costs; the search for a partition tries thousands of costs.

A path through the table takes the sum of the seconds of its passes and messages, and the schedule takes as long as the
longest path. The method `path` counts how often the longest path contains each pass and each link. These counts are the
coefficients of a linear function of the costs. The function is never above the true seconds. It equals the true seconds
for the costs for which the path is the longest.
"""

import collections
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.clock.table import TickTable
from jaxscale.pipeline.orders import Schedule


class LongestPath(NamedTuple):
    """The longest path: the passes and messages that determine when a schedule ends.

    Args:
        seconds: seconds from the first start to the last end.
        pass_counts: float[passes], how often each pass of `Clock.passes` is on the path.
        link_counts: float[ranks], how often each link is on the path.
    """

    seconds: float
    pass_counts: np.ndarray
    link_counts: np.ndarray


class Clock:
    """The table of a schedule (`TickTable`), to be timed for many costs.

    Args:
        schedule: the actions of each rank, in order.

    Attributes:
        passes: (kind, stage) of every pass that occurs, as in `TickTable`.
        crossings: (stage, link) of each message to the next stage that crosses a link, as in `TickTable`.

    Raises:
        UserError: the schedule has a message between ranks that are not neighbors on the ring.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> clock = Clock(METHODS["1f1b"].schedule(4, 8))
        >>> seconds = [[{"F": 1.0, "B": 2.0}[kind.value] for kind, _ in clock.passes]]
        >>> clock.seconds(np.array(seconds), np.zeros((1, 4))).tolist()
        [40.0]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        tick_table = TickTable(schedule)
        self.passes, self.crossings = tick_table.passes, tick_table.crossings
        self._pass_index_rows, self._has_message = np.array(tick_table.rows), tick_table.has_message
        rank_indices = np.arange(schedule.ranks)
        # (left neighbor of each rank, right neighbor of each rank)
        self._neighbours = np.roll(rank_indices, 1), np.roll(rank_indices, -1)

    def seconds(self, pass_seconds: np.ndarray, link_seconds: np.ndarray) -> np.ndarray:
        """Return float[batch]: the seconds of the schedule for each entry of a batch of costs.

        Args:
            pass_seconds: float[batch, passes], seconds of each pass of `self.passes`.
            link_seconds: float[batch, ranks], seconds of a message between ranks r and r + 1.
        """
        # the deque keeps only the last times that `_rank_times` yields
        return collections.deque(self._rank_times(pass_seconds, link_seconds), maxlen=1)[0].max(0)

    def path(self, pass_seconds: np.ndarray, link_seconds: np.ndarray, blur: float = 0.0) -> LongestPath:
        """Return the longest path for one set of costs.

        Args:
            pass_seconds: float[passes], seconds of each pass of `self.passes`.
            link_seconds: float[ranks], seconds of a message between ranks r and r + 1.
            blur: difference in seconds. With 0 the result is the longest path alone. Otherwise the result is a mean of
                the paths that are shorter than the longest path by at most about this difference. If the costs change,
                the mean changes less than the longest path. The linear function of the mean is never above the true
                seconds either.
        """
        times = np.stack(
            [batch_times[:, 0] for batch_times in self._rank_times(pass_seconds[None], link_seconds[None])]
        )
        left_ranks, right_ranks = self._neighbours
        # times[2 r + 1] are the ends of row r, times[2 r + 2] the ends of its exchange
        ends = times[1::2]
        arrivals = np.stack([ends, ends[:, left_ranks] + link_seconds[left_ranks], ends[:, right_ranks] + link_seconds])
        self_shares, left_shares, right_shares = _shares(arrivals, blur)
        # from the last row to the first: the share of the paths that goes through each rank, or crosses each link
        row_shares, link_shares = np.empty(ends.shape), np.zeros(self.schedule.ranks)
        rank_shares = _shares(times[-1][:, None], blur)[:, 0]
        for row in range(len(ends) - 1, -1, -1):
            if self._has_message[row]:
                left_crossing_shares, right_crossing_shares = (
                    (left_shares[row] * rank_shares)[right_ranks],
                    right_shares[row] * rank_shares,
                )
                link_shares += left_crossing_shares + right_crossing_shares
                rank_shares = self_shares[row] * rank_shares + left_crossing_shares + right_crossing_shares[left_ranks]
            row_shares[row] = rank_shares
        pass_counts = np.bincount(self._pass_index_rows.ravel(), row_shares.ravel(), len(self.passes) + 1)
        return LongestPath(float(times[-1].max()), pass_counts[:-1], link_shares)

    def _rank_times(self, pass_seconds: np.ndarray, link_seconds: np.ndarray) -> Iterator[np.ndarray]:
        """Yield float[rank, batch], the time of each rank: at the start, and after each row and each row's exchange."""
        padded_pass_seconds = np.concatenate([pass_seconds.T, np.zeros((1, len(pass_seconds)))])  # float[pass, batch]
        left_ranks, right_ranks = self._neighbours
        right_link_seconds = np.ascontiguousarray(link_seconds.T)  # float[rank, batch]
        left_link_seconds = right_link_seconds[left_ranks]
        times = np.zeros(right_link_seconds.shape)
        yield times
        for pass_indices, has_message in zip(self._pass_index_rows, self._has_message, strict=True):
            times = times + padded_pass_seconds[pass_indices]
            yield times
            if has_message:
                arrivals = times[left_ranks] + left_link_seconds
                np.maximum(arrivals, times, out=arrivals)
                times = np.maximum(arrivals, times[right_ranks] + right_link_seconds, out=arrivals)
            yield times


def _shares(times: np.ndarray, blur: float) -> np.ndarray:
    """Return weights in the shape of `times`. They add up to 1 along the first dim, and later times weigh more."""
    if not blur:  # the latest time has all the weight
        return np.moveaxis(np.eye(len(times))[times.argmax(0)], -1, 0)
    weights = np.exp((times - times.max(0)) / blur)
    return weights / weights.sum(0)
