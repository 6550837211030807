"""Clock: one schedule under many costs at once, as the neighbour machine of `simulate.py` runs it.

A partition tries thousands of costs. The ticks of a schedule do not depend on the seconds of its passes, so its table
is made once and timed for a whole batch of costs. The time is a maximum of sums along paths through the table; `path`
returns the longest path, as the number of times that it meets each pass and each link: a linear function of the costs
that is never above the true seconds, and equals them for the costs of that path.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.schedule import Kind, Schedule
from jaxscale.pipeline.ticks import rows


class Path(NamedTuple):
    """The longest path: the passes and messages that decide when a schedule ends.

    Args:
        seconds: from the first start to the last end.
        passes: how often each of `Clock.passes` is on it.
        links: how often each link is on it.
    """

    seconds: float
    passes: np.ndarray
    links: np.ndarray


class Clock:
    """The ticks of a schedule, ready to be timed.

    Args:
        schedule: the actions of each rank.

    Raises:
        UserError: a message between ranks that are no neighbours on the ring.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> clock = Clock(METHODS["1f1b"].schedule(4, 8))
        >>> seconds = [[{"F": 1.0, "B": 2.0}[kind.value] for kind, _ in clock.passes]]
        >>> clock.seconds(np.array(seconds), np.zeros((1, 4))).tolist()
        [40.0]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        table = rows(schedule)
        self.passes: tuple[tuple[Kind, int], ...] = tuple(
            sorted({(action.kind, action.stage) for order in schedule.orders for action in order})
        )
        number = {key: index for index, key in enumerate(self.passes)}
        idle = len(self.passes)
        self._table = np.full((len(table), schedule.ranks), idle)
        for tick, row in enumerate(table):
            for rank, action in enumerate(row):
                if action is not None:
                    self._table[tick, rank] = number[action.kind, action.stage]
        self.crossings = _crossings(schedule)
        source = {action: tick for tick, row in enumerate(table) for action in row if action is not None}
        ranks = np.arange(schedule.ranks)
        self._neighbours = np.roll(ranks, 1), np.roll(ranks, -1)
        self._sends = np.zeros(len(table), bool)
        for action in source:
            for needed in schedule.inputs(action):
                if schedule.rank(needed) != schedule.rank(action):
                    self._sends[source[needed]] = True

    def seconds(self, passes: np.ndarray, links: np.ndarray) -> np.ndarray:
        """Seconds of the schedule under each of a batch of costs.

        Args:
            passes: float[batch, passes], seconds of each of `passes`.
            links: float[batch, ranks], seconds of a message between ranks r and r + 1.
        """
        return collections.deque(self._run(passes, links), maxlen=1)[0].max(0)

    def path(self, passes: np.ndarray, links: np.ndarray, blur: float = 0.0) -> Path:
        """The longest path under one set of costs, float[passes] and float[ranks].

        Args:
            passes: seconds of each of `passes`.
            links: seconds of each link.
            blur: seconds; of paths that differ by about as much, a mean instead of the longest. The mean changes less
                from one set of costs to the next, and is never above the true seconds either.
        """
        times = np.stack([moment[:, 0] for moment in self._run(passes[None], links[None])])
        left, right = self._neighbours
        # times[2 t + 1] is the end of tick t, times[2 t + 2] the end of its exchange
        ends = times[1::2]
        arrivals = np.stack([ends, ends[:, left] + links[left], ends[:, right] + links])
        from_self, from_left, from_right = _shares(arrivals, blur)
        shares, crossings = np.empty(ends.shape), np.zeros(self.schedule.ranks)
        share = _shares(times[-1][:, None], blur)[:, 0]
        for tick in range(len(ends) - 1, -1, -1):
            if self._sends[tick]:
                to_left, to_right = (from_left[tick] * share)[right], from_right[tick] * share
                crossings += to_left + to_right
                share = from_self[tick] * share + to_left + to_right[left]
            shares[tick] = share
        counts = np.bincount(self._table.ravel(), shares.ravel(), len(self.passes) + 1)
        return Path(float(times[-1].max()), counts[:-1], crossings)

    def _run(self, passes: np.ndarray, links: np.ndarray) -> Iterator[np.ndarray]:
        """Times [rank, batch] at the start, and after the passes and the exchange of each tick."""
        seconds = np.concatenate([passes.T, np.zeros((1, len(passes)))])
        left, right = self._neighbours
        links = np.ascontiguousarray(links.T)
        left_links = links[left]
        times = np.zeros(links.shape)
        yield times
        for row, sends in zip(self._table, self._sends, strict=True):
            times = times + seconds[row]
            yield times
            if sends:
                arrivals = times[left] + left_links
                np.maximum(arrivals, times, out=arrivals)
                times = np.maximum(arrivals, times[right] + links, out=arrivals)
            yield times


def _shares(times: np.ndarray, blur: float) -> np.ndarray:
    """Weights of the first dim, which add up to 1: all for the latest without a blur."""
    if not blur:
        return np.moveaxis(np.eye(len(times))[times.argmax(0)], -1, 0)
    weights = np.exp((times - times.max(0)) / blur)
    return weights / weights.sum(0)


def _crossings(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """(stage, link) of each message to the next stage that crosses a link; link r joins ranks r and r + 1."""
    crossings = set()
    for route in schedule.routes:
        for stage, (source, target) in enumerate(itertools.pairwise(route)):
            if source == target:
                continue
            if (target - source) % schedule.ranks not in (1, schedule.ranks - 1):
                raise UserError(
                    f"schedule {schedule.name}: stage {stage} on rank {source} sends to rank {target}, which is no "
                    f"neighbour on the ring of {schedule.ranks}; the executor sends to neighbours alone"
                )
            forward = (target - source) % schedule.ranks == 1 and (schedule.ranks > 2 or target > source)
            crossings.add((stage, source if forward else target))
    return tuple(sorted(crossings))
