"""Phases: the ticks of a lock-step table as few loops, so that a program without branches stays short.

A phase repeats a motif, a short sequence of codes of kinds, such as a forward and a backward.
"""

from jaxscale.pipeline.run.tables import Tables

_LONGEST = 6
"""The most ticks of a motif: F I W needs 3, and interleaving no more."""


def phases(tables: Tables) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the phases in order, as (motif, number of repetitions): FFFF BFBFBF BB is ((F), 4), ((B, F), 3), ((B), 2).

    Args:
        tables: tables whose ticks are of one kind each.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.run.tables import tabulate
        >>> phases(tabulate(METHODS["gpipe"].schedule(4, 8)))
        (((1,), 11), ((2,), 11))
    """
    kinds = tuple(int(row.max()) for row in tables.columns["kind"])
    motifs_and_repeats, start = [], 0
    while start < len(kinds):
        # the motif that covers most ticks by repetition; if none repeats, a single kind
        motif, repeats = max(
            ((kinds[start : start + width], _count_repeats(kinds, start, width)) for width in range(1, _LONGEST + 1)),
            key=lambda phase: len(phase[0]) * phase[1] if phase[1] > 1 else len(phase[0]) == 1,
        )
        motifs_and_repeats.append((motif, repeats))
        start += len(motif) * repeats
    return tuple(motifs_and_repeats)


def _count_repeats(kinds: tuple[int, ...], start: int, width: int) -> int:
    """Return how often the motif of `width` kinds at `start` occurs in a row."""
    motif, repeats = kinds[start : start + width], 1
    while kinds[start + repeats * width : start + (repeats + 1) * width] == motif:
        repeats += 1
    return repeats
