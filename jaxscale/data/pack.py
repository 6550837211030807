"""Documents packed into rows with little padding, none of them seeing another.

A document of m tokens has m - 1 targets: its first token is never a target, its last never an input. Every other token
is a target exactly once per epoch. A document of more than `context` targets is split, and each piece is a separate
segment whose positions restart at 0. Rows are filled by best fit on the histogram of lengths, longest first (Krell et
al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027): the work grows with the kinds of
rows, not with the documents.

The packing is computed once, from the lengths alone, so that row i is the same for every reader; only the order of the
rows changes with the epoch. (Grain's packers fill rows from a stream: their state contains half-filled rows, and the
packing depends on the number of processes.) A piece whose targets all have weight 0 is left out.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxscale.data.cache import Tokens


class Packing(NamedTuple):
    """The pieces of each row.

    Args:
        pieces: [pieces] int64, indices of the pieces, row by row.
        rows: [rows + 1] int64, where each row begins in `pieces`.
    """

    pieces: np.ndarray
    rows: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack pieces in rows of `capacity`: each, longest first, goes to the fullest row with room for it.

    Args:
        lengths: [pieces] whole numbers from 1 to `capacity`.
        capacity: of a row.

    Returns:
        The packing; every piece is in exactly one row.

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
    """Kinds of rows, as their number and their lengths, from the number of pieces of each length."""
    open_rows: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(capacity + 1)]  # by room left
    for length in range(capacity, 0, -1):
        pieces_left = counts[length]
        while pieces_left:
            room = next((room for room in range(length, capacity) if open_rows[room]), capacity)
            per_row = room // length  # after the first piece the row is the fullest, so it gets the next as well
            count, kind = open_rows[room].pop() if room < capacity else (-(-pieces_left // per_row), ())
            full_rows = min(count, pieces_left // per_row)
            count, pieces_left = count - full_rows, pieces_left - full_rows * per_row
            if full_rows:
                open_rows[room - per_row * length].append((full_rows, kind + (length,) * per_row))
            if count and pieces_left:  # the pieces left do not fill a row
                open_rows[room - pieces_left * length].append((1, kind + (length,) * pieces_left))
                count, pieces_left = count - 1, 0
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
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * context
    return starts[:-1][document] + offset, np.minimum(targets[document] - offset, context)


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
            has_targets = learned[first + length + 1] > learned[first + 1]
            first, length = first[has_targets], length[has_targets]
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
        epoch_rows = rows % len(self)
        pieces = begins[epoch_rows + 1] - begins[epoch_rows]  # of each row
        piece_index = _ranges(begins[epoch_rows], pieces)
        segment = _ranges(np.zeros_like(pieces), pieces)
        size = length[piece_index]
        position = _ranges(np.zeros_like(size), size)
        token_index = np.repeat(first[piece_index], size) + position
        # place of a target in the flat batch: the start of its row plus the number of earlier targets in the row
        row = np.repeat(np.arange(len(rows)), pieces)
        per_row = np.bincount(row, weights=size, minlength=len(rows)).astype(np.int64)
        target_place = _ranges(np.arange(len(rows)) * self.context, per_row)

        ids = self.tokens.ids
        weights = 1 if self.tokens.learned is None else self.tokens.learned[token_index + 1]
        columns = {
            "tokens": (ids[token_index], np.int32),
            "targets": (ids[token_index + 1], np.int32),
            "segments": (np.repeat(segment + 1, size), np.int32),
            "positions": (position, np.int32),
            "weights": (weights, np.float32),
        }
        batch = {}
        for name, (values, dtype) in columns.items():
            flat = np.zeros(len(rows) * self.context, dtype)
            flat[target_place] = values
            batch[name] = flat.reshape(len(rows), self.context)
        return batch


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`start, start + 1, ...` of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
