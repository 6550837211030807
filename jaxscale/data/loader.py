"""Batches from rows: Grain shuffles, mixes and shards the rows, and prefetches batches; NumPy reads a batch at once.

Grain handles only row numbers, at about 10 microseconds a row. Batch k depends only on the seed and k, so the state of
an iterator is k, no matter how many batches a thread has prefetched. This state is valid for every number of processes,
since each process reads a contiguous part of the rows of the global batch. Importing Grain takes seconds, so Grain is
imported only when the first iterator is created.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from jaxscale.data.row_order import MOST_ROWS, RowOrder
from jaxscale.data.shuffle import derive_seed
from jaxscale.errors import UserError

NumpyBatch = dict[str, np.ndarray]
"""A batch, or one process's rows of a batch: arrays by name, with rows along the first dim."""

_PREFETCH_COUNT = 4
"""Number of batches that are read before the training step needs them."""
_ENDLESS_ROW_COUNT = 2**52
"""Number of rows in "endless" data; Grain computes with this number in floats, which represent it exactly."""


class EpochRows(Protocol):
    """The rows of an epoch, which are read by their indices."""

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        ...

    @property
    def targets(self) -> int:
        """Number of targets in one epoch."""
        ...

    def read(self, row_indices: np.ndarray) -> NumpyBatch:
        """Read rows by their indices over all epochs: index r is row `r % len(self)` of epoch `r // len(self)`."""
        ...


@dataclasses.dataclass(frozen=True)
class Opened:
    """The opened data of an experiment: training rows, held-out rows, and their metadata.

    Args:
        parts: training rows (`EpochRows`) of each text in a mixture; other data has a single part.
        weights: weight of each part; the parts' shares of the training rows are in proportion to their weights.
        held_out: evaluation rows (`EpochRows`) of each part.
        batch: number of rows in the global batch.
        seed: seed of the order of rows.
        process: index of this process.
        processes: number of processes that share the batch.
        tokenizer: tokenizer of the texts; `None` for images.
        facts: metadata for the report, as JSON values; `facts["hash"]` identifies the content.
        note: a line about the data that a run shows to the user; `None` if there is none.
        chat_template: template of the chats (`chat_template.ChatTemplate`); `None` for data that is not chats.
    """

    parts: tuple[Any, ...]
    weights: tuple[float, ...]
    held_out: tuple[Any, ...]
    batch: int
    seed: int
    process: int
    processes: int
    tokenizer: Any
    facts: dict[str, Any]
    note: str | None = None
    chat_template: Any = None

    def __repr__(self) -> str:
        train_row_count, held_out_row_count = (sum(map(len, parts)) for parts in (self.parts, self.held_out))
        return f"<Opened: {train_row_count:,} rows to train on, {held_out_row_count:,} held out, {self.batch} a batch>"

    def train(self, start: dict[str, Any] | None = None) -> "Batches":
        """Return the endless training batches, starting at the first one or at a state from `Batches.get_state`.

        Raises:
            UserError: all of the data is held out.
        """
        if not all(map(len, self.parts)):
            raise UserError("held_out: got 1, which leaves nothing to train on; give a share below 1")
        return Batches(self._batches, self.facts["hash"], start, self._run_note)

    @property
    def _run_note(self) -> str | None:
        """The lines about the data that a run shows to the user; `None` if there are none."""
        row_count = sum(map(len, self.parts))
        lines = [] if self.note is None else [self.note]
        if self.batch > row_count:
            lines.append(
                f"batch: {self.batch:,} rows a step are more than the {row_count:,} rows of the data, which are "
                f"repeated within a batch; a batch of at most {row_count:,} rows takes less time"
            )
        return "\n".join(lines) or None

    def evaluation(self) -> "HeldOut":
        """Return the held-out batches, which can be iterated repeatedly; there are none if nothing is held out."""
        return HeldOut(self.held_out, self.batch, self.process, self.processes)

    def _batches(self) -> Any:
        """Return Grain's dataset of batches: element k is this process's rows of global batch k."""
        import grain

        part_datasets = []  # for each part, a dataset of row numbers in random order
        for part_index, part in enumerate(self.parts):
            row_count = len(part)
            seed, epoch_count = derive_seed(self.seed, "order", part_index), _ENDLESS_ROW_COUNT // row_count
            if row_count <= MOST_ROWS:
                row_order = RowOrder(row_count, seed)
                row_dataset = grain.MapDataset.range(epoch_count * row_count).map(row_order.row)
            else:
                row_dataset = grain.MapDataset.range(row_count).seed(seed).shuffle().repeat(epoch_count)
            part_datasets.append(row_dataset.map_with_index(_row_encoder(part_index, len(self.parts), row_count)))
        row_numbers = part_datasets[0] if len(part_datasets) == 1 else grain.MapDataset.mix(part_datasets, self.weights)
        local_batches = row_numbers.batch(self.batch // self.processes)[self.process :: self.processes]
        return local_batches.map(self._read)

    def _read(self, row_numbers: np.ndarray) -> NumpyBatch:
        """Read the batch with these row numbers, which a `_row_encoder` computed from part, epoch and row."""
        row_indices, part_indices = np.divmod(row_numbers, len(self.parts))
        if len(self.parts) == 1:
            return self.parts[0].read(row_indices)
        batch: NumpyBatch = {}
        for index, part in enumerate(self.parts):
            positions = np.flatnonzero(part_indices == index)
            if not len(positions):
                continue
            for name, part_array in _with_weights(part.read(row_indices[positions]), self._has_weights).items():
                batch_array = batch.setdefault(
                    name, np.empty((len(row_numbers), *part_array.shape[1:]), part_array.dtype)
                )
                batch_array[positions] = part_array
        return batch

    @functools.cached_property
    def _has_weights(self) -> bool:
        """Whether the rows of any part have weights."""
        return any("weights" in part.read(np.zeros(1, np.int64)) for part in self.parts)


def _row_encoder(part_index: int, part_count: int, row_count: int) -> Callable[[int, int], int]:
    """Return a function that encodes the part, epoch and row of a training row as one number.

    The function takes an index in the part's endless sequence of rows, and the row at that index.

    Args:
        part_index: index of the part.
        part_count: number of parts.
        row_count: number of rows in one epoch of the part.
    """
    return lambda index, row: (index // row_count * row_count + row) * part_count + part_index


def _with_weights(batch: NumpyBatch, is_weighted: bool) -> NumpyBatch:
    """Return the batch, with weights of 1 added if it has no weights and `is_weighted` is true."""
    if not is_weighted or "weights" in batch:
        return batch
    shape = batch["targets"].shape if "targets" in batch else batch["labels"].shape
    return {**batch, "weights": np.ones(shape, np.float32)}


class Batches(Iterator[NumpyBatch]):
    """Endless batches, prefetched by one thread until `close` is called or a `with` statement ends.

    Args:
        make_dataset: function that returns Grain's dataset of batches.
        content_hash: hash of the data, stored in the state.
        start: initial state; `None` for the first batch.
        note: a line about the data that a run shows to the user; `None` if there is none.
    """

    def __init__(
        self, make_dataset: Callable[[], Any], content_hash: str, start: Any = None, note: str | None = None
    ) -> None:
        import grain

        self.note = note
        self._content_hash = content_hash
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH_COUNT)
        self._iterator = iter(make_dataset().to_iter_dataset(options))
        if start is not None:
            self.set_state(start)

    def __next__(self) -> NumpyBatch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the state after the last batch as JSON values, for `set_state`; it is the same on all processes."""
        return {"next": self._iterator.get_state()["next_index"], "content": self._content_hash}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state`; iteration continues with the batch after that state.

        Raises:
            UserError: the state belongs to other data.
        """
        if state.get("content") != self._content_hash:
            raise UserError(
                f"the data has changed since this run was last started: its hash is {self._content_hash}, expected "
                f"{state.get('content')}; restore the old files and settings, or start a new run"
            )
        self._iterator.set_state({"next_index": state["next"]})

    def close(self) -> None:
        """End the thread that prefetches batches."""
        self._iterator.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out rows, each once, in batches of one shape: the last batch is padded with rows of weight 0.

    The rows come in the fixed order of `spread_order`: for every N, the first N batches are spread evenly over all
    rows. In stored order, the first rows would be a biased sample, because packed rows are sorted by the lengths of
    their documents, and the parts of a mixture follow one another.

    Args:
        parts: held-out rows (`EpochRows`) of each part.
        batch: number of rows in the global batch.
        process: index of this process.
        processes: number of processes that share the batch.
    """

    parts: tuple[Any, ...]
    batch: int
    process: int
    processes: int

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """The rows in the order of evaluation, as int64 indices over all parts."""
        return spread_order(sum(map(len, self.parts)))

    def __len__(self) -> int:
        return -(-sum(map(len, self.parts)) // self.batch)

    def __iter__(self) -> Iterator[NumpyBatch]:
        local_row_count = self.batch // self.processes
        for batch_index in range(len(self)):
            start = batch_index * self.batch + self.process * local_row_count
            yield self._read(np.arange(start, start + local_row_count))

    def _read(self, order_indices: np.ndarray) -> NumpyBatch:
        """Read the batch of rows at these indices of `_order`; indices beyond the last row give padding rows."""
        row_count = len(self._order)
        is_in_range = order_indices < row_count
        row_indices = np.where(is_in_range, self._order[np.minimum(order_indices, row_count - 1)], row_count)
        batch: NumpyBatch = {}
        first_row = 0
        for part in self.parts:
            positions = np.flatnonzero((row_indices >= first_row) & (row_indices < first_row + len(part)))
            part_row_indices = row_indices[positions] - first_row
            # a part without rows in this batch is read, too: a batch of padding alone needs arrays of the right shapes
            for name, part_array in _with_weights(part.read(part_row_indices), True).items():
                batch_array = batch.setdefault(
                    name, np.zeros((len(row_indices), *part_array.shape[1:]), part_array.dtype)
                )
                batch_array[positions] = part_array
            first_row += len(part)
        return batch


def spread_order(index_count: int) -> np.ndarray:
    """Return an order of the indices below `index_count` whose first N entries, for every N, are spread evenly.

    Args:
        index_count: number of indices to order.

    Returns:
        [index_count] int64, each index once: entry k is the rank of frac(k phi) among the fractions for all k; phi is
        the golden section.

    Example:
        >>> spread_order(5)
        array([0, 3, 1, 4, 2])

    References:
        Kuipers, Niederreiter 1974, "Uniform Distribution of Sequences", chapter 2: multiples of the golden section.
    """
    fractions = np.arange(index_count) * ((5**0.5 - 1) / 2) % 1
    order = np.empty(index_count, np.int64)
    order[np.argsort(fractions, kind="stable")] = np.arange(index_count)
    return order
