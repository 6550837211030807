"""A folder of safetensors files as named, memory-mapped arrays: one file, or shards under an index.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the length of a JSON header, the header
(name -> dtype, shape, byte range), then the bytes. Reading maps the file, so bytes are copied only on use. Every range
is checked first, so a truncated file is reported by name before tracing. This module handles names and bytes, and
imports no JAX; `huggingface_families.py` defines the names.

Files are read at least as strictly as by the safetensors library: the tensors of a header must cover every byte of the
data exactly once, and `__metadata__` must hold strings. Duplicate names and unknown fields are refused, too. If bytes
of a file belong to no tensor, or to two tensors, the file is damaged or carries something else.
"""

import collections
import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_INT64
from jaxscale.values.read_files import check_regular, is_regular, parse_json, read_bytes

SINGLE = "model.safetensors"
"""Name of the file in a folder with a single safetensors file."""
INDEX = "model.safetensors.index.json"
"""Name of the index in a folder with several safetensors files."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 32  # numpy 1 has arrays of at most 32 dims, numpy 2 of 64


@runtime_checkable
class ArrayLike(Protocol):
    """An array to write: its shape is known in advance, its bytes are computed on request."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dim."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        ...

    def __array__(self) -> np.ndarray: ...


def read(folder: Path) -> dict[str, np.ndarray]:
    """Map every tensor of the folder into memory, read-only, by name.

    Args:
        folder: folder that contains `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises:
        UserError: there are no such files, an index or header is not JSON, or a shard is missing; or a tensor is
            missing from its shard or from the index, has the wrong number of bytes, or ends beyond the end of the file.
    """
    if is_regular(folder / SINGLE):
        return _read_file(folder / SINGLE)
    if not is_regular(folder / INDEX):
        file_names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        has_pickled_weights = any(name.startswith("pytorch_model") for name in file_names)
        hint = (
            "save the model with safe_serialization=True first"
            if has_pickled_weights
            else "give the folder of a saved model"
        )
        raise UserError(f"{folder}: expected {SINGLE} or {INDEX}, found {', '.join(file_names) or 'nothing'}; {hint}")
    return _read_shards(folder, _read_index(folder / INDEX))


def _read_index(index_path: Path) -> dict[str, str]:
    """Return a dict from the name of each tensor to the name of the file that contains the tensor."""
    try:
        shard_by_tensor = parse_json(read_bytes(index_path), "the file")["weight_map"]
    except (UserError, KeyError, TypeError) as error:
        raise UserError(f"{index_path}: expected JSON with a weight_map ({error}); copy the file again") from error
    if not isinstance(shard_by_tensor, dict) or not all(isinstance(shard, str) for shard in shard_by_tensor.values()):
        raise UserError(f"{index_path}: expected a weight_map of tensor names to file names; copy the file again")
    for name, shard in shard_by_tensor.items():
        if not shard or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise UserError(f"{index_path}: tensor {name} lies in {shard!r:.300}, expected a file of the same folder")
    return shard_by_tensor


def _read_shards(folder: Path, shard_by_tensor: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Map every tensor into memory, by name, from the shard that the index lists for it."""
    tensors_by_shard: dict[str, dict[str, np.ndarray]] = {}
    for name, shard in shard_by_tensor.items():
        if not is_regular(folder / shard):
            raise UserError(
                f"{folder / INDEX}: tensor {name} lies in {shard:.300}, which is missing; copy that file too"
            )
        if shard not in tensors_by_shard:
            tensors_by_shard[shard] = _read_file(folder / shard)
        if name not in tensors_by_shard[shard]:
            raise UserError(
                f"{folder / shard}: the index lists tensor {name} in this file, which lacks it; copy both files again"
            )
    for shard, tensors in tensors_by_shard.items():
        for name in tensors:
            if shard_by_tensor.get(name) != shard:
                raise UserError(f"{folder / shard}: tensor {name} is not in {INDEX}; copy both files again")
    return {name: tensors_by_shard[shard][name] for name, shard in shard_by_tensor.items()}


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """Map every tensor of one file into memory, by name."""
    file_bytes = check_regular(path)
    with path.open("rb") as file:
        length_bytes = file.read(8)
        header_bytes = int.from_bytes(length_bytes, "little")
        if len(length_bytes) < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise UserError(
                f"{path}: its header should take {header_bytes:,} bytes, but the file has {file_bytes:,}: it is cut "
                "short, or not a safetensors file (perhaps a Git LFS pointer); copy it again"
            )
        entry_by_name = _read_header(path, file.read(header_bytes))
    body_start = 8 + header_bytes
    body = np.memmap(path, np.uint8, "r", offset=body_start) if file_bytes > body_start else np.empty(0, np.uint8)
    tensor_by_name = {name: _tensor_view(path, name, entry, body) for name, entry in entry_by_name.items()}
    _check_every_byte_once(path, entry_by_name, body.size)
    return tensor_by_name


def _read_header(path: Path, header_text: bytes) -> dict[str, Any]:
    """Return the entries of the tensors in a header, by name."""

    def refuse_duplicates(keys_and_values: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the dict of a JSON object's keys and values; refuse a key that occurs twice."""
        value_by_key = dict(keys_and_values)
        if len(value_by_key) < len(keys_and_values):
            key = collections.Counter(key for key, _ in keys_and_values).most_common(1)[0][0]
            raise ValueError(f"{key!r:.60} occurs twice")
        return value_by_key

    try:
        if not header_text.startswith(b"{"):  # the format does not allow a space before it
            raise ValueError(f"it starts with {header_text[:8]!r}")
        entry_by_name = json.loads(header_text.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its header is not a JSON object ({error}); copy the file again") from error
    metadata = entry_by_name.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise UserError(f"{path}: __metadata__: expected a JSON object of texts, got {metadata!r:.60}; copy it again")
    return entry_by_name


def _check_every_byte_once(path: Path, entry_by_name: Mapping[str, Any], body_bytes: int) -> None:
    """Raise UserError unless every byte of the data belongs to exactly one tensor of the header."""
    end_byte = 0
    ranges_and_names = sorted((*entry["data_offsets"], name) for name, entry in entry_by_name.items())
    for start_byte, stop_byte, name in [*ranges_and_names, (body_bytes, body_bytes, "")]:
        if start_byte != end_byte:
            place_text = (
                f"tensor {name} starts at byte {start_byte:,}" if name else f"the data ends at byte {body_bytes:,}"
            )
            problem_text = "two tensors share bytes" if start_byte < end_byte else "some bytes belong to no tensor"
            raise UserError(
                f"{path}: {place_text}, but the tensors before end at byte {end_byte:,}: {problem_text}; copy it again"
            )
        end_byte = stop_byte


def _tensor_view(path: Path, name: str, entry: Any, body: np.ndarray) -> np.ndarray:
    """Return the tensor that an entry of the header describes, as a view of `body` (the bytes after the header)."""
    value_by_key: dict[str, Any] = entry if isinstance(entry, dict) else {}
    expected_keys = ("dtype", "shape", "data_offsets")
    dtype_name, dim_sizes, byte_offsets = (value_by_key.get(key, ()) for key in expected_keys)
    if (
        set(value_by_key) != set(expected_keys)
        or not isinstance(dtype_name, str)
        or not (_are_counts(dim_sizes) and len(dim_sizes) <= _MAX_DIMS)
        or not (_are_counts(byte_offsets) and len(byte_offsets) == 2)
    ):
        raise UserError(
            f"{path}: tensor {name}: expected dtype, shape (at most {_MAX_DIMS} dims) and two data_offsets, all whole "
            f"numbers >= 0, got {entry!r:.200}; copy the file again"
        )
    shape, (start_byte, stop_byte) = tuple(dim_sizes), byte_offsets
    if dtype_name not in DTYPES:
        raise UserError(
            f"{path}: tensor {name} has dtype {dtype_name!r:.60}, expected one of {', '.join(DTYPES)}; convert it first"
        )
    if math.prod(filter(None, shape)) * DTYPES[dtype_name].itemsize > MAX_INT64:  # without the 0 that makes it empty
        raise UserError(f"{path}: tensor {name} has shape {shape}, expected less than 2^63 bytes; copy the file again")
    expected_bytes = math.prod(shape) * DTYPES[dtype_name].itemsize
    if not 0 <= start_byte <= stop_byte or stop_byte - start_byte != expected_bytes:
        raise UserError(
            f"{path}: tensor {name} of shape {shape} has bytes {start_byte} to {stop_byte}, "
            f"expected {expected_bytes} of them; copy the file again"
        )
    if stop_byte > body.size:
        raise UserError(
            f"{path}: tensor {name} ends at byte {stop_byte:,} of the data, which has {body.size:,} bytes: "
            "the file is cut short; copy it again"
        )
    return body[start_byte:stop_byte].view(DTYPES[dtype_name]).reshape(shape)


def _are_counts(json_value: Any) -> bool:
    """Return whether a JSON value is a list of whole numbers from 0 to the largest int64."""
    return isinstance(json_value, list) and all(
        type(number) is int and 0 <= number <= MAX_INT64 for number in json_value
    )


def write(folder: Path, tensors: Mapping[str, ArrayLike], *, shard_bytes: int) -> None:
    """Write the tensors as one file, or as shards with an index if they take more than `shard_bytes`.

    Arrays are computed one at a time. Each file gets its final name when it is complete.

    Args:
        folder: existing folder without safetensors.
        tensors: arrays by name; their order determines their shards.
        shard_bytes: largest number of bytes of one file; a larger tensor gets a separate file.
    """
    shard_tensor_names: list[list[str]] = [[]]
    used_bytes = 0
    for name, tensor in tensors.items():
        tensor_bytes = math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        if shard_tensor_names[-1] and used_bytes + tensor_bytes > shard_bytes:
            shard_tensor_names.append([])
            used_bytes = 0
        shard_tensor_names[-1].append(name)
        used_bytes += tensor_bytes
    if len(shard_tensor_names) == 1:
        _write_file(folder / SINGLE, tensors)
        return
    file_names = [
        f"model-{shard_number:05d}-of-{len(shard_tensor_names):05d}.safetensors"
        for shard_number in range(1, len(shard_tensor_names) + 1)
    ]
    for file_name, names in zip(file_names, shard_tensor_names, strict=True):
        _write_file(folder / file_name, {name: tensors[name] for name in names})
    total_size = sum(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors.values())
    weight_map = {
        name: file_name for file_name, names in zip(file_names, shard_tensor_names, strict=True) for name in names
    }
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    with write_complete(folder / INDEX) as path:
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: Mapping[str, ArrayLike]) -> None:
    """Write one file that contains the tensors in the order of the mapping."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    start_byte = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        stop_byte = start_byte + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start_byte, stop_byte],
        }
        start_byte = stop_byte
    header_json = json.dumps(header, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % 8)
    with write_complete(path) as partial_path, partial_path.open("wb") as file:
        file.write(len(header_json).to_bytes(8, "little") + header_json)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(np.asarray(tensor)).view(np.uint8).data if math.prod(tensor.shape) else b"")


@contextlib.contextmanager
def write_complete(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `path` at the end unless an error is raised."""
    partial_path = path.with_name(path.name + ".partial")
    try:
        yield partial_path
        os.replace(partial_path, path)
    finally:
        partial_path.unlink(missing_ok=True)
