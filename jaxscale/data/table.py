"""Columns of numbers as rows: .parquet and .arrow files, and datasets that Hugging Face's `datasets` saved."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np

from jaxscale.data import arrow, source
from jaxscale.data.arrays import checked_array
from jaxscale.data.loader import NumpyBatch, Opened
from jaxscale.data.rows import open_rows
from jaxscale.errors import UserError
from jaxscale.values import check_types


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of numbers in .parquet and .arrow files as batches: an array for each column.

    A column of lists of one length, such as pixels, becomes an array with one more dim. The columns are read into
    memory, with pyarrow (`pip install 'jaxscale[parquet]'`). For columns of texts, use `Text`.

    Args:
        path: path of a file or a glob, or several of them, or the folder to which Hugging Face's `Dataset.save_to_disk`
            saved a dataset; a path may begin with gs:// or s3://.
        columns: names of the columns; the arrays of a batch have the same names.
        held_out: share of the rows held out for evaluation; the choice depends only on the number of rows. Use 1 for
            data that serves only as a held-out set of an experiment.

    Raises:
        UserError: a value is out of range; or, on `open`, a file is missing, is damaged or lacks a column, or a column
            holds values other than numbers.

    Example:
        >>> Table("rows.parquet", columns=("x", "y")).held_out
        0.1
        >>> Table("rows.parquet", columns=())
        Traceback (most recent call last):
        jaxscale.errors.UserError: columns: got none, expected names of columns, such as ('x', 'y')
    """

    path: str | Path | tuple[str | Path, ...] = dataclasses.field(metadata={"place": "content"})
    columns: tuple[str, ...]
    held_out: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        if not self.path:
            raise UserError("path: got no path, expected at least one file or glob")
        if isinstance(self.path, str | os.PathLike):
            object.__setattr__(self, "path", source.absolute_path(self.path))
        else:
            object.__setattr__(self, "path", tuple(source.absolute_path(path) for path in self.path))
        if not self.columns:
            raise UserError("columns: got none, expected names of columns, such as ('x', 'y')")
        if len(set(self.columns)) < len(self.columns):
            raise UserError(f"columns: got {', '.join(self.columns)}, expected each name once")
        if not 0 <= self.held_out <= 1:
            raise UserError(f"held_out: got {self.held_out!r}, expected a share of the rows, 0 <= held_out <= 1")

    def held_out_at(self, path: str | Path | tuple[str | Path, ...]) -> "Table":
        """Return the table at another path, with the same settings and all rows held out."""
        return dataclasses.replace(self, path=path, held_out=1.0)

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> Opened:
        """Read the columns, and return their batches.

        Args:
            batch: number of rows in the global batch.
            seed: seed of the order of the rows.
            process: index of this process.
            processes: number of processes that share the batch; each process gets contiguous rows.

        Raises:
            UserError: a file is invalid, or too few rows are left to train or evaluate on.
        """
        paths = self.path if isinstance(self.path, tuple) else (self.path,)
        hasher = hashlib.sha256(repr(self.columns).encode())
        arrays_by_file: list[dict[str, np.ndarray]] = []
        for file in source.find_files(tuple(map(str, paths))):
            if not arrow.is_table(file):
                raise UserError(f"{file} is not a table, expected a name that ends in {' or '.join(arrow.SUFFIXES)}")
            content = source.read(file)
            hasher.update(source.digest(content).encode())
            file_arrays = arrow.read_arrays(content, file, self.columns)
            arrays_by_file.append({name: checked_array(name, array, file) for name, array in file_arrays.items()})
            self._check_alike(arrays_by_file[0], arrays_by_file[-1], file)
        arrays = {name: np.concatenate([each[name] for each in arrays_by_file]) for name in self.columns}

        def read(indices: np.ndarray) -> NumpyBatch:
            """Return the rows with these indices."""
            return {name: array[indices] for name, array in arrays.items()}

        row_count = len(arrays[self.columns[0]])
        return open_rows("table", row_count, read, self.held_out, hasher, batch, seed, process, processes)

    def _check_alike(self, first_arrays: NumpyBatch, other_arrays: NumpyBatch, file: str) -> None:
        """Check that the columns of a file have the same dtypes and row shapes as in the first file."""
        for name in self.columns:
            first_text, other_text = (
                f"{arrays[name].dtype}{list(arrays[name].shape[1:])}" for arrays in (first_arrays, other_arrays)
            )
            if first_text != other_text:
                raise UserError(
                    f"{file}: each row of {name} is {other_text}, expected {first_text}, as in the first file: write "
                    "all files with one schema"
                )
