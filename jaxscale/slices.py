"""Which axes of a mesh the network between TPU slices cuts: the slowest ones, as far as the slices divide them."""

import math
from collections.abc import Sequence


def across(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """Into how many parts the network between slices cuts each mesh axis; `None` where the slices do not divide them.

    Args:
        sizes: of the axes, the slowest first.
        slices: of as many devices each.

    Example:
        >>> across((1, 4, 8), 2), across((3, 3), 2)
        ((1, 2, 1), None)
    """
    found = []
    for size in sizes:
        found.append(math.gcd(size, slices))
        slices //= found[-1]
    return tuple(found) if slices == 1 else None
