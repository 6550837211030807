"""Many schedules of one pipeline, timed at once on the `neighbour` machine, for a search through schedules.

An order is a row of pass numbers; the number of a pass encodes its kind, stage and microbatch. All schedules of a batch
go through their ticks together. As in `pipeline/ticks.py`, an action runs in the first tick in which its rank is free
and its inputs have arrived. As in `simulate.py`, neighbors wait for each other after a tick with a message.
"""

from collections.abc import Sequence

import numpy as np

from jaxscale.pipeline.action import KINDS, Action
from jaxscale.pipeline.clock.costs import Costs

RankOrder = Sequence[Action]
"""The actions of one rank, in order."""


class BatchClock:
    """A clock for all schedules that assign the same stages to the same ranks, for one set of costs.

    Args:
        costs: costs of the stages and links.
        route: the rank of each stage.
        ranks: p, number of ranks.
        microbatches: m, number of microbatches.

    Attributes:
        stages: number of stages.
        max_passes: the most passes that a rank may have: their number if every backward is split.
        end: the pass number that pads an order after its last pass.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["1f1b"].schedule(4, 8)
        >>> clock = BatchClock(Costs.alike(schedule), schedule.routes[0], 4, 8)
        >>> clock.seconds(np.stack([clock.pass_numbers(schedule.orders)] * 2)).tolist()
        [40.0, 40.0]
    """

    def __init__(self, costs: Costs, route: tuple[int, ...], ranks: int, microbatches: int) -> None:
        stage_count = len(route)
        self.stages, self._ranks, self._microbatches = stage_count, ranks, microbatches
        self.max_passes = 3 * microbatches * max(route.count(rank) for rank in range(ranks))
        self._link_seconds = np.array(costs.links or (0.0,) * ranks)
        self.end = len(KINDS) * stage_count * microbatches
        # int[pass number]: kind, stage and microbatch; all arrays up to `result_events` are by pass number
        kind_of, stage_of, microbatch_of = np.unravel_index(
            np.arange(self.end), (len(KINDS), stage_count, microbatches)
        )
        # An event is the end of a forward or of an input gradient of one stage and microbatch. Event 0 stands for no
        # input, `_unread_event` for the end of a weight gradient, `_unread_event + 1` for an input that never arrives.
        forward_events = 1 + stage_of * microbatches + microbatch_of
        gradient_events = forward_events + stage_count * microbatches
        self._unread_event = 1 + 2 * stage_count * microbatches
        is_forward, is_input_gradient, is_weight_only = kind_of == 0, (kind_of == 1) | (kind_of == 2), kind_of == 3
        input_events = np.where(is_forward & (stage_of > 0), forward_events - microbatches, 0)
        input_events = np.where(
            is_input_gradient & (stage_of < stage_count - 1), gradient_events + microbatches, input_events
        )
        result_events = np.where(is_forward, forward_events, gradient_events)
        seconds_by_kind = np.array([[costs.seconds(kind, stage) for stage in range(stage_count)] for kind in KINDS])
        rank_of_stage = np.array(route)
        target_stages = np.where(is_forward, np.minimum(stage_of + 1, stage_count - 1), np.maximum(stage_of - 1, 0))
        # the last entry stands for the end of an order: its input never arrives
        self._input_events = np.append(input_events, self._unread_event + 1)
        self._result_events = np.append(np.where(is_weight_only, self._unread_event, result_events), self._unread_event)
        self._pass_seconds = np.append(seconds_by_kind[kind_of, stage_of], 0.0)
        self._has_message = np.append(
            ~is_weight_only & (rank_of_stage[target_stages] != rank_of_stage[stage_of]), False
        )

    def pass_numbers(self, orders: Sequence[RankOrder]) -> np.ndarray:
        """Return int[rank, max_passes + 1]: the pass numbers of a schedule's orders, padded with `end`."""
        pass_number_rows = np.full((self._ranks, self.max_passes + 1), self.end)
        for rank, order in enumerate(orders):
            for position, (kind, stage, microbatch) in enumerate(order):
                pass_number_rows[rank, position] = (
                    KINDS.index(kind) * self.stages + stage
                ) * self._microbatches + microbatch
        return pass_number_rows

    def seconds(self, orders: np.ndarray) -> np.ndarray:
        """Return float[batch]: seconds of each schedule, infinite if an action waits forever.

        Args:
            orders: int[batch, rank, max_passes + 1], the pass numbers of each schedule. In the order of a rank, a pass
                must come after the passes of the same stage and microbatch that it needs.
        """
        batch_size = len(orders)
        flat_orders = orders.reshape(-1)
        order_starts = np.arange(batch_size * self._ranks).reshape(batch_size, self._ranks) * orders.shape[2]
        positions = order_starts.copy()  # int[batch, rank], indices of the next passes in `flat_orders`
        event_count = self._unread_event + 2
        first_events = np.arange(batch_size)[:, None] * event_count
        # the tick of each event of each schedule; the events of a schedule start at its entry of `first_events`
        event_ticks = np.full(batch_size * event_count, np.iinfo(np.int64).max)
        event_ticks[first_events[:, 0]] = -1
        left_ranks, right_ranks = np.roll(np.arange(self._ranks), 1), np.roll(np.arange(self._ranks), -1)
        left_link_seconds = self._link_seconds[left_ranks]
        times, tick = np.zeros((batch_size, self._ranks)), 0
        while True:
            pass_numbers = flat_orders[positions]
            is_ready = event_ticks[first_events + self._input_events[pass_numbers]] < tick
            if not is_ready.any():
                break
            events = (first_events + self._result_events[pass_numbers])[is_ready]
            event_ticks[events] = tick
            event_ticks[first_events[:, 0] + self._unread_event] = tick
            times += np.where(is_ready, self._pass_seconds[pass_numbers], 0.0)
            neighbour_arrivals = np.maximum(
                times[:, left_ranks] + left_link_seconds, times[:, right_ranks] + self._link_seconds
            )
            arrivals = np.maximum(times, neighbour_arrivals)
            has_message = np.any(is_ready & self._has_message[pass_numbers], axis=1)
            times = np.where(has_message[:, None], arrivals, times)
            positions += is_ready
            tick += 1
        is_finished = np.all(flat_orders[positions] == self.end, axis=1)
        return np.where(is_finished, times.max(1), np.inf)
