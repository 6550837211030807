"""Every order of a small pipeline, which defines the fastest schedule: the reference for `search.py`.

Passes of one kind come in the order of microbatches, which all take equally long, so that no other order is faster; a
backward is one action or two. Two ranks have some ten thousand orders of three microbatches, and a million orders of
four.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.many_orders import BatchClock
from jaxscale.pipeline.orders import Action, Kind

_BATCH = 20_000  # schedules that are timed at once
_FEW = 30_000  # schedules that are timed in a tenth of a second
_FEW_PASSES = 6
"""The most forwards, of all stages together, with which schedules may be few; one rank alone could have more."""


def orders(stage: int, microbatches: int, most_activations: int) -> Iterator[tuple[Action, ...]]:
    """Yield every order of one stage's passes.

    Args:
        stage: number of the stage.
        microbatches: m, number of microbatches.
        most_activations: the most activations that may wait for a backward (or W) at once.

    Example:
        >>> [" ".join(map(str, order)) for order in orders(0, 1, 1)]
        ['0F0 0B0', '0F0 0I0 0W0']
    """

    def extend(order: tuple[Action, ...], f: int, g: int, pending: tuple[int, ...]) -> Iterator[tuple[Action, ...]]:
        """Yield all completions of an order with f forwards, g gradients and microbatches `pending` that wait for W."""
        waiting = f - sum(action.kind in (Kind.B, Kind.W) for action in order)
        if f == g == microbatches and not pending:
            yield order
        if f < microbatches and waiting < most_activations:
            yield from extend((*order, Action(Kind.F, stage, f)), f + 1, g, pending)
        if g < f:
            yield from extend((*order, Action(Kind.B, stage, g)), f, g + 1, pending)
            yield from extend((*order, Action(Kind.I, stage, g)), f, g + 1, (*pending, g))
        if pending:
            yield from extend((*order, Action(Kind.W, stage, pending[0])), f, g, pending[1:])

    return extend((), 0, 0, ())


def fastest(costs: Costs, microbatches: int, most_activations: int) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """Return the seconds and the orders of the fastest schedule with one stage per rank, on the neighbour machine.

    Args:
        costs: costs of the stages.
        microbatches: m, number of microbatches.
        most_activations: the most activations that a rank may hold.

    Example:
        >>> fastest(Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), 2, 2)[0]
        7.0
    """
    clock = BatchClock(costs, tuple(range(costs.stages)), costs.stages, microbatches)
    stage_orders = [list(orders(stage, microbatches, most_activations)) for stage in range(costs.stages)]
    number_tables = [np.stack([clock.numbers([order])[0] for order in candidates]) for candidates in stage_orders]
    # a choice has, for each stage, the index of its order among `stage_orders[stage]`
    best_seconds, best_choice = np.inf, (0,) * costs.stages
    choices = itertools.product(*(range(len(table)) for table in number_tables))
    while choice_batch := list(itertools.islice(choices, _BATCH)):
        indices = np.array(choice_batch).T
        order_batch = np.stack([table[index] for table, index in zip(number_tables, indices, strict=True)], 1)
        seconds = clock.seconds(order_batch)
        lowest_index = int(seconds.argmin())
        if seconds[lowest_index] < best_seconds:
            best_seconds, best_choice = float(seconds[lowest_index]), choice_batch[lowest_index]
    return float(best_seconds), tuple(options[index] for options, index in zip(stage_orders, best_choice, strict=True))


def are_few(stages: int, microbatches: int, most_activations: int) -> bool:
    """Return whether schedules with one stage per rank are so few that all are timed in a tenth of a second.

    Example:
        >>> are_few(2, 3, 3), are_few(2, 4, 4), are_few(8, 32, 8)
        (True, False, False)
    """
    if stages * microbatches > _FEW_PASSES:
        return False
    count = sum(1 for _ in itertools.islice(orders(0, microbatches, most_activations), _FEW + 1))
    return count**stages <= _FEW
