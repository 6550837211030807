"""The user's own rows: arrays, and datasets that are read by index.

Both are shuffled and divided among processes like the library's own data. A continued run gets the same batches as an
uninterrupted run.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxscale.data.arrays import Listed, checked_array, with_row_weights
from jaxscale.data.loader import NumpyBatch, Opened
from jaxscale.data.shuffle import split_draws, split_rows
from jaxscale.data.text import check_share
from jaxscale.errors import UserError
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays with the same number of rows, one row for each example.

    Args:
        arrays: numeric NumPy arrays [N, ...], by name.
        held_out: share of the rows to hold out for evaluation; the choice depends only on the number of rows. Use 1 for
            data that serves only as a held-out set of an experiment.

    Raises:
        UserError: an array is not numeric, or the arrays differ in their numbers of rows; or, on `open`, an array rises
            or falls along the order in which rows are held out.

    Example:
        >>> data = Arrays({"x": np.zeros((10, 3)), "y": np.arange(10)}, held_out=0.2)
        >>> batch = next(iter(data.open(4, seed=0).train()))
        >>> {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
        {'x': ((4, 3), 'float32'), 'y': ((4,), 'int32')}
    """

    arrays: Any
    held_out: float = 0.1

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        _check_held_out(self.held_out)
        if not isinstance(self.arrays, Mapping) or not self.arrays:
            got_text = "an empty dict" if isinstance(self.arrays, Mapping) else f"a {type(self.arrays).__name__}"
            raise UserError(f"arrays: got {got_text}, expected a dict of NumPy arrays, such as {{'x': x, 'y': y}}")
        checked_arrays = {name: checked_array(name, array, "arrays") for name, array in self.arrays.items()}
        row_counts = {name: len(array) for name, array in checked_arrays.items()}
        if len(set(row_counts.values())) > 1:
            raise UserError(
                f"arrays: got numbers of rows {row_counts}, expected one row for each example in all arrays"
            )
        object.__setattr__(self, "arrays", checked_arrays)

    @property
    def row_count(self) -> int:
        """The number of rows, those that are held out included."""
        return len(next(iter(self.arrays.values())))

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Return the batches of these arrays; see `Rows.open`."""
        hasher = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            hasher.update(f"{name} {array.dtype} {array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        if 0 < self.held_out < 1:
            _check_split(self.arrays, self.row_count)
        return open_rows("arrays", self.row_count, self._read, self.held_out, hasher, batch, seed, process, processes)

    def _read(self, indices: np.ndarray) -> NumpyBatch:
        """Return the rows with these indices."""
        return {name: array[indices] for name, array in self.arrays.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A dataset with `len(rows)` and `rows[i]`, in which each row is a dict of arrays or numbers.

    The rows are read in a thread while the devices compute. If the dataset has a method `__getitems__(indices)`, as
    datasets of PyTorch and Hugging Face may, it is called once per batch instead of `rows[i]` for each row.

    Args:
        rows: the dataset. All its rows have the same names, shapes and dtypes.
        held_out: share of the rows to hold out for evaluation; the choice depends only on the number of rows. Use 1 for
            data that serves only as a held-out set of an experiment.
        names: names of the items if each row is a tuple, such as ("images", "labels").

    Raises:
        UserError: `rows` has no length or cannot be indexed; or, while batches are read, a row is not as described.

    Example:
        >>> squares = [{"x": float(i), "y": float(i * i)} for i in range(10)]
        >>> sorted(next(iter(Rows(squares).open(4, seed=0).train())))
        ['x', 'y']
    """

    rows: Any
    held_out: float = 0.1
    names: tuple[str, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        _check_held_out(self.held_out)
        if isinstance(self.rows, Mapping):
            raise UserError(
                "rows: got a dict, expected a dataset that is indexed by row number; for a dict of arrays, use "
                "jaxscale.data.Arrays"
            )
        if not hasattr(self.rows, "__len__") or not hasattr(self.rows, "__getitem__"):
            raise UserError(
                f"rows: got {type(self.rows).__name__}, expected a dataset with len(rows) and rows[i]; an iterable of "
                "batches is a Stream"
            )
        if isinstance(self.rows, list | tuple):
            object.__setattr__(self, "rows", Listed(self.rows))

    @property
    def row_count(self) -> int:
        """The number of rows, those that are held out included."""
        return len(self.rows)

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Return the batches of this dataset.

        Args:
            batch: number of rows in the global batch.
            seed: seed of the order of the rows.
            process: index of this process.
            processes: number of processes that share the batch; each process gets contiguous rows.

        Raises:
            UserError: too few rows are left to train or evaluate on, or a row is not a dict of numbers.
        """
        hasher = hashlib.sha256(str(len(self.rows)).encode())
        for array in self._read(np.zeros(1, np.int64)).values() if len(self.rows) else ():
            hasher.update(array.tobytes())
        return open_rows("rows", len(self.rows), self._read, self.held_out, hasher, batch, seed, process, processes)

    def _read(self, indices: np.ndarray) -> NumpyBatch:
        """Return the rows with these indices, stacked."""
        read_many = getattr(self.rows, "__getitems__", None)
        index_list = indices.tolist()
        rows = [self.rows[index] for index in index_list] if read_many is None else read_many(index_list)
        row_dicts = [self._row_dict(index, row) for index, row in zip(index_list, rows, strict=True)]
        return {name: self._stacked_array(name, index_list, row_dicts) for name in row_dicts[0]}

    def _row_dict(self, index: int, row: Any) -> dict[str, Any]:
        """Return a row as a dict."""
        if self.names and isinstance(row, tuple | list) and len(row) == len(self.names):
            return dict(zip(self.names, row, strict=True))
        if self.names or not isinstance(row, Mapping):
            length_text = f" of {len(row)}" if isinstance(row, tuple | list) else ""
            expected_text = f"a tuple of {', '.join(self.names)}" if self.names else "a dict of arrays or numbers"
            advice_text = "" if self.names else "; a tuple needs names=(...)"
            raise UserError(
                f"rows[{index}]: got a {type(row).__name__}{length_text}, expected {expected_text}{advice_text}"
            )
        return dict(row)

    def _stacked_array(self, name: str, indices: list[int], row_dicts: list[dict[str, Any]]) -> np.ndarray:
        """Stack the arrays of this name in all rows, and return one checked array."""
        for index, row in zip(indices, row_dicts, strict=True):
            if row.keys() != row_dicts[0].keys():
                raise UserError(
                    f"rows[{index}] has {', '.join(map(str, row))}, but rows[{indices[0]}] has "
                    f"{', '.join(map(str, row_dicts[0]))}: expected the same names in all rows"
                )
        arrays = [np.asarray(row[name]) for row in row_dicts]
        for index, array in zip(indices, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise UserError(
                    f"rows[{index}][{name!r}] has shape {array.shape}, but rows[{indices[0]}][{name!r}] "
                    f"{arrays[0].shape}: expected one shape in all rows; pad or cut them"
                )
        return checked_array(name, np.stack(arrays), "rows")


def _check_held_out(held_out: float) -> None:
    """Raise an error if `held_out` is not from 0 to 1."""
    if not 0 <= held_out <= 1:
        raise UserError(f"held_out: got {held_out!r}, expected a share of the rows, 0 <= held_out <= 1")


def _check_split(arrays: Mapping[str, np.ndarray], row_count: int) -> None:
    """Raise an error if an array of one number per row rises or falls along the order in which rows are held out.

    Such an array was drawn by the same random generator as that order, so only its extreme values would be held out.
    """
    sample_count = min(row_count, 1000)
    order = np.argsort(split_draws(sample_count))
    for name, array in arrays.items():
        if array.size != row_count or array.dtype.kind not in "fiu" or sample_count < 20:
            continue
        column = array.reshape(row_count)[:sample_count][order].astype(np.float64)
        differences = np.diff(column)
        is_varied = len(np.unique(column)) > sample_count / 2
        if is_varied and (np.all(differences >= 0) or np.all(differences <= 0)):
            raise UserError(
                f"arrays[{name!r}] rises or falls along the order in which rows are held out, so that its extreme "
                "values alone would be held out: np.random.default_rng(0) made both. Make the data with another seed, "
                "or set held_out=0 and give rows of your own as Experiment(held_out={...})"
            )


def open_rows(
    kind: str,
    row_count: int,
    read: Callable[[np.ndarray], NumpyBatch],
    held_out: float,
    hasher: Any,
    batch: int,
    seed: int,
    process: int,
    processes: int,
) -> Opened:
    """Return the opened data of `row_count` rows; `read` returns rows by index, and `hasher` has hashed the content."""
    check_share(batch, process, processes)
    train_indices, held_out_indices = split_rows(row_count, held_out, f"the data has {row_count} rows")
    train_rows, held_out_rows = IndexedRows(read, train_indices), IndexedRows(read, held_out_indices, is_weighted=True)
    facts = {
        "kind": kind,
        "rows": len(train_rows),
        "targets": len(train_rows),
        "held_out_rows": len(held_out_rows),
        "held_out_targets": len(held_out_rows),
        "hash": hasher.hexdigest()[:16],
    }
    return Opened((train_rows,), (1.0,), (held_out_rows,), batch, seed, process, processes, None, facts)


@dataclasses.dataclass(frozen=True)
class IndexedRows:
    """The rows of one split (`EpochRows`), read by a function of indices.

    Args:
        read_rows: function that returns the rows with given indices of the dataset.
        indices: indices of the rows of this split, [N] int64.
        is_weighted: whether a row without a weight gets the weight 1.
    """

    read_rows: Callable[[np.ndarray], NumpyBatch]
    indices: np.ndarray
    is_weighted: bool = False

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        return len(self.indices)

    @property
    def targets(self) -> int:
        """Number of rows in one epoch."""
        return len(self)

    def read(self, row_indices: np.ndarray) -> NumpyBatch:
        """Read the rows with these indices, [B] int64, in the endless sequence of epochs."""
        if not len(row_indices):  # the names, dtypes and shapes are those of any row
            return {name: array[:0] for name, array in self.read(np.zeros(1, np.int64)).items()}
        batch = self.read_rows(self.indices[row_indices % len(self)])
        return with_row_weights(batch) if self.is_weighted else batch
