"""How many TPU slices each axis of a mesh spans; the slowest axes span slices first."""

import math
from collections.abc import Sequence


def across(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """The number of slices that each mesh axis spans; `None` if the axes cannot be split evenly into `slices`.

    Args:
        sizes: number of devices along each mesh axis, the slowest axis first.
        slices: number of slices, with equally many devices.

    Example:
        >>> across((1, 4, 8), 2), across((3, 3), 2)
        ((1, 2, 1), None)
    """
    counts = []
    for size in sizes:
        counts.append(math.gcd(size, slices))
        slices //= counts[-1]
    return tuple(counts) if slices == 1 else None
