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
    counts_by_length = np.bincount(lengths, minlength=capacity + 1).tolist()
    row_kinds = _row_kinds(counts_by_length, capacity)

    order = np.argsort(lengths, kind="stable")
    # for each length, the place in `order` of the next piece of this length
    next_by_length = np.concatenate([[0], np.cumsum(counts_by_length)])[:-1]
    piece_indices, pieces_per_row = [], []
    for row_count, row_lengths in row_kinds:
        row_pieces = np.empty((row_count, len(row_lengths)), np.int64)
        for column, length in enumerate(row_lengths):
            row_pieces[:, column] = order[next_by_length[length] : next_by_length[length] + row_count]
            next_by_length[length] += row_count
        piece_indices.append(row_pieces.reshape(-1))
        pieces_per_row.append(np.full(row_count, len(row_lengths), np.int64))
    if not row_kinds:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    return Packing(np.concatenate(piece_indices), np.concatenate([[0], np.cumsum(np.concatenate(pieces_per_row))]))


def _row_kinds(counts_by_length: list[int], capacity: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the kinds of rows that best fit makes, each as (number of such rows, lengths of their pieces).

    Args:
        counts_by_length: number of pieces of each length, from 0 to `capacity`.
        capacity: largest sum of the lengths of a row.
    """
    open_rows: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(capacity + 1)]  # kinds by free room
    for length in range(capacity, 0, -1):
        pieces_left = counts_by_length[length]
        while pieces_left:
            room = next((room for room in range(length, capacity) if open_rows[room]), capacity)
            per_row = room // length  # after the first piece the row is the fullest, so it gets the next as well
            row_count, row_lengths = open_rows[room].pop() if room < capacity else (-(-pieces_left // per_row), ())
            full_count = min(row_count, pieces_left // per_row)
            row_count, pieces_left = row_count - full_count, pieces_left - full_count * per_row
            if full_count:
                open_rows[room - per_row * length].append((full_count, row_lengths + (length,) * per_row))
            if row_count and pieces_left:  # the pieces left do not fill a row
                open_rows[room - pieces_left * length].append((1, row_lengths + (length,) * pieces_left))
                row_count, pieces_left = row_count - 1, 0
            if row_count:
                open_rows[room].append((row_count, row_lengths))
    return [kind for kinds_of_room in open_rows for kind in kinds_of_room]


def split(starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `context` targets.

    Args:
        starts: [documents + 1] int64, first token of each document; the last entry is the number of tokens.
        context: number of targets of a row.

    Returns:
        Two int64 arrays [pieces]: index of the first token, number of targets. A document of one token has no piece.
    """
    target_counts = np.maximum(np.diff(starts) - 1, 0)
    piece_counts = -(-target_counts // context)
    document_index = np.repeat(np.arange(len(target_counts)), piece_counts)  # one entry per piece
    pieces_before = np.cumsum(piece_counts) - piece_counts
    offsets = (np.arange(len(document_index)) - np.repeat(pieces_before, piece_counts)) * context
    return starts[:-1][document_index] + offsets, np.minimum(target_counts[document_index] - offsets, context)


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
        """Three arrays: first token of each piece, row by row; its number of targets; first piece of each row."""
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
        positions = _ranges(np.zeros_like(piece_lengths), piece_lengths)
        token_index = np.repeat(first_tokens[piece_index], piece_lengths) + positions
        # index of each target in the flattened batch: start of its row plus the number of earlier targets in the row
        row_of_piece = np.repeat(np.arange(len(rows)), piece_counts)
        row_target_counts = np.bincount(row_of_piece, weights=piece_lengths, minlength=len(rows)).astype(np.int64)
        target_places = _ranges(np.arange(len(rows)) * self.context, row_target_counts)

        ids = self.tokens.ids
        weights = 1 if self.tokens.learned is None else self.tokens.learned[token_index + 1]
        columns = {
            "tokens": (ids[token_index], np.int32),
            "targets": (ids[token_index + 1], np.int32),
            "segments": (np.repeat(piece_in_row + 1, piece_lengths), np.int32),
            "positions": (positions, np.int32),
            "weights": (weights, np.float32),
        }
        batch = {}
        for name, (values, dtype) in columns.items():
            flat_values = np.zeros(len(rows) * self.context, dtype)
            flat_values[target_places] = values
            batch[name] = flat_values.reshape(len(rows), self.context)
        return batch


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges `start, start + 1, ...`, one for each of the starts and lengths."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
