"""The axes of a mesh that span several TPU slices: the slowest ones, as far as the slices divide them."""

import math
from collections.abc import Sequence


def across(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """The number of slices that each mesh axis spans; `None` if the slices do not divide the axes.

    Args:
        sizes: of the axes, the slowest first.
        slices: number of slices, with equally many devices.

    Example:
        >>> across((1, 4, 8), 2), across((3, 3), 2)
        ((1, 2, 1), None)
    """
    parts = []
    for size in sizes:
        parts.append(math.gcd(size, slices))
        slices //= parts[-1]
    return tuple(parts) if slices == 1 else None
