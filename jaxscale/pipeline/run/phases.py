"""Phases: the division of a lock-step table's ticks into a few loops, so that a program without branches stays short.

A phase repeats a motif: a short sequence of the codes of kinds, such as those of a forward and a backward.
"""

from jaxscale.pipeline.run.tables import Tables

_MAX_MOTIF_TICKS = 6
"""The most ticks in a motif. The motif F I W has 3, and interleaved schedules need no more."""


def phases(tables: Tables) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return (motif, number of repetitions) of each phase, in order.

    For the ticks FFFF BFBFBF BB the phases are ((F), 4), ((B, F), 3), ((B), 2).

    Args:
        tables: lock-step tables: all actions of a tick have the same kind.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.run.tables import tabulate
        >>> phases(tabulate(METHODS["gpipe"].schedule(4, 8)))
        (((1,), 11), ((2,), 11))
    """
    codes = tuple(int(row.max()) for row in tables.columns["kind"])  # for each tick, the code of its kind
    phase_list, start = [], 0
    while start < len(codes):
        # choose the motif whose repetitions cover the most ticks; if no motif repeats, a single code
        candidate_phases = (
            (codes[start : start + length], _repeat_count(codes, start, length))
            for length in range(1, _MAX_MOTIF_TICKS + 1)
        )
        motif, repeat_count = max(
            candidate_phases, key=lambda phase: len(phase[0]) * phase[1] if phase[1] > 1 else len(phase[0]) == 1
        )
        phase_list.append((motif, repeat_count))
        start += len(motif) * repeat_count
    return tuple(phase_list)


def _repeat_count(codes: tuple[int, ...], start: int, length: int) -> int:
    """Return how many times in a row the motif of `length` codes at index `start` occurs: at least 1."""
    motif, repeat_count = codes[start : start + length], 1
    while codes[start + repeat_count * length : start + (repeat_count + 1) * length] == motif:
        repeat_count += 1
    return repeat_count
