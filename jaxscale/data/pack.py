"""Documents packed into rows with little padding, without attention between the documents of a row.

A document of m tokens has m - 1 targets: its first token is never a target, and its last token is never an input. Every
token but the first is a target exactly once per epoch. A document of more than `context` targets is split, and each
piece is a separate segment, with positions that start at 0. Rows are filled by best fit on the histogram of lengths,
longest first (Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027). Two rows
are of the same kind if their pieces have the same lengths. The work grows with the number of kinds of rows, not with
the number of documents.

The packing is computed once, from the lengths alone, so row i is the same for every reader; only the order of the rows
changes with the epoch. (Grain's packers fill rows from a stream: their state contains half-filled rows, and the packing
depends on the number of processes.) A piece is left out if all its targets have weight 0.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jaxscale.data.cache import Tokens


class Packing(NamedTuple):
    """The pieces of documents in each row.

    Args:
        piece_indices: [pieces] int64, indices of the pieces, row by row.
        row_starts: [rows + 1] int64, index in `piece_indices` at which each row begins; the last entry is the number of
            pieces.
    """

    piece_indices: np.ndarray
    row_starts: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack pieces of documents into rows: each piece, longest first, goes to the fullest row with room for the piece.

    Args:
        lengths: [pieces] whole numbers from 1 to `capacity`, length of each piece.
        capacity: upper limit for the sum of the lengths in a row.

    Returns:
        The packing; every piece is in exactly one row.

    Example:
        >>> best_fit(np.array([3, 1, 4, 1]), 5)
        Packing(piece_indices=array([2, 1, 0, 3]), row_starts=array([0, 2, 4]))

    References:
        Krell et al. 2021, arXiv:2107.02027, section 3.
    """
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "a piece is longer than a row"
    counts_by_length = np.bincount(lengths, minlength=capacity + 1).tolist()
    row_kinds = _row_kinds(counts_by_length, capacity)

    sorted_indices = np.argsort(lengths, kind="stable")
    # for each length, the position in `sorted_indices` of the next piece of this length
    next_position_by_length = np.concatenate([[0], np.cumsum(counts_by_length)])[:-1]
    piece_indices_by_kind, piece_counts_by_kind = [], []
    for row_count, row_lengths in row_kinds:
        kind_piece_indices = np.empty((row_count, len(row_lengths)), np.int64)
        for column, length in enumerate(row_lengths):
            kind_piece_indices[:, column] = sorted_indices[
                next_position_by_length[length] : next_position_by_length[length] + row_count
            ]
            next_position_by_length[length] += row_count
        piece_indices_by_kind.append(kind_piece_indices.reshape(-1))
        piece_counts_by_kind.append(np.full(row_count, len(row_lengths), np.int64))
    if not row_kinds:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    piece_counts = np.concatenate(piece_counts_by_kind)  # one entry per row
    return Packing(np.concatenate(piece_indices_by_kind), np.concatenate([[0], np.cumsum(piece_counts)]))


def _row_kinds(counts_by_length: list[int], capacity: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the kinds of rows that best fit produces, as pairs (number of such rows, lengths of a row's pieces).

    Args:
        counts_by_length: number of pieces of each length, from 0 to `capacity`.
        capacity: upper limit for the sum of the lengths in a row.
    """
    # for each free length (the capacity minus the sum of the lengths in a row), the kinds of rows so far
    kinds_by_free_length: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(capacity + 1)]
    for length in range(capacity, 0, -1):
        pieces_left = counts_by_length[length]
        while pieces_left:
            free_length = next(
                (free_length for free_length in range(length, capacity) if kinds_by_free_length[free_length]), capacity
            )
            # after one more piece, the row is the fullest, so it receives the next piece as well
            fit_count = free_length // length  # number of pieces that fill a row
            row_count, row_lengths = (
                kinds_by_free_length[free_length].pop()
                if free_length < capacity
                else (-(-pieces_left // fit_count), ())
            )
            full_row_count = min(row_count, pieces_left // fit_count)
            row_count, pieces_left = row_count - full_row_count, pieces_left - full_row_count * fit_count
            if full_row_count:
                kinds_by_free_length[free_length - fit_count * length].append(
                    (full_row_count, row_lengths + (length,) * fit_count)
                )
            if row_count and pieces_left:  # the remaining pieces do not fill a row
                kinds_by_free_length[free_length - pieces_left * length].append(
                    (1, row_lengths + (length,) * pieces_left)
                )
                row_count, pieces_left = row_count - 1, 0
            if row_count:
                kinds_by_free_length[free_length].append((row_count, row_lengths))
    return [kind for kinds in kinds_by_free_length for kind in kinds]


def split_documents(document_starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `context` targets.

    Args:
        document_starts: [documents + 1] int64, index of each document's first token; the last entry is the number of
            tokens.
        context: number of targets in a row.

    Returns:
        Two int64 arrays [pieces]: the index of each piece's first token, and its number of targets. A document of one
        token has no piece.
    """
    target_counts = np.maximum(np.diff(document_starts) - 1, 0)
    piece_counts = -(-target_counts // context)
    document_indices = np.repeat(np.arange(len(target_counts)), piece_counts)  # one entry per piece
    piece_counts_before = np.cumsum(piece_counts) - piece_counts
    offsets = (np.arange(len(document_indices)) - np.repeat(piece_counts_before, piece_counts)) * context
    piece_starts = document_starts[:-1][document_indices] + offsets
    return piece_starts, np.minimum(target_counts[document_indices] - offsets, context)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of packed documents.

    Args:
        tokens: the tokens of all documents.
        context: number of targets per row, including padding.
        is_cut: whether a document's targets beyond the first `context` are left out; if not, they form further pieces.
    """

    tokens: Tokens
    context: int
    is_cut: bool = False

    @functools.cached_property
    def _layout(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three arrays: each piece's first token, and its number of targets, row by row; and each row's first piece."""
        piece_starts, target_counts = split_documents(self.tokens.document_starts, self.context)
        if self.is_cut:
            is_document_start = np.isin(piece_starts, self.tokens.document_starts)
            piece_starts, target_counts = piece_starts[is_document_start], target_counts[is_document_start]
        if self.tokens.is_learned is not None:
            learned_counts_before = np.concatenate([[0], np.cumsum(self.tokens.is_learned, dtype=np.int64)])
            has_learned_targets = (
                learned_counts_before[piece_starts + target_counts + 1] > learned_counts_before[piece_starts + 1]
            )
            piece_starts, target_counts = piece_starts[has_learned_targets], target_counts[has_learned_targets]
        packing = best_fit(target_counts, self.context)
        return piece_starts[packing.piece_indices], target_counts[packing.piece_indices], packing.row_starts

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        _, _, row_starts = self._layout
        return len(row_starts) - 1

    @property
    def targets(self) -> int:
        """Number of targets in one epoch, including those of weight 0 but not padding."""
        _, target_counts, _ = self._layout
        return int(target_counts.sum())

    def read(self, row_indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read the rows with these indices in the endless sequence of epochs.

        Args:
            row_indices: [B] int64, indices of the rows.

        Returns:
            The batch: `tokens`, `targets`, `segments` (from 1 on; 0 is padding) and `positions` (from 0 on in each
            segment), int32 [B, context]; and `weights`, float32 [B, context], 0 for padding and for targets in prompts.
        """
        piece_starts, target_counts, row_starts = self._layout
        indices_in_epoch = row_indices % len(self)
        piece_counts = row_starts[indices_in_epoch + 1] - row_starts[indices_in_epoch]  # one entry per row
        piece_indices = _concatenated_ranges(row_starts[indices_in_epoch], piece_counts)
        indices_in_row = _concatenated_ranges(
            np.zeros_like(piece_counts), piece_counts
        )  # for each piece, its index in its row
        piece_lengths = target_counts[piece_indices]
        positions = _concatenated_ranges(np.zeros_like(piece_lengths), piece_lengths)
        token_indices = np.repeat(piece_starts[piece_indices], piece_lengths) + positions
        # index of each target in the flattened batch: start of its row plus the number of earlier targets in the row
        row_of_piece = np.repeat(np.arange(len(row_indices)), piece_counts)
        row_target_counts = np.bincount(row_of_piece, weights=piece_lengths, minlength=len(row_indices)).astype(
            np.int64
        )
        flat_indices = _concatenated_ranges(np.arange(len(row_indices)) * self.context, row_target_counts)

        ids = self.tokens.ids
        weights = 1 if self.tokens.is_learned is None else self.tokens.is_learned[token_indices + 1]
        # for each array of the batch: its values without padding, and its dtype
        values_and_dtypes = {
            "tokens": (ids[token_indices], np.int32),
            "targets": (ids[token_indices + 1], np.int32),
            "segments": (np.repeat(indices_in_row + 1, piece_lengths), np.int32),
            "positions": (positions, np.int32),
            "weights": (weights, np.float32),
        }
        batch = {}
        for name, (values, dtype) in values_and_dtypes.items():
            flat_values = np.zeros(len(row_indices) * self.context, dtype)
            flat_values[flat_indices] = values
            batch[name] = flat_values.reshape(len(row_indices), self.context)
        return batch


def _concatenated_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges `start, start + 1, ...`, one range for each start and its length."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
