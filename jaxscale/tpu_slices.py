"""How many TPU slices each axis of a mesh spans; the slowest axes span slices first."""

import math
from collections.abc import Sequence


def slices_per_axis(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """Return the number of slices that each mesh axis spans; `None` if the axes do not fit the slices evenly.

    Args:
        sizes: number of devices along each mesh axis, the slowest axis first.
        slices: number of slices; all have the same number of devices.

    Example:
        >>> slices_per_axis((1, 4, 8), 2), slices_per_axis((3, 3), 2)
        ((1, 2, 1), None)
    """
    spanned_slices, slices_left = [], slices
    for size in sizes:
        spanned_slices.append(math.gcd(size, slices_left))
        slices_left //= spanned_slices[-1]
    return tuple(spanned_slices) if slices_left == 1 else None
