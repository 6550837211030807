"""Documents packed into rows with little padding, none of them seeing another.

A document of m tokens has m - 1 targets: its first token is never one, its last is never an input. Every other token
is a target exactly once per epoch. What exceeds `context` targets is split, and each piece is a segment of its own
whose positions restart at 0. Rows are filled by best fit on the histogram of lengths, longest first (Krell et al.
2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027): the work grows with the kinds of
rows, not with the documents.

The packing is made once, from the lengths alone, so that row i is the same whoever asks for it; what changes with the
epoch is the order of the rows. (Grain's packers fill rows from a stream: their state holds half-filled rows, and
another number of processes packs otherwise.) A piece whose targets all weigh 0 is left out.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxscale.data.cache import Tokens


class Packing(NamedTuple):
    """Which pieces lie in which row.

    Args:
        pieces: [pieces] int64, indices of the pieces, row by row.
        rows: [rows + 1] int64, where each row begins in `pieces`.
    """

    pieces: np.ndarray
    rows: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pieces in rows of `capacity`: each, longest first, goes to the fullest row that has room for it.

    Args:
        lengths: [pieces] whole numbers from 1 to `capacity`.
        capacity: of a row.

    Returns:
        The packing; every piece lies in exactly one row.

    Example:
        >>> best_fit(np.array([3, 1, 4, 1]), 5)
        Packing(pieces=array([2, 1, 0, 3]), rows=array([0, 2, 4]))

    References:
        Krell et al. 2021, arXiv:2107.02027, section 3.
    """
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "a piece is longer than a row"
    counts = np.bincount(lengths, minlength=capacity + 1).tolist()
    kinds = _kinds(counts, capacity)

    order = np.argsort(lengths, kind="stable")
    next_of = np.concatenate([[0], np.cumsum(counts)])[:-1]  # the next piece of each length, in `order`
    pieces, sizes = [], []
    for count, kind in kinds:
        columns = np.empty((count, len(kind)), np.int64)
        for column, length in enumerate(kind):
            columns[:, column] = order[next_of[length] : next_of[length] + count]
            next_of[length] += count
        pieces.append(columns.reshape(-1))
        sizes.append(np.full(count, len(kind), np.int64))
    if not kinds:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    return Packing(np.concatenate(pieces), np.concatenate([[0], np.cumsum(np.concatenate(sizes))]))


def _kinds(counts: list[int], capacity: int) -> list[tuple[int, tuple[int, ...]]]:
    """How many rows hold which lengths, given how many pieces there are of each length."""
    open_rows: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(capacity + 1)]  # by room left
    for length in range(capacity, 0, -1):
        left = counts[length]
        while left:
            room = next((room for room in range(length, capacity) if open_rows[room]), capacity)
            each = room // length  # a row that took one piece is the fullest, so it takes the next as well
            count, kind = open_rows[room].pop() if room < capacity else (-(-left // each), ())
            full = min(count, left // each)
            count, left = count - full, left - full * each
            if full:
                open_rows[room - each * length].append((full, kind + (length,) * each))
            if count and left:  # what is left is less than a row takes
                open_rows[room - left * length].append((1, kind + (length,) * left))
                count, left = count - 1, 0
            if count:
                open_rows[room].append((count, kind))
    return [row for rows in open_rows for row in rows]


def split(starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents in pieces of at most `context` targets.

    Args:
        starts: [documents + 1] int64, where each document begins; the last entry is the number of tokens.
        context: targets of a row.

    Returns:
        First token and number of targets of each piece, int64. A document of one token has none.
    """
    targets = np.maximum(np.diff(starts) - 1, 0)
    pieces = -(-targets // context)
    document = np.repeat(np.arange(len(targets)), pieces)
    before = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * context
    return starts[:-1][document] + before, np.minimum(targets[document] - before, context)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of packed documents.

    Args:
        tokens: the documents.
        context: targets per row, padding included.
    """

    tokens: Tokens
    context: int

    @functools.cached_property
    def _layout(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First token and number of targets of the pieces, row by row; where each row begins among them."""
        first, length = split(self.tokens.starts, self.context)
        if self.tokens.learned is not None:
            learned = np.concatenate([[0], np.cumsum(self.tokens.learned, dtype=np.int64)])
            kept = learned[first + length + 1] > learned[first + 1]
            first, length = first[kept], length[kept]
        packing = best_fit(length, self.context)
        return first[packing.pieces], length[packing.pieces], packing.rows

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._layout[2]) - 1

    @property
    def targets(self) -> int:
        """Targets of one epoch, those of weight 0 included, padding not."""
        return int(self._layout[1].sum())

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by their number in the endless sequence of epochs.

        Args:
            rows: [B] int64.

        Returns:
            `tokens`, `targets`, `segments` (from 1; 0 is padding) and `positions` (from 0 in each segment), int32
            [B, context]; `weights`, float32, 0 at padding and where prompts weigh 0.
        """
        first, length, begins = self._layout
        inside = rows % len(self)
        pieces = begins[inside + 1] - begins[inside]  # of each row
        which = _ranges(begins[inside], pieces)
        segment = _ranges(np.zeros_like(pieces), pieces)
        size = length[which]
        position = _ranges(np.zeros_like(size), size)
        at = np.repeat(first[which], size) + position
        # a target's place in the batch: its row, then after all targets of the row before it
        row = np.repeat(np.arange(len(rows)), pieces)
        per_row = np.bincount(row, weights=size, minlength=len(rows)).astype(np.int64)
        place = _ranges(np.arange(len(rows)) * self.context, per_row)

        ids = self.tokens.ids
        weights = 1 if self.tokens.learned is None else self.tokens.learned[at + 1]
        filled = {
            "tokens": (ids[at], np.int32),
            "targets": (ids[at + 1], np.int32),
            "segments": (np.repeat(segment + 1, size), np.int32),
            "positions": (position, np.int32),
            "weights": (weights, np.float32),
        }
        batch = {}
        for name, (values, dtype) in filled.items():
            flat = np.zeros(len(rows) * self.context, dtype)
            flat[place] = values
            batch[name] = flat.reshape(len(rows), self.context)
        return batch


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`start, start + 1, ...` of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
