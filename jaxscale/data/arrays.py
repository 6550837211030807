"""Check the user's own arrays and batches: names, dtypes and numbers of rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxscale.data.loader import NumpyBatch
from jaxscale.errors import UserError


class Listed:
    """A list of rows or batches whose elements are not written to experiment.json."""

    def __init__(self, rows_or_batches: Any) -> None:
        self._items = rows_or_batches

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def checked_batch(batch: Any, place: str) -> NumpyBatch:
    """Return a batch as NumPy arrays in the dtypes that devices compute with; `place` names the batch in messages."""
    if not isinstance(batch, Mapping) or not batch:
        got_text = "an empty dict" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise UserError(f"{place}: got {got_text}, expected a dict of arrays, such as {{'x': x, 'y': y}}")
    return {name: checked_array(name, array, place) for name, array in batch.items()}


def common_row_count(batch: Mapping[str, Any], place: str) -> int:
    """Return the number of rows that all arrays of a batch have; `place` names the batch in messages."""
    row_counts = {name: len(array) for name, array in batch.items()}
    if len(set(row_counts.values())) > 1:
        raise UserError(
            f"{place} has numbers of rows {row_counts}, expected the rows of the batch in all arrays: repeat an array "
            "that is the same for all rows, or make it a part of the score"
        )
    return next(iter(row_counts.values()))


def checked_array(name: Any, array: Any, place: str) -> np.ndarray:
    """Return a numeric array in a dtype that devices compute with: 64-bit dtypes become 32-bit.

    Raises:
        UserError: the array is not numeric, is a scalar or has rows of different lengths; its name is not a string; or
            an integer does not fit in 32 bits.
    """
    try:
        array = np.asarray(array)
    except ValueError:  # lists of different lengths
        raise UserError(
            f"{place}: {name} has rows of different lengths, expected an array of numbers: pad the rows to one length, "
            "and give the fillers the weight 0"
        ) from None
    if not isinstance(name, str):
        raise UserError(f"{place}: got the name {name!r}, expected names that are texts")
    is_number = array.dtype.kind in "biuf" or array.dtype.name.startswith(("bfloat16", "float8", "int4", "uint4"))
    if not is_number or not array.ndim:
        raise UserError(
            f"{place}: {name} is {array.dtype}{list(array.shape)}, expected an array of numbers with one row for each "
            "example"
        )
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype in (np.int64, np.uint64):
        device_dtype = np.dtype(np.int32 if array.dtype == np.int64 else np.uint32)
        limits = np.iinfo(device_dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise UserError(
                f"{place}: {name} has numbers from {array.min()} to {array.max()}, expected integers that fit in "
                f"{device_dtype}, the type that devices compute with; rescale or remap them"
            )
        return array.astype(device_dtype)
    return array


def with_row_weights(batch: NumpyBatch) -> NumpyBatch:
    """Return the batch; if the batch has no weights, add the weight 1 for each row."""
    if "weights" in batch:
        return batch
    return {**batch, "weights": np.ones(len(next(iter(batch.values()))), np.float32)}
