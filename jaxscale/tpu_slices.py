"""The axes of a mesh that span several TPU slices: the slowest ones, as far as the number of slices divides them."""

import math
from collections.abc import Sequence


def across(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """The number of slices that each mesh axis spans; `None` if `slices` does not divide the axes.

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
