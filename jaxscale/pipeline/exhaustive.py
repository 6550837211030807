"""Every order of a small pipeline: the definition of the fastest schedule, which `search.py` is held against.

Microbatches of one kind come in order (they are alike, so that another order of them is no faster); a backward is one
action or two. Two ranks and three microbatches have some ten thousand orders, four microbatches a million.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxscale.pipeline.batch_clock import BatchClock
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.schedule import Action, Kind

_BATCH = 20_000


def orders(stage: int, microbatches: int, most: int) -> Iterator[tuple[Action, ...]]:
    """Every order of one stage's passes.

    Args:
        stage: whose.
        microbatches: m.
        most: activations that may wait for a backward (or W) at once.

    Example:
        >>> [" ".join(map(str, order)) for order in orders(0, 1, 1)]
        ['0F0 0B0', '0F0 0I0 0W0']
    """

    def extend(done: tuple[Action, ...], f: int, g: int, apart: tuple[int, ...]) -> Iterator[tuple[Action, ...]]:
        waiting = f - sum(action.kind in (Kind.B, Kind.W) for action in done)
        if f == g == microbatches and not apart:
            yield done
        if f < microbatches and waiting < most:
            yield from extend((*done, Action(Kind.F, stage, f)), f + 1, g, apart)
        if g < f:
            yield from extend((*done, Action(Kind.B, stage, g)), f, g + 1, apart)
            yield from extend((*done, Action(Kind.I, stage, g)), f, g + 1, (*apart, g))
        if apart:
            yield from extend((*done, Action(Kind.W, stage, apart[0])), f, g, apart[1:])

    return extend((), 0, 0, ())


def fastest(costs: Costs, microbatches: int, most: int) -> float:
    """Seconds of the fastest of all orders of one stage a rank, on the neighbour machine.

    Args:
        costs: of the stages.
        microbatches: m.
        most: activations that a rank may hold.

    Example:
        >>> fastest(Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), 2, 2)
        7.0
    """
    clock = BatchClock(costs, tuple(range(costs.stages)), costs.stages, microbatches)
    tables = [
        np.stack([clock.numbers([order])[0] for order in orders(stage, microbatches, most)])
        for stage in range(costs.stages)
    ]
    best = np.inf
    choices = itertools.product(*(range(len(table)) for table in tables))
    while chunk := list(itertools.islice(choices, _BATCH)):
        chosen = np.array(chunk).T
        together = np.stack([table[index] for table, index in zip(tables, chosen, strict=True)], 1)
        best = min(best, float(clock.seconds(together).min()))
    return float(best)
