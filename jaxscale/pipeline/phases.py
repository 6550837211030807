"""Phases: the ticks of a lock-step table as few loops, so that a program without branches stays short."""

from jaxscale.pipeline.tables import Tables

_LONGEST = 6
"""Ticks of a motif that is looked for, at most: F I W needs 3, and interleaving no more."""


def phases(tables: Tables) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(kinds, repeats) in order: FFFF BFBFBF BB is ((F), 4), ((B, F), 3), ((B), 2).

    Args:
        tables: with ticks of one kind each.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.tables import tabulate
        >>> phases(tabulate(METHODS["gpipe"].schedule(4, 8)))
        (((1,), 11), ((2,), 11))
    """
    kinds = tuple(int(row.max()) for row in tables.columns["kind"])
    found = []
    start = 0
    while start < len(kinds):
        motif, repeats = max(
            ((kinds[start : start + width], _repeats(kinds, start, width)) for width in range(1, _LONGEST + 1)),
            key=lambda one: len(one[0]) * one[1] if one[1] > 1 else len(one[0]) == 1,
        )
        found.append((motif, repeats))
        start += len(motif) * repeats
    return tuple(found)


def _repeats(kinds: tuple[int, ...], start: int, width: int) -> int:
    motif, repeats = kinds[start : start + width], 1
    while kinds[start + repeats * width : start + (repeats + 1) * width] == motif:
        repeats += 1
    return repeats
