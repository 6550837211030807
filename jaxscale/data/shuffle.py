"""Derived seeds: every random choice about data depends only on the experiment's seed and on the choice's purpose."""

import hashlib


def derive(seed: int, *words: str | int) -> int:
    """Return a seed below 2**32 for the purpose that `words` describe, the same in all versions of Python.

    Example:
        >>> derive(0, "offset", 1) == derive(0, "offset", 1), derive(0, "offset", 1) == derive(1, "offset", 0)
        (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr((seed, *words)).encode()).digest()[:4], "big")
