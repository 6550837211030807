"""Tables as data: .parquet and .arrow files, and the folders that Hugging Face's `datasets` saves to disk.

The folder of a dataset has `state.json`, which lists its files in order, `dataset_info.json`, and `data-*.arrow` files,
which are streams of Arrow (`Dataset.save_to_disk`); the folder of a `DatasetDict` has `dataset_dict.json` and a folder
for each split. pyarrow reads the files; the package `datasets` is not needed. Early versions of `datasets` saved a
shuffled or filtered dataset as its rows in the original order and a file of row indices; such a folder is refused.
"""

import os
from typing import Any

import numpy as np

from jaxscale.errors import UserError, near_miss
from jaxscale.values.read_files import parse_json

SUFFIXES = (".parquet", ".arrow")
"""The extensions of table files."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream. If a stream was cut between two batches, pyarrow reads it without an error."""
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_table(file: str) -> bool:
    """Return whether a file's name has the extension of a table."""
    return file.lower().endswith(SUFFIXES)


def dataset_files(folder: Any, path: str) -> list[str] | None:
    """Return the files of a dataset that Hugging Face's `datasets` saved to disk, in order.

    Args:
        folder: the folder, as an object with `/`, `exists` and `read_bytes`.
        path: the folder's path as text; the returned paths begin with it.

    Returns:
        The paths of the files; `None` if the folder holds no dataset.

    Raises:
        UserError: the folder holds several splits or a file of row indices, or a JSON file in it is damaged.
    """
    prefix = path.rstrip("/")
    if (folder / _SPLITS).exists():
        splits = _read_json(folder / _SPLITS).get("splits")
        split_names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise UserError(
            f"{path} holds the splits {', '.join(split_names)} of a dataset, expected one of them: give "
            f"{prefix}/{split_names[0] if split_names else 'train'}"
        )
    if not (folder / _STATE).exists() or not (folder / _INFO).exists():
        return None
    state = _read_json(folder / _STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(
            f"{path} was saved by an early version of datasets, with a file of indices of its rows: load it and save "
            "it again with a newer version"
        )
    entries = state.get("_data_files")
    file_names = (
        [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    if not file_names or not all(
        isinstance(file_name, str) and file_name == os.path.basename(file_name) and file_name
        for file_name in file_names
    ):
        raise UserError(f"{path}/{_STATE} lists no files under _data_files: save the dataset again with save_to_disk")
    return [f"{prefix}/{file_name}" for file_name in file_names]


def _read_json(path: Any) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Raises:
        UserError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        content = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check that this user may read it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object; save the dataset again with save_to_disk")
    return content


def _pyarrow(file: str) -> Any:
    """Import pyarrow at its first use, and return it; the error for a missing pyarrow names `file`."""
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file}: tables need pyarrow ({error}): pip install 'jaxscale[parquet]'") from error
    return pa


def read_columns(content: bytes, file: str, names: tuple[str, ...]) -> list[Any]:
    """Read columns of a table.

    Args:
        content: the bytes of the file.
        file: path of the file; its extension selects Parquet or Arrow, and error messages name it.
        names: names of the columns.

    Returns:
        A list with one `pyarrow.ChunkedArray` without nulls for each name.

    Raises:
        UserError: pyarrow is not installed, the file is not a table, or a column is missing, occurs twice or has nulls.
    """
    pa = _pyarrow(file)
    try:
        buffer = pa.BufferReader(content)
        if file.lower().endswith(".parquet"):
            parquet_file = pa.parquet.ParquetFile(buffer)
            present_names = parquet_file.schema_arrow.names
            unique_names = list(dict.fromkeys(names))
            # no threads: an Arrow thread that is still starting when the process ends aborts the process
            table = None if set(names) - set(present_names) else parquet_file.read(unique_names, use_threads=False)
        else:
            is_file_format = content[:6] == b"ARROW1"
            if not is_file_format and not content.endswith(_END_OF_STREAM):
                raise ValueError("its stream has no end marker")
            reader = pa.ipc.open_file(buffer) if is_file_format else pa.ipc.open_stream(buffer)
            present_names, table = reader.schema.names, reader.read_all()
        if table is not None:
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        format_name = "Parquet" if file.lower().endswith(".parquet") else "Arrow"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file} is not a complete {format_name} file ({reason:.200}): write it again") from error
    for name in names:
        if name not in present_names:
            raise UserError(
                f"{file} has no column {name!r}: its columns are {', '.join(map(str, present_names))}"
                f"{near_miss(name, present_names)}"
            )
        if present_names.count(name) > 1:
            raise UserError(f"{file} has {present_names.count(name)} columns {name!r}, expected one")
    assert table is not None
    columns = [table.column(name) for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.null_count:
            row_index = next(index for index, value in enumerate(column) if not value.is_valid)
            raise UserError(f"{file}: {name} of row {row_index} is null, expected a value: fill it, or drop the row")
    return columns


def read_texts(content: bytes, file: str, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for each row of a table, the texts in the named columns.

    Args:
        content: the bytes of the file.
        file: path of the file; its extension selects Parquet or Arrow, and error messages name it.
        names: names of the columns of texts.

    Raises:
        UserError: as in `read_columns`; or a column does not hold texts.
    """
    pa = _pyarrow(file)
    columns = read_columns(content, file, names)
    texts_by_column: list[list[str]] = []
    for name, column in zip(names, columns, strict=True):
        value_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (
            pa.types.is_string(value_type)
            or pa.types.is_large_string(value_type)
            or pa.types.is_string_view(value_type)
        ):
            raise UserError(f"{file}: column {name!r} holds {column.type}, expected text")
        texts_by_column.append(column.to_pylist())
    return list(zip(*texts_by_column, strict=True))


def read_arrays(content: bytes, file: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return numeric columns as arrays by name; a column of lists of equal length becomes an array with one more dim.

    Args:
        content: the bytes of the file.
        file: path of the file; its extension selects Parquet or Arrow, and error messages name it.
        names: names of the columns.

    Raises:
        UserError: as in `read_columns`; or a column holds values other than numbers, or lists of different lengths.
    """
    pa = _pyarrow(file)
    arrays: dict[str, np.ndarray] = {}
    for name, column in zip(names, read_columns(content, file, names), strict=True):
        arrow_array, shape = column.combine_chunks(), [len(column)]
        arrow_array = arrow_array.combine_chunks() if isinstance(arrow_array, pa.ChunkedArray) else arrow_array
        while (
            pa.types.is_list(arrow_array.type)
            or pa.types.is_large_list(arrow_array.type)
            or _is_fixed_size_list(pa, arrow_array.type)
        ):
            list_lengths = np.unique(pa.compute.list_value_length(arrow_array).to_numpy(zero_copy_only=False))
            if len(list_lengths) > 1:
                raise UserError(
                    f"{file}: column {name!r} has lists of {list_lengths[0]} to {list_lengths[-1]} values, expected "
                    "lists of one length; pad or cut them"
                )
            shape.append(int(list_lengths[0]) if len(list_lengths) else 0)
            arrow_array = arrow_array.flatten()
            if arrow_array.null_count:
                raise UserError(f"{file}: column {name!r} has lists with nulls, expected numbers")
        value_type = arrow_array.type
        if not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type) or pa.types.is_boolean(value_type)):
            raise UserError(f"{file}: column {name!r} holds {column.type}, expected numbers, or lists of numbers")
        arrays[name] = arrow_array.to_numpy(zero_copy_only=False).reshape(shape)
    return arrays


def _is_fixed_size_list(pa: Any, value_type: Any) -> bool:
    """Return whether a pyarrow type is a list type of fixed size."""
    return pa.types.is_fixed_size_list(value_type)
