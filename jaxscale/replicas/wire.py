"""Bytes that one device sends over an axis of n devices, for each collective that a codec uses.

The formulas are for ring algorithms, which send the fewest bytes (Patarasu and Yuan, 2009, "Bandwidth optimal
all-reduce algorithms"). The compile report counts the bytes that a compiled program sends. Latency is left out.
"""

import math
from collections.abc import Sequence

FLOAT32 = 4
"""Bytes of a float32."""


def all_reduce(payload: int, n: int) -> int:
    """Return the bytes that one device sends to sum an array of `payload` bytes over n devices: 2 (n-1)/n `payload`.

    Example:
        >>> all_reduce(4096, 2), all_reduce(4096, 8)
        (4096, 7168)
    """
    return math.ceil(2 * (n - 1) * payload / n)


def all_gather(payload: int, n: int) -> int:
    """Return the bytes that one device sends if it sends `payload` bytes to every other device: (n-1) `payload`.

    Example:
        >>> all_gather(100, 8)
        700
    """
    return (n - 1) * payload


def all_to_all(payload: int, n: int) -> int:
    """Return the bytes that one device sends if n devices get equal parts of its `payload` bytes: (n-1)/n `payload`.

    Example:
        >>> all_to_all(4096, 8)
        3584
    """
    return math.ceil((n - 1) * payload / n)


def exact(shape: Sequence[int], n: int) -> int:
    """Return the bytes that one device sends for the uncompressed mean of a float32 leaf: the baseline of every codec.

    Example:
        >>> exact((1024, 1024), 2) / 2**20
        4.0
    """
    return all_reduce(FLOAT32 * math.prod(shape), n)
