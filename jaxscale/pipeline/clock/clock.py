"""Clock: the ticks of a schedule, ready to be timed on the neighbour machine under many costs at once.

On the neighbour machine (`simulate.py`) a rank waits, after a tick with any message, for the messages of both its
neighbours on the ring. The ticks of a schedule do not depend on the seconds of its passes, so its table is made once
and timed for a whole batch of costs: a partition tries thousands. The time is a maximum of sums along paths through the
table; `path` returns the longest path, as the number of times that it meets each pass and each link: a linear function
of the costs that is never above the true seconds, and equals them for the costs of that path.
"""

import collections
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.clock.table import TickTable
from jaxscale.pipeline.orders import Schedule


class LongestPath(NamedTuple):
    """The longest path: the passes and messages that decide when a schedule ends.

    Args:
        seconds: seconds from the first start to the last end.
        passes: float[passes], how often each of `Clock.passes` is on the path.
        links: float[ranks], how often each link is on the path.
    """

    seconds: float
    passes: np.ndarray
    links: np.ndarray


class Clock:
    """The table of a schedule (`TickTable`, with its `passes` and `crossings`), ready to be timed.

    Args:
        schedule: the actions of each rank, in order.

    Raises:
        UserError: the schedule has a message between ranks that are not neighbours on the ring.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> clock = Clock(METHODS["1f1b"].schedule(4, 8))
        >>> seconds = [[{"F": 1.0, "B": 2.0}[kind.value] for kind, _ in clock.passes]]
        >>> clock.seconds(np.array(seconds), np.zeros((1, 4))).tolist()
        [40.0]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        table = TickTable(schedule)
        self.passes, self.crossings = table.passes, table.crossings
        self._table, self._sends = np.array(table.rows), table.sends
        ranks = np.arange(schedule.ranks)  # the left and the right neighbour of each rank follow
        self._neighbours = np.roll(ranks, 1), np.roll(ranks, -1)

    def seconds(self, pass_seconds: np.ndarray, link_seconds: np.ndarray) -> np.ndarray:
        """Return float[batch]: seconds of the schedule under each of a batch of costs.

        Args:
            pass_seconds: float[batch, passes], seconds of each of `self.passes`.
            link_seconds: float[batch, ranks], seconds of a message between ranks r and r + 1.
        """
        # of all moments that `_run` yields, only the last is kept
        return collections.deque(self._run(pass_seconds, link_seconds), maxlen=1)[0].max(0)

    def path(self, pass_seconds: np.ndarray, link_seconds: np.ndarray, blur: float = 0.0) -> LongestPath:
        """Return the longest path under one set of costs.

        Args:
            pass_seconds: float[passes], seconds of each of `self.passes`.
            link_seconds: float[ranks], seconds of a message between ranks r and r + 1.
            blur: difference in seconds; 0: the longest path alone. Otherwise the result is a mean of the paths that
                are shorter than the longest by about this much or less. The mean changes less from one set of costs
                to the next, and it is never above the true seconds either.
        """
        times = np.stack([moment[:, 0] for moment in self._run(pass_seconds[None], link_seconds[None])])
        left, right = self._neighbours
        # times[2 r + 1] is the end of row r, times[2 r + 2] the end of its exchange
        ends = times[1::2]
        arrivals = np.stack([ends, ends[:, left] + link_seconds[left], ends[:, right] + link_seconds])
        self_shares, left_shares, right_shares = _shares(arrivals, blur)
        # from the last row to the first: the share of the paths that runs through each rank, and that crosses each link
        row_shares, link_shares = np.empty(ends.shape), np.zeros(self.schedule.ranks)
        rank_shares = _shares(times[-1][:, None], blur)[:, 0]
        for row in range(len(ends) - 1, -1, -1):
            if self._sends[row]:
                across_left, across_right = (left_shares[row] * rank_shares)[right], right_shares[row] * rank_shares
                link_shares += across_left + across_right
                rank_shares = self_shares[row] * rank_shares + across_left + across_right[left]
            row_shares[row] = rank_shares
        pass_counts = np.bincount(self._table.ravel(), row_shares.ravel(), len(self.passes) + 1)
        return LongestPath(float(times[-1].max()), pass_counts[:-1], link_shares)

    def _run(self, pass_seconds: np.ndarray, link_seconds: np.ndarray) -> Iterator[np.ndarray]:
        """Yield float[rank, batch], times of the ranks: at the start, after each row, after each row's exchange."""
        seconds_by_pass = np.concatenate([pass_seconds.T, np.zeros((1, len(pass_seconds)))])
        left, right = self._neighbours
        link_seconds = np.ascontiguousarray(link_seconds.T)
        left_seconds = link_seconds[left]
        times = np.zeros(link_seconds.shape)
        yield times
        for row, sends in zip(self._table, self._sends, strict=True):
            times = times + seconds_by_pass[row]
            yield times
            if sends:
                arrivals = times[left] + left_seconds
                np.maximum(arrivals, times, out=arrivals)
                times = np.maximum(arrivals, times[right] + link_seconds, out=arrivals)
            yield times


def _shares(times: np.ndarray, blur: float) -> np.ndarray:
    """Return weights like `times` that add up to 1 along the first dim: the later the time, the larger the weight."""
    if not blur:  # the latest time has all the weight
        return np.moveaxis(np.eye(len(times))[times.argmax(0)], -1, 0)
    weights = np.exp((times - times.max(0)) / blur)
    return weights / weights.sum(0)
