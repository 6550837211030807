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
_FEW = 30_000
_FEW_PASSES = 6
"""Forwards of all stages: with more, there are more orders than `_FEW`, but for one rank."""


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


def fastest(costs: Costs, microbatches: int, most: int) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """Seconds and passes of the fastest of all orders of one stage a rank, on the neighbour machine.

    Args:
        costs: of the stages.
        microbatches: m.
        most: activations that a rank may hold.

    Example:
        >>> fastest(Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), 2, 2)[0]
        7.0
    """
    clock = BatchClock(costs, tuple(range(costs.stages)), costs.stages, microbatches)
    named = [list(orders(stage, microbatches, most)) for stage in range(costs.stages)]
    tables = [np.stack([clock.numbers([order])[0] for order in own]) for own in named]
    best, chosen = np.inf, (0,) * costs.stages
    choices = itertools.product(*(range(len(table)) for table in tables))
    while chunk := list(itertools.islice(choices, _BATCH)):
        picked = np.array(chunk).T
        together = np.stack([table[index] for table, index in zip(tables, picked, strict=True)], 1)
        seconds = clock.seconds(together)
        first = int(seconds.argmin())
        if seconds[first] < best:
            best, chosen = float(seconds[first]), chunk[first]
    return float(best), tuple(own[index] for own, index in zip(named, chosen, strict=True))


def few(stages: int, microbatches: int, most: int) -> bool:
    """Whether all orders of one stage a rank are timed in a tenth of a second.

    Example:
        >>> few(2, 3, 3), few(2, 4, 4), few(8, 32, 8)
        (True, False, False)
    """
    if stages * microbatches > _FEW_PASSES:
        return False
    one = sum(1 for _ in itertools.islice(orders(0, microbatches, most), _FEW + 1))
    return one**stages <= _FEW
