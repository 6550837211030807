"""Batches from rows: Grain shuffles, mixes by weight, shards over processes and prefetches; rows are read a whole batch
at a time.

Grain handles row numbers only (about 10 microseconds a row); numpy reads the rows. Batch k is a function of the seed
and k alone, so the state of an iterator is k, however far a thread has read ahead, and is valid for every number of
processes: each reads a contiguous part of the rows of the global batch. Grain takes seconds to import and is imported
by the first iterator.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from jaxscale.data.shuffle import derive
from jaxscale.errors import UserError

NumpyBatch = dict[str, np.ndarray]
"""A batch, or this process's rows of one: arrays by name, whose first dim is the row."""

_AHEAD = 4
"""Number of batches read ahead of the training step."""
_ENDLESS = 2**52
"""Number of rows of "endless" data, which floats represent exactly, because Grain computes with it in floats."""


class EpochRows(Protocol):
    """The rows of an epoch, read by number."""

    def __len__(self) -> int:
        """Number of rows of one epoch."""
        ...

    @property
    def targets(self) -> int:
        """Number of targets of one epoch."""
        ...

    def read(self, rows: np.ndarray) -> NumpyBatch:
        """Read the rows with these numbers, counted over all epochs: number r is row `r % len` of epoch `r // len`."""
        ...


@dataclasses.dataclass(frozen=True)
class Opened:
    """The opened data of an experiment: training rows, held-out rows, and facts about them.

    Args:
        parts: training rows (`EpochRows`) of each text of a mixture; a single entry for other data.
        weights: shares of the parts in the training rows.
        held_out: evaluation rows of each part, read in order.
        batch: number of rows of the global batch.
        seed: seed of the order of rows.
        process: index of this process.
        processes: number of processes that share the batch.
        tokenizer: tokenizer of the texts; `None` for images.
        facts: facts for the report, as JSON values; `facts["hash"]` identifies the content.
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

    def train(self, start: dict[str, Any] | None = None) -> "Batches":
        """Return the endless training batches, from the first one or from a state of `Batches.get_state`."""
        return Batches(self._batches, self.facts["hash"], start)

    def evaluation(self) -> "HeldOut":
        """Return the batches of the held-out part, which can be iterated repeatedly; empty if nothing is held out."""
        return HeldOut(self.held_out, self.batch, self.process, self.processes)

    def _batches(self) -> Any:
        """Return Grain's dataset of batches: element k is this process's rows of global batch k."""
        import grain

        datasets = []  # of the row numbers of each part, shuffled
        for index, part in enumerate(self.parts):
            length = len(part)
            dataset = grain.MapDataset.range(length).seed(derive(self.seed, "order", index)).shuffle()
            # a row's number encodes its part and epoch
            dataset = dataset.repeat(_ENDLESS // length).map_with_index(_row_encoder(index, len(self.parts), length))
            datasets.append(dataset)
        row_numbers = datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, self.weights)
        local_batches = row_numbers.batch(self.batch // self.processes)[self.process :: self.processes]
        return local_batches.map(self._read)

    def _read(self, numbers: np.ndarray) -> NumpyBatch:
        """Read the batch of rows with these numbers, which `_row_encoder` computes from part, epoch and row."""
        rows, part_indices = np.divmod(numbers, len(self.parts))
        if len(self.parts) == 1:
            return self.parts[0].read(rows)
        batch: NumpyBatch = {}
        for index, part in enumerate(self.parts):
            positions = np.flatnonzero(part_indices == index)
            if not len(positions):
                continue
            for name, values in _with_weights(part.read(rows[positions]), self._has_weights).items():
                batch.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))[positions] = values
        return batch

    @functools.cached_property
    def _has_weights(self) -> bool:
        """Whether the rows of some part have weights."""
        return any("weights" in part.read(np.zeros(1, np.int64)) for part in self.parts)


def _row_encoder(part_index: int, part_count: int, row_count: int) -> Callable[[int, int], int]:
    """Return a function from (index in the endless sequence, row) of a part to a number that encodes both and the part.

    Args:
        part_index: index of the part.
        part_count: number of parts.
        row_count: number of rows of one epoch of the part.
    """
    return lambda index, row: (index // row_count * row_count + row) * part_count + part_index


def _with_weights(batch: NumpyBatch, needs_weights: bool) -> NumpyBatch:
    """Return the batch, with weights of 1 added if it has no weights and `needs_weights` is true."""
    if not needs_weights or "weights" in batch:
        return batch
    shape = batch["targets"].shape if "targets" in batch else batch["labels"].shape
    return {**batch, "weights": np.ones(shape, np.float32)}


class Batches(Iterator[NumpyBatch]):
    """Endless batches, read ahead by one thread, which `close` or the end of a `with` statement ends.

    Args:
        make_dataset: function that builds Grain's dataset of batches.
        content_hash: hash of the data, stored in the state.
        start: initial state; `None` for the first batch.
    """

    def __init__(self, make_dataset: Callable[[], Any], content_hash: str, start: Any = None) -> None:
        import grain

        self._content_hash = content_hash
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
        self._iterator = iter(make_dataset().to_iter_dataset(options))
        if start is not None:
            self.set_state(start)

    def __next__(self) -> NumpyBatch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The state after the last batch returned, for `set_state`; JSON values, equal on every process."""
        return {"next": self._iterator.get_state()["next_index"], "content": self._content_hash}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `get_state` was called.

        Raises:
            UserError: the state belongs to other data.
        """
        if state.get("content") != self._content_hash:
            raise UserError(
                f"the data is not what this run has read before: its hash is {self._content_hash}, expected "
                f"{state.get('content')}; restore the old files and settings, or start a new run"
            )
        self._iterator.set_state({"next_index": state["next"]})

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._iterator.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out rows, each once, in batches of one shape: the last is padded with rows of weight 0.

    The rows come in a fixed order (`spread`): for every N, the first N batches are spread evenly over all rows. In
    their stored order, the first rows would be a biased sample: packed rows are sorted by the lengths of their
    documents, and parts follow one another.

    Args:
        parts: held-out rows of each part.
        batch: number of rows of the global batch.
        process: index of this process.
        processes: number of processes that share the batch.
    """

    parts: tuple[Any, ...]
    batch: int
    process: int
    processes: int

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """The number of the row (counted over all parts) at each place of the order, int64."""
        return spread(sum(map(len, self.parts)))

    def __len__(self) -> int:
        return -(-sum(map(len, self.parts)) // self.batch)

    def __iter__(self) -> Iterator[NumpyBatch]:
        local_rows = self.batch // self.processes
        for number in range(len(self)):
            start = number * self.batch + self.process * local_rows
            yield self._read(np.arange(start, start + local_rows))

    def _read(self, places: np.ndarray) -> NumpyBatch:
        """Read the batch of rows at these places of the order; places beyond the last row are padding."""
        row_count = len(self._order)
        rows = np.where(places < row_count, self._order[np.minimum(places, row_count - 1)], row_count)
        batch: NumpyBatch = {}
        first_row = 0
        for part in self.parts:
            positions = np.flatnonzero((rows >= first_row) & (rows < first_row + len(part)))
            part_rows = rows[positions] - first_row
            # a part without rows in the batch is read too, for the names and shapes of a batch without any rows
            for name, values in _with_weights(part.read(part_rows), True).items():
                batch.setdefault(name, np.zeros((len(rows), *values.shape[1:]), values.dtype))[positions] = values
            first_row += len(part)
        return batch


def spread(count: int) -> np.ndarray:
    """Return an order of the numbers below `count`: for every N, its first N are spread evenly over all of them.

    Args:
        count: number of numbers to order.

    Returns:
        [count] int64, each number once: entry k is the rank of frac(k phi) among all k, with phi the golden section.

    Example:
        >>> spread(5)
        array([0, 3, 1, 4, 2])

    References:
        Kuipers, Niederreiter 1974, "Uniform Distribution of Sequences", chapter 2: multiples of the golden section.
    """
    fractions = np.arange(count) * ((5**0.5 - 1) / 2) % 1
    order = np.empty(count, np.int64)
    order[np.argsort(fractions, kind="stable")] = np.arange(count)
    return order
