"""Axes: round numbers for their ticks, and curves thinned to the pixels that show them."""

import math
from itertools import pairwise

import numpy as np


def round_step(span: float, max_parts: float) -> float:
    """Return the distance of ticks that divides a span into at most `max_parts` parts: 1, 2 or 5 times a power of ten.

    Example:
        >>> round_step(33.0, 8), round_step(0.0049, 8)
        (5.0, 0.001)
    """
    least_step = span / max_parts
    power = math.floor(math.log10(least_step))
    return next(step for factor in (1, 2, 5, 10) if (step := float(f"{factor}e{power}")) >= least_step * (1 - 1e-9))


def ticks(low: float, high: float, max_intervals: float = 6) -> list[float]:
    """Return the round numbers between two bounds, with at most `max_intervals` intervals.

    Example:
        >>> ticks(0.0, 2000.0), ticks(1.43, 4.2)
        ([0.0, 500.0, 1000.0, 1500.0, 2000.0], [1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    """
    step = round_step(high - low, max_intervals)
    indices = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(f"{index * step:.15g}") for index in indices]


def byte_ticks(high: float) -> list[float]:
    """Return the multiples of a power of two from 0 up to `high` bytes, about 3 to 6 of them.

    Example:
        >>> byte_ticks(100)
        [0.0, 32.0, 64.0, 96.0]
    """
    step = 2.0 ** math.floor(math.log2(high / 3))
    return [multiple * step for multiple in range(int(high / step) + 1)]


def thin(steps: np.ndarray, values: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible points of a curve: the least and greatest value of each of `buckets` spans, and both ends.

    The points are two arrays of one length: their steps, then their values.

    Example:
        >>> steps, values = thin(np.arange(10_000), np.zeros(10_000), 500)
        >>> len(steps) <= 2 * 500 + 4
        True
    """
    if len(steps) <= 2 * buckets:
        return steps, values
    indices = {0, len(steps) - 1}
    for start, end in pairwise(np.linspace(0, len(steps), buckets + 1).astype(int).tolist()):
        # indices of the finite values, and of the least and the greatest of them
        finite = start + np.flatnonzero(np.isfinite(values[start:end]))
        # a bucket without a finite value leaves a gap
        peaks = (finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]) if len(finite) else (start,)
        indices.update(map(int, peaks))
    sorted_indices = np.array(sorted(indices))
    return steps[sorted_indices], values[sorted_indices]


def spread(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` of the indices 0, ..., `count` - 1, evenly spread, with both ends.

    Example:
        >>> spread(9, 3), spread(2, 5), spread(0, 5)
        ([0, 4, 8], [0, 1], [])
    """
    return np.linspace(0, count - 1, min(count, max_count)).astype(int).tolist()
