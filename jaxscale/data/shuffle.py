"""Derived seeds, and the rows that are held out.

Every random choice about data depends only on the experiment's seed and on the choice's purpose.
"""

import hashlib

import numpy as np

from jaxscale.errors import UserError


def derive_seed(seed: int, *words: str | int) -> int:
    """Return a seed below 2**32 for the purpose that `words` describe, the same in all versions of Python.

    Example:
        >>> derive_seed(0, "offset", 1) == derive_seed(0, "offset", 1)
        True
        >>> derive_seed(0, "offset", 1) == derive_seed(1, "offset", 0)
        False
    """
    return int.from_bytes(hashlib.sha256(repr((seed, *words)).encode()).digest()[:4], "big")


def split_draws(row_count: int) -> np.ndarray:
    """Return a random number for each row; the rows with the largest numbers are held out.

    The numbers are a fixed generator's raw bits, which are the same in every version of NumPy.
    """
    return np.random.PCG64(0).random_raw(row_count)


def split_rows(row_count: int, held_out: float, description: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows to train on, and of the rows held out; the arguments alone determine them.

    Args:
        row_count: number of rows.
        held_out: share of the rows to hold out, 0 <= held_out <= 1; 1 leaves none to train on.
        description: description of the rows, for messages, such as "digits.npz holds 100 images".

    Raises:
        UserError: no row is left to train on, or to evaluate on.
    """
    order = np.argsort(split_draws(row_count), kind="stable")
    train_count = int((1 - held_out) * row_count)
    is_training_missing = train_count == 0 and (held_out < 1 or not row_count)
    if is_training_missing or (held_out and train_count == row_count):
        raise UserError(
            f"{description}: held_out {held_out:g} leaves none to {'evaluate' if train_count else 'train'} on; change "
            "held_out"
        )
    return order[:train_count], order[train_count:]
