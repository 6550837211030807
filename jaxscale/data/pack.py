"""Documents packed into rows with little padding, where no document sees another.

A document of m tokens has m - 1 targets: its first token is never a target, its last never an input. Every other token
is a target exactly once per epoch. A document of more than `context` targets is split, and each piece is a separate
segment whose positions restart at 0. Rows are filled by best fit on the histogram of lengths, longest first (Krell et
al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027): the work grows with the
number of kinds of rows (rows whose pieces have the same lengths are of one kind), not of documents.

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
    """The pieces of documents in each row.

    Args:
        pieces: [pieces] int64, indices of the pieces, row by row.
        rows: [rows + 1] int64, index in `pieces` at which each row begins; the last entry is the number of pieces.
    """

    pieces: np.ndarray
    rows: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack pieces into rows: each piece, longest first, goes to the fullest row with room for it.

    Args:
        lengths: [pieces] whole numbers from 1 to `capacity`, length of each piece.
        capacity: largest sum of the lengths of a row.

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
    next_by_length = np.concatenate([[0], np.cumsum(counts)])[:-1]  # place in `order` of the next piece of each length
    pieces, pieces_per_row = [], []
    for rows, row_lengths in kinds:
        row_pieces = np.empty((rows, len(row_lengths)), np.int64)
        for column, length in enumerate(row_lengths):
            row_pieces[:, column] = order[next_by_length[length] : next_by_length[length] + rows]
            next_by_length[length] += rows
        pieces.append(row_pieces.reshape(-1))
        pieces_per_row.append(np.full(rows, len(row_lengths), np.int64))
    if not kinds:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    return Packing(np.concatenate(pieces), np.concatenate([[0], np.cumsum(np.concatenate(pieces_per_row))]))


def _kinds(counts: list[int], capacity: int) -> list[tuple[int, tuple[int, ...]]]:
    """The kinds of rows, each as (number of such rows, lengths of their pieces).

    Args:
        counts: number of pieces of each length, from 0 to `capacity`.
        capacity: largest sum of the lengths of a row.
    """
    open_rows: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(capacity + 1)]  # kinds by free room
    for length in range(capacity, 0, -1):
        pieces_left = counts[length]
        while pieces_left:
            room = next((room for room in range(length, capacity) if open_rows[room]), capacity)
            per_row = room // length  # after the first piece the row is the fullest, so it gets the next as well
            rows, row_lengths = open_rows[room].pop() if room < capacity else (-(-pieces_left // per_row), ())
            full_rows = min(rows, pieces_left // per_row)
            rows, pieces_left = rows - full_rows, pieces_left - full_rows * per_row
            if full_rows:
                open_rows[room - per_row * length].append((full_rows, row_lengths + (length,) * per_row))
            if rows and pieces_left:  # the pieces left do not fill a row
                open_rows[room - pieces_left * length].append((1, row_lengths + (length,) * pieces_left))
                rows, pieces_left = rows - 1, 0
            if rows:
                open_rows[room].append((rows, row_lengths))
    return [kind for kinds in open_rows for kind in kinds]


def split(starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `context` targets.

    Args:
        starts: [documents + 1] int64, first token of each document; the last entry is the number of tokens.
        context: number of targets of a row.

    Returns:
        Index of the first token, and number of targets, of each piece, int64. A document of one token has no piece.
    """
    targets = np.maximum(np.diff(starts) - 1, 0)
    piece_counts = -(-targets // context)
    document_index = np.repeat(np.arange(len(targets)), piece_counts)  # one entry per piece
    pieces_before = np.cumsum(piece_counts) - piece_counts
    offset = (np.arange(len(document_index)) - np.repeat(pieces_before, piece_counts)) * context
    return starts[:-1][document_index] + offset, np.minimum(targets[document_index] - offset, context)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of packed documents.

    Args:
        tokens: tokens of the documents.
        context: number of targets per row, padding included.
    """

    tokens: Tokens
    context: int

    @functools.cached_property
    def _layout(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First token and number of targets of the pieces, row by row; index of the first piece of each row."""
        first_tokens, target_counts = split(self.tokens.starts, self.context)
        if self.tokens.learned is not None:
            learned_before = np.concatenate([[0], np.cumsum(self.tokens.learned, dtype=np.int64)])
            has_targets = learned_before[first_tokens + target_counts + 1] > learned_before[first_tokens + 1]
            first_tokens, target_counts = first_tokens[has_targets], target_counts[has_targets]
        packing = best_fit(target_counts, self.context)
        return first_tokens[packing.pieces], target_counts[packing.pieces], packing.rows

    def __len__(self) -> int:
        """Number of rows of one epoch."""
        return len(self._layout[2]) - 1

    @property
    def targets(self) -> int:
        """Number of targets of one epoch, including those of weight 0 but not padding."""
        return int(self._layout[1].sum())

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these numbers in the endless sequence of epochs.

        Args:
            rows: [B] int64, numbers of the rows.

        Returns:
            `tokens`, `targets`, `segments` (from 1; 0 is padding) and `positions` (from 0 in each segment), int32
            [B, context]; `weights`, float32, 0 for padding and for targets in prompts of weight 0.
        """
        first_tokens, target_counts, row_starts = self._layout
        epoch_rows = rows % len(self)
        piece_counts = row_starts[epoch_rows + 1] - row_starts[epoch_rows]  # one entry per row
        piece_index = _ranges(row_starts[epoch_rows], piece_counts)
        piece_in_row = _ranges(np.zeros_like(piece_counts), piece_counts)
        piece_lengths = target_counts[piece_index]
        position = _ranges(np.zeros_like(piece_lengths), piece_lengths)
        token_index = np.repeat(first_tokens[piece_index], piece_lengths) + position
        # place of a target in the flat batch: the start of its row plus the number of earlier targets in the row
        row = np.repeat(np.arange(len(rows)), piece_counts)
        row_targets = np.bincount(row, weights=piece_lengths, minlength=len(rows)).astype(np.int64)
        target_place = _ranges(np.arange(len(rows)) * self.context, row_targets)

        ids = self.tokens.ids
        weights = 1 if self.tokens.learned is None else self.tokens.learned[token_index + 1]
        columns = {
            "tokens": (ids[token_index], np.int32),
            "targets": (ids[token_index + 1], np.int32),
            "segments": (np.repeat(piece_in_row + 1, piece_lengths), np.int32),
            "positions": (position, np.int32),
            "weights": (weights, np.float32),
        }
        batch = {}
        for name, (values, dtype) in columns.items():
            flat_values = np.zeros(len(rows) * self.context, dtype)
            flat_values[target_place] = values
            batch[name] = flat_values.reshape(len(rows), self.context)
        return batch


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The ranges `start, start + 1, ...`, each of its length, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
