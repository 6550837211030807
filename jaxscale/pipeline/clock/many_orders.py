"""Many orders of one pipeline, timed at once on the neighbour machine, for a search through schedules.

An order is a row of numbers, one for each pass; all orders of a batch go through their ticks together, by the rule of
`pipeline/ticks.py` (an action takes the first tick in which its rank is free and its inputs are there) and the time of
`simulate.py` (after a tick with a message, neighbours wait for each other).
"""

from collections.abc import Sequence

import numpy as np

from jaxscale.pipeline.action import KINDS, Action
from jaxscale.pipeline.clock.costs import Costs

RankOrder = Sequence[Action]
"""The actions of one rank, in order."""


class BatchClock:
    """A clock for all schedules of one route under one set of costs.

    Args:
        costs: costs of the stages and links.
        route: the rank of each stage.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["1f1b"].schedule(4, 8)
        >>> clock = BatchClock(Costs.alike(schedule), schedule.routes[0], 4, 8)
        >>> clock.seconds(np.stack([clock.numbers(schedule.orders)] * 2)).tolist()
        [40.0, 40.0]
    """

    def __init__(self, costs: Costs, route: tuple[int, ...], ranks: int, microbatches: int) -> None:
        stages = len(route)
        self.ranks, self.microbatches, self.stages = ranks, microbatches, stages
        # the most passes of a rank, with every backward split
        self.length = 3 * microbatches * max(route.count(rank) for rank in range(ranks))
        self.links = np.array(costs.links or (0.0,) * ranks)
        self.end = len(KINDS) * stages * microbatches  # stands for no pass, behind the end of an order
        # the kind, stage and microbatch of each pass number
        kind_of, stage_of, microbatch_of = np.unravel_index(np.arange(self.end), (len(KINDS), stages, microbatches))
        # an event is the end of a forward or input gradient of a stage and microbatch; event 0 stands for no input
        forward_event = 1 + stage_of * microbatches + microbatch_of
        gradient_event = forward_event + stages * microbatches
        self._events = 1 + 2 * stages * microbatches
        is_forward, is_weight = kind_of == 0, kind_of == 3
        needs_previous, needs_next = is_forward & (stage_of > 0), (kind_of == 1) | (kind_of == 2)
        input_events = np.where(needs_previous, forward_event - microbatches, 0)
        input_events = np.where(needs_next & (stage_of < stages - 1), gradient_event + microbatches, input_events)
        result_events = np.where(is_forward, forward_event, gradient_event)
        seconds = np.array([[costs.seconds(kind, stage) for stage in range(stages)] for kind in KINDS])
        rank_of_stage = np.array(route)
        target_stage = np.where(is_forward, np.minimum(stage_of + 1, stages - 1), np.maximum(stage_of - 1, 0))
        # the last entry stands for the end of an order: its input never arrives
        self._input_events = np.append(input_events, self._events + 1)
        self._result_events = np.append(np.where(is_weight, self._events, result_events), self._events)
        self._pass_seconds = np.append(seconds[kind_of, stage_of], 0.0)
        self._sends = np.append(~is_weight & (rank_of_stage[target_stage] != rank_of_stage[stage_of]), False)

    def numbers(self, orders: Sequence[RankOrder]) -> np.ndarray:
        """int[rank, length + 1]: the orders of a schedule as pass numbers."""
        numbers = np.full((self.ranks, self.length + 1), self.end)
        for rank, order in enumerate(orders):
            for position, (kind, stage, microbatch) in enumerate(order):
                numbers[rank, position] = (KINDS.index(kind) * self.stages + stage) * self.microbatches + microbatch
        return numbers

    def seconds(self, orders: np.ndarray) -> np.ndarray:
        """float[batch]: seconds of each schedule, infinite if an action waits for ever.

        Args:
            orders: int[batch, rank, length + 1], the pass numbers of each schedule. Within a rank a pass must follow
                the passes of its own stage and microbatch that it needs.
        """
        batch_size = len(orders)
        flat_orders = orders.reshape(-1)
        order_starts = np.arange(batch_size * self.ranks).reshape(batch_size, self.ranks) * orders.shape[2]
        position = order_starts.copy()
        event_count = self._events + 2
        first_event = np.arange(batch_size)[:, None] * event_count
        event_ticks = np.full(batch_size * event_count, np.iinfo(np.int64).max)
        event_ticks[first_event[:, 0]] = -1
        left, right = np.roll(np.arange(self.ranks), 1), np.roll(np.arange(self.ranks), -1)
        left_links = self.links[left]
        times, tick = np.zeros((batch_size, self.ranks)), 0
        while True:
            passes = flat_orders[position]
            is_ready = event_ticks[first_event + self._input_events[passes]] < tick
            if not is_ready.any():
                break
            events = (first_event + self._result_events[passes])[is_ready]
            event_ticks[events] = tick
            event_ticks[first_event[:, 0] + self._events] = tick
            times += np.where(is_ready, self._pass_seconds[passes], 0.0)
            arrivals = np.maximum(times, np.maximum(times[:, left] + left_links, times[:, right] + self.links))
            has_message = np.any(is_ready & self._sends[passes], axis=1)
            times = np.where(has_message[:, None], arrivals, times)
            position += is_ready
            tick += 1
        is_finished = np.all(flat_orders[position] == self.end, axis=1)
        return np.where(is_finished, times.max(1), np.inf)
