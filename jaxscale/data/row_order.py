"""The random order of the rows of a small dataset, epoch by epoch: the order of `grain.MapDataset.shuffle`.

Grain encrypts the index of a row by a block cipher, repeatedly until the cipher's value is the index of a row.
Its blocks have at least 16 bits, so a dataset of n rows takes about 65,536 / n encryptions a row. Here all 65,536
values are encrypted together, once per epoch. The order is the same as Grain's, so runs continue from checkpoints of
versions that used Grain's shuffle.

References:
    Black, Rogaway. Ciphers with arbitrary finite domains, CT-RSA 2002 (cycle walking).
    Beaulieu et al. The SIMON and SPECK families of lightweight block ciphers, 2013.
"""

import functools

import numpy as np

MOST_ROWS = 1 << 16
"""Number of rows up to which `RowOrder` has Grain's order; above it, Grain's blocks are larger than 16 bits."""

_WORD_BITS = 8  # a block has two words
_ROUNDS = 4


class RowOrder:
    """The order of the rows of each epoch.

    Args:
        row_count: number of rows, at most `MOST_ROWS`.
        seed: seed of the dataset, as passed to `grain.MapDataset.seed`.

    Example:
        >>> order = RowOrder(4, seed=0)
        >>> [order.row(index) for index in range(8)]
        [1, 2, 3, 0, 0, 3, 1, 2]
    """

    def __init__(self, row_count: int, seed: int) -> None:
        self._row_count = row_count
        self._seed = int(np.random.SeedSequence([seed, 1]).generate_state(1, dtype=np.uint32)[0])
        # threads prefetch, and rows of two epochs may be read in turn
        self._epoch_order = functools.lru_cache(maxsize=4)(self._compute_epoch_order)

    def row(self, index: int) -> int:
        """Return the row at an index of the endless sequence of epochs."""
        epoch, index_in_epoch = divmod(index, self._row_count)
        return int(self._epoch_order(epoch)[index_in_epoch])

    def _compute_epoch_order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in their order, uint16 of shape (row_count,)."""
        if self._row_count == 1:
            return np.zeros(1, np.uint16)
        # arrivals[x] is where the walk from x has arrived: it ends at the first value that is a row
        arrivals = _encrypt_all(_round_keys((self._seed + epoch) % 2**32))
        while (arrivals[: self._row_count] >= self._row_count).any():
            arrivals = np.where(arrivals < self._row_count, arrivals, arrivals[arrivals])  # as many steps again
        return arrivals[: self._row_count].copy()


def _encrypt_all(keys: list[int]) -> np.ndarray:
    """Return the cipher's value of each block 0, 1, ..., 65,535, uint16."""
    blocks = np.arange(MOST_ROWS, dtype=np.uint32)
    left, right = (blocks >> _WORD_BITS).astype(np.uint8), blocks.astype(np.uint8)
    for first_key, second_key in zip(keys[::2], keys[1::2], strict=True):
        left ^= _mix(right) ^ np.uint8(first_key & 0xFF)
        right ^= _mix(left) ^ np.uint8(second_key & 0xFF)
    return left.astype(np.uint16) << _WORD_BITS | right


def _mix(words: np.ndarray) -> np.ndarray:
    """Return the round function of SIMON: (x <<< 1 & x <<< 8) ^ (x <<< 2), for 8-bit words."""
    return (_rotate(words, 1) & words) ^ _rotate(words, 2)


def _rotate(words: np.ndarray, bit_count: int) -> np.ndarray:
    """Return 8-bit words rotated to the left."""
    return words << bit_count | words >> (_WORD_BITS - bit_count)


def _round_keys(seed: int) -> list[int]:
    """Return the keys of the rounds: the first numbers of C++'s `std::seed_seq` for one 32-bit seed.

    The letters k, T, p, q and r are those of the C++ standard, [rand.util.seedseq].
    """
    mask, key_count = 0xFFFFFFFF, _ROUNDS
    p, q = 1, 2  # for 4 numbers
    keys = [0x8B8B8B8B] * key_count

    def stir(number: int, factor: int) -> int:
        """Return T of a number, times a factor, modulo 2**32."""
        return factor * (number ^ number >> 27) & mask

    for k in range(key_count):
        r1 = stir(keys[k] ^ keys[(k + p) % key_count] ^ keys[k - 1], 1664525)
        r2 = r1 + (1 if k == 0 else k + seed if k == 1 else k) & mask
        keys[(k + p) % key_count] = keys[(k + p) % key_count] + r1 & mask
        keys[(k + q) % key_count] = keys[(k + q) % key_count] + r2 & mask
        keys[k] = r2
    for k in range(key_count):
        r3 = stir(keys[k] + keys[(k + p) % key_count] + keys[k - 1] & mask, 1566083941)
        r4 = r3 - k & mask
        keys[(k + p) % key_count] ^= r3
        keys[(k + q) % key_count] ^= r4
        keys[k] = r4
    return keys
