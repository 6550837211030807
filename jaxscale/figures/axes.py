"""Axes of charts: round numbers for the ticks, and curves thinned to about one point per pixel."""

import math
from itertools import pairwise

import numpy as np


def round_step(span: float, max_intervals: float) -> float:
    """Return a distance between ticks that divides a span into at most `max_intervals` intervals.

    The distance is 1, 2 or 5 times a power of ten.

    Example:
        >>> round_step(33.0, 8), round_step(0.0049, 8)
        (5.0, 0.001)
    """
    min_step = span / max_intervals
    power = math.floor(math.log10(min_step))
    return next(step for factor in (1, 2, 5, 10) if (step := float(f"{factor}e{power}")) >= min_step * (1 - 1e-9))


def ticks(low: float, high: float, max_intervals: float = 6) -> list[float]:
    """Return round numbers from `low` to `high`, with at most `max_intervals` intervals between them.

    Example:
        >>> ticks(0.0, 2000.0), ticks(1.43, 4.2)
        ([0.0, 500.0, 1000.0, 1500.0, 2000.0], [1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    """
    step = round_step(high - low, max_intervals)
    indices = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(f"{index * step:.15g}") for index in indices]


def byte_ticks(high: float) -> list[float]:
    """Return multiples of a power of two, from 0 up to `high` bytes: 0 and about 3 to 6 larger values.

    Example:
        >>> byte_ticks(100)
        [0.0, 32.0, 64.0, 96.0]
    """
    step = 2.0 ** math.floor(math.log2(high / 3))
    return [multiple * step for multiple in range(int(high / step) + 1)]


def thin(steps: np.ndarray, values: np.ndarray, bucket_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible points of a curve: its ends, and the smallest and the largest value in each bucket.

    Args:
        steps: [n] steps of the points, ascending.
        values: [n] value at each step.
        bucket_count: number of buckets. Each bucket holds about the same number of consecutive points.

    Returns:
        Two arrays of equal length: the steps of the visible points, and their values.

    Example:
        >>> steps, values = thin(np.arange(10_000), np.zeros(10_000), 500)
        >>> len(steps) <= 2 * 500 + 4
        True
    """
    if len(steps) <= 2 * bucket_count:
        return steps, values
    indices = {0, len(steps) - 1}
    for bucket_start, bucket_end in pairwise(np.linspace(0, len(steps), bucket_count + 1).astype(int).tolist()):
        finite_indices = bucket_start + np.flatnonzero(np.isfinite(values[bucket_start:bucket_end]))
        if len(finite_indices):
            finite_values = values[finite_indices]
            indices |= {int(finite_indices[np.argmin(finite_values)]), int(finite_indices[np.argmax(finite_values)])}
        else:  # a bucket without finite values leaves a gap
            indices.add(bucket_start)
    sorted_indices = np.array(sorted(indices))
    return steps[sorted_indices], values[sorted_indices]


def spread_indices(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` evenly spread indices from 0 to `count` - 1, including both ends.

    Example:
        >>> spread_indices(9, 3), spread_indices(2, 5), spread_indices(0, 5)
        ([0, 4, 8], [0, 1], [])
    """
    return np.linspace(0, count - 1, min(count, max_count)).astype(int).tolist()
