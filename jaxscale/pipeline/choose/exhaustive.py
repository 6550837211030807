"""The fastest schedule of a small pipeline, found by a trial of every order: the reference for `search.py`.

All microbatches take equally long. So there is a fastest order that runs the passes of each kind in the order of the
microbatches, and only such orders are tried. A backward is one action or two. Two ranks have about ten thousand
schedules of three microbatches, and a million schedules of four microbatches.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.many_orders import BatchClock
from jaxscale.pipeline.orders import Action, Kind

_BATCH_SIZE = 20_000  # number of schedules that are timed at once
_FEW_SCHEDULES = 30_000  # number of schedules that are timed in a tenth of a second
_FEW_FORWARDS = 6
"""With more forwards than this in all stages together, `has_few_schedules` returns False without counting orders."""


def all_orders(stage: int, microbatches: int, max_activations: int) -> Iterator[tuple[Action, ...]]:
    """Yield every order of one stage's passes.

    Args:
        stage: index of the stage.
        microbatches: m, number of microbatches.
        max_activations: the most activations that may wait for a B or W at once.

    Example:
        >>> [" ".join(map(str, order)) for order in all_orders(0, 1, 1)]
        ['0F0 0B0', '0F0 0I0 0W0']
    """

    def completions(
        order: tuple[Action, ...], f: int, g: int, pending: tuple[int, ...]
    ) -> Iterator[tuple[Action, ...]]:
        """Yield all complete orders that start with `order`.

        Args:
            order: the actions so far.
            f: number of forwards in `order`.
            g: number of input gradients in `order`.
            pending: microbatches that have an I but no W in `order`.
        """
        activation_count = f - sum(action.kind in (Kind.B, Kind.W) for action in order)
        if f == g == microbatches and not pending:
            yield order
        if f < microbatches and activation_count < max_activations:
            yield from completions((*order, Action(Kind.F, stage, f)), f + 1, g, pending)
        if g < f:
            yield from completions((*order, Action(Kind.B, stage, g)), f, g + 1, pending)
            yield from completions((*order, Action(Kind.I, stage, g)), f, g + 1, (*pending, g))
        if pending:
            yield from completions((*order, Action(Kind.W, stage, pending[0])), f, g, pending[1:])

    return completions((), 0, 0, ())


def fastest_orders(
    costs: Costs, microbatches: int, max_activations: int
) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """Return (seconds, orders) of the schedule that is fastest on the `neighbour` machine, with one stage per rank.

    Args:
        costs: costs of the stages.
        microbatches: m, number of microbatches.
        max_activations: the most activations that a rank may hold.

    Example:
        >>> fastest_orders(Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), 2, 2)[0]
        7.0
    """
    clock = BatchClock(costs, tuple(range(costs.stages)), costs.stages, microbatches)
    stage_orders = [list(all_orders(stage, microbatches, max_activations)) for stage in range(costs.stages)]
    # for each stage, int[order, max_passes + 1], the pass numbers of its orders
    stage_rows = [
        np.stack([clock.pass_numbers([order])[0] for order in orders_of_stage]) for orders_of_stage in stage_orders
    ]
    # a choice has, for each stage, the index of its order among `stage_orders[stage]`
    best_seconds, best_choice = np.inf, (0,) * costs.stages
    choices = itertools.product(*(range(len(rows)) for rows in stage_rows))
    while choice_batch := list(itertools.islice(choices, _BATCH_SIZE)):
        indices_by_stage = np.array(choice_batch).T
        row_batch = np.stack([rows[indices] for rows, indices in zip(stage_rows, indices_by_stage, strict=True)], 1)
        seconds = clock.seconds(row_batch)
        lowest_index = int(seconds.argmin())
        if seconds[lowest_index] < best_seconds:
            best_seconds, best_choice = float(seconds[lowest_index]), choice_batch[lowest_index]
    return float(best_seconds), tuple(
        orders_of_stage[index] for orders_of_stage, index in zip(stage_orders, best_choice, strict=True)
    )


def has_few_schedules(stage_count: int, microbatch_count: int, max_activations: int) -> bool:
    """Return whether there are few enough schedules with one stage per rank to time all of them in 0.1 s.

    Example:
        >>> has_few_schedules(2, 3, 3), has_few_schedules(2, 4, 4), has_few_schedules(8, 32, 8)
        (True, False, False)
    """
    if stage_count * microbatch_count > _FEW_FORWARDS:
        return False
    order_count = sum(1 for _ in itertools.islice(all_orders(0, microbatch_count, max_activations), _FEW_SCHEDULES + 1))
    return order_count**stage_count <= _FEW_SCHEDULES
