"""The number of TPU slices that each axis of a mesh spans. The slowest axes span slices first."""

import math
from collections.abc import Sequence


def slices_per_axis(axis_sizes: Sequence[int], slice_count: int) -> tuple[int, ...] | None:
    """Return the number of slices that each mesh axis spans; `None` if the axes cannot be split evenly over the slices.

    Args:
        axis_sizes: number of devices along each mesh axis, the slowest axis first.
        slice_count: number of slices; all have the same number of devices.

    Example:
        >>> slices_per_axis((1, 4, 8), 2), slices_per_axis((3, 3), 2)
        ((1, 2, 1), None)
    """
    slice_counts, remaining_slices = [], slice_count
    for axis_size in axis_sizes:
        slice_counts.append(math.gcd(axis_size, remaining_slices))
        remaining_slices //= slice_counts[-1]
    return tuple(slice_counts) if remaining_slices == 1 else None
