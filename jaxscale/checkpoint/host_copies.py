"""HostCopies: copies of a run's state in host memory; a restart continues from one that is newer than the checkpoints.

A copy needs no disk and no network, so a run may take one every few steps. A copy is a file in a file system that Linux
keeps in memory. It therefore outlives the processes, but is lost with its host. Each part of an array is written once
per host. After a restart, on the same or another number of devices, the processes read the newest complete copy: every
host must have the parts that its devices need. A new host has no parts. (Orbax's emergency checkpoints support a
restart only on the same number of devices, and restore the old order of the device ids.)
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.checkpoint.array_parts import (
    Region,
    StoredPart,
    assemble,
    belongs_to,
    element_count,
    is_covered,
    region_of,
)
from jaxscale.checkpoint.verified import Description, Restored, dtype_of, invalid_fields
from jaxscale.errors import UserError
from jaxscale.records.directory import explain_write_errors, write_json
from jaxscale.records.processes import call_on_all, is_first, process_index, send_from_first
from jaxscale.values import from_json, read_json
from jaxscale.values.as_json import load
from jaxscale.values.limits import MAX_INT32
from jaxscale.values.read_files import parse_json
from jaxscale.values.units import size

FOLDER_VARIABLE = "JAXSCALE_MEMORY"
"""The environment variable that names the folder of the copies, in a file system that is kept in memory."""
RUN_FILE = "memory_copies"
"""File in the run directory, a `_Record` as JSON. It names the run directory, so that a copied one is recognized."""
KEPT = 2
"""Number of copies that are kept: if the newest copy is incomplete, the copy before it is complete."""

_Part = tuple[str, tuple[int, ...], Region, str, int]
"""Name and shape of an array, the region of it that a file holds, its dtype, and its first byte in the file."""
CopyKey = tuple[int, int]
"""(time at which the processes that wrote a copy started, in seconds since 1970; step of the copy). Files of different
starts are never mixed, because results on other devices may be rounded differently."""


class HostCopies:
    """The copies of one run in the memory of this host. Every process calls the same methods at the same steps.

    Args:
        run_dir: the run directory.
        abstract_leaves: shape, dtype and sharding of each array of the canonical tree, by name.

    Raises:
        UserError: there is no file system in memory, or it is too small for three copies.
    """

    def __init__(self, run_dir: Any, abstract_leaves: Mapping[str, Any]) -> None:
        self._run_dir, self._abstract_leaves = run_dir, abstract_leaves
        number_and_start = call_on_all(lambda: _read_record(run_dir), LookupError)
        # a later start has a later time, even if its first host has a clock that is behind
        start_time = max(int(time.time()), number_and_start[1] + 1)
        self._run_number, self._last_start, self._start_time = send_from_first([*number_and_start, start_time])
        self.folder = _copies_root() / str(self._run_number)
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._has_reported = False
        call_on_all(self._make_folder, LookupError)
        self._host_by_process = self._host_of_each_process()
        call_on_all(self._check_space, LookupError)

    # -- writing -------------------------------------------------------------------------------------------------------

    def save_arrays(self, arrays: Mapping[str, Any], description: Description, newest_checkpoint: int = 0) -> None:
        """Copy this process's parts of the arrays to host memory, and write them to a file in the background.

        The caller may donate the arrays once this method has returned.

        Args:
            arrays: the canonical tree.
            description: description of the copy.
            newest_checkpoint: step of the run's newest checkpoint. A restart does not read the copy if only older
                checkpoints are left, for example after the user has returned to one of them.
        """
        self.wait()
        if self._error is not None and not self._has_reported:
            self._has_reported = True
            print(
                f"jaxscale: rank {process_index()} cannot copy the state to {self.folder} ({self._error.strerror}): a "
                "restart goes on from an earlier copy or from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        parts = [
            (name, array.shape, region, np.array(shard.data))
            for name, array in arrays.items()
            for region, shard in self._parts_to_write(array)
        ]
        if is_first() and self._last_start != self._start_time:
            self._last_start = self._start_time
            _write_record(self._run_dir, self._run_number, self._start_time)
        # All processes have written the two copies before this one: each process waited for its last but one copy
        # before it took part in the steps since then, and these steps are done.
        copy_keys = sorted(_copy_key(path) for path in self.folder.glob(f"*-rank-{process_index():05d}"))
        if len(copy_keys) >= KEPT:
            self._remove(lambda key: key < copy_keys[-KEPT])
        header = {"description": dataclasses.asdict(description), "newest_checkpoint": newest_checkpoint}
        self._thread = threading.Thread(target=self._write, args=(parts, header), name="host copy")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current copy is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def clear(self) -> None:
        """Remove the copies of the run on this host."""
        self.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _parts_to_write(self, array: Any) -> Iterator[tuple[Region, Any]]:
        """Yield (region, shard) for each region that this process writes: no earlier process on its host has it."""
        shape, own_process = array.shape, process_index()
        writer_by_region: dict[Region, int] = {}
        for device, region_slices in array.sharding.devices_indices_map(shape).items():
            process = device.process_index
            if self._host_by_process[process] == self._host_by_process[own_process]:
                region = region_of(region_slices, shape)
                writer_by_region[region] = min(process, writer_by_region.get(region, process))
        yielded_regions: set[Region] = set()
        for shard in array.addressable_shards:
            region = region_of(shard.index, shape)
            if writer_by_region[region] == own_process and region not in yielded_regions:
                yielded_regions.add(region)
                yield region, shard

    def _write(self, parts: Sequence[tuple[str, tuple[int, ...], Region, np.ndarray]], header: dict[str, Any]) -> None:
        """Write this process's file; if the write fails, for lack of memory for example, the earlier copies remain.

        Args:
            parts: (name of an array, its shape, a region of it, the region's values) for each part.
            header: description of the copy and step of the newest checkpoint, by their names in the file.
        """
        path = self._file_path((self._start_time, header["description"]["step"]), process_index())
        half_path = path.with_suffix(".half")
        positions = np.cumsum([0, *(part_array.nbytes for *_, part_array in parts)]).tolist()
        header["parts"] = [
            [name, shape, region, str(part_array.dtype), position]
            for (name, shape, region, part_array), position in zip(parts, positions, strict=False)
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with half_path.open("wb") as file:
                for *_, part_array in parts:
                    file.write(part_array.reshape(-1).view(np.uint8).data)
                encoded_header = json.dumps(header).encode()
                file.write(
                    encoded_header
                    + len(encoded_header).to_bytes(8, "little")
                    + zlib.crc32(encoded_header).to_bytes(4, "little")
                )
            half_path.replace(path)
        except OSError as error:
            self._error = error
            half_path.unlink(missing_ok=True)

    def _file_path(self, key: CopyKey, rank: int) -> Path:
        """Return the path of the file that a process writes for a copy."""
        return self.folder / f"start-{key[0]:010d}-step-{key[1]:08d}-rank-{rank:05d}"

    def _remove(self, is_unneeded: Callable[[CopyKey], bool]) -> None:
        """Remove the files of unneeded copies; other processes on the host may remove them at the same time."""
        for path in self.folder.glob("start-*-rank-?????"):
            if is_unneeded(_copy_key(path)):
                path.unlink(missing_ok=True)

    def _make_folder(self) -> None:
        """Make the folder, create this process's mark file there, and remove half-written files of killed processes."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for half_path in self.folder.glob("*.half"):
                half_path.unlink(missing_ok=True)
            (self.folder / f"mark-{self._start_time}-{process_index()}").touch()
        except OSError as error:
            raise UserError(
                f"checkpoint.memory_every: cannot write to {self.folder} ({error.strerror}); set {FOLDER_VARIABLE} to "
                "a folder in memory"
            ) from None

    def _host_of_each_process(self) -> list[int]:
        """Return the host of each process: the rank of the host's first process, known from the folder's mark files."""
        import jax

        if jax.process_count() == 1:
            return [0]
        from jax.experimental.multihost_utils import process_allgather

        marks = [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"mark-{self._start_time}-*")]
        return process_allgather(np.int32(min(marks))).tolist()

    def _check_space(self) -> None:
        """Raise UserError if the file system has no space for the copies that are kept and a new one."""
        copy_bytes = 0
        for abstract_leaf in self._abstract_leaves.values():
            own_host = self._host_by_process[process_index()]
            regions = {
                region_of(index, abstract_leaf.shape)
                for device, index in abstract_leaf.sharding.devices_indices_map(abstract_leaf.shape).items()
                if self._host_by_process[device.process_index] == own_host
            }
            copy_bytes += sum(element_count(region) for region in regions) * np.dtype(abstract_leaf.dtype).itemsize
        used_bytes = 0
        for path in self.folder.glob("start-*"):
            with contextlib.suppress(OSError):  # another process may remove it
                used_bytes += path.stat().st_size
        free_bytes = shutil.disk_usage(self.folder).free + used_bytes
        if (KEPT + 1) * copy_bytes > free_bytes:
            raise UserError(
                f"checkpoint.memory_every: {KEPT + 1} copies of {size(copy_bytes)} do not fit into "
                f"{self.folder.parent}, which has {size(free_bytes)}: enlarge it (docker --shm-size, a pod's emptyDir "
                f"with medium Memory), set {FOLDER_VARIABLE} to another folder in memory, or set "
                "checkpoint.memory_every to 0"
            )

    # -- reading -------------------------------------------------------------------------------------------------------

    def restore_arrays(self, abstract_leaves: Mapping[str, Any], newest_step: int, step_count: int) -> Restored | None:
        """Restore the newest complete copy: every host must have the parts that its devices need.

        Only copies of the last recorded start are read, and only those that have exactly the requested arrays. The
        layout of quantized state, for instance, may depend on the mesh, and only checkpoints convert it.

        Args:
            abstract_leaves: shape, dtype and sharding of each array to read, by name.
            newest_step: step of the newest checkpoint; copies that are not newer are not read.
            step_count: number of steps of the run; copies of the last step and of later ones are not read.

        Returns:
            The copy; `None` if there is none.
        """
        import jax

        copies = {
            key: copy
            for key, copy in self._read_copies().items()
            if key[0] == self._last_start
            and key[1] < step_count
            and key[1] > newest_step >= copy.newest_checkpoint
            and set(copy.parts) == set(abstract_leaves)
            and all(is_covered(leaf, copy.parts[name]) for name, leaf in abstract_leaves.items())
        }
        newest_key = max(_common_keys(sorted(copies)), default=None)
        if newest_key is None:
            return None
        parts = {
            name: [part for part in copies[newest_key].parts[name] if belongs_to(part, leaf)]
            for name, leaf in abstract_leaves.items()
        }

        def read_arrays() -> dict[str, Any]:
            """Return the arrays, by name; each process reads only the shards of its own devices."""
            return {
                name: jax.make_array_from_callback(
                    leaf.shape,
                    leaf.sharding,
                    lambda index, leaf=leaf, name=name: assemble(parts[name], region_of(index, leaf.shape), leaf.dtype),
                )
                for name, leaf in abstract_leaves.items()
            }

        arrays = call_on_all(read_arrays, LookupError)
        return Restored(copies[newest_key].description, arrays, origin=", from the copy in the hosts' memory")

    def _read_copies(self) -> dict[CopyKey, "_Copy"]:
        """Return the copies on this host, by key; damaged files are left out."""
        copy_by_key: dict[CopyKey, _Copy] = {}
        for path in sorted(self.folder.glob("start-*-rank-?????")):
            header = _read_header(path)
            if header is None:
                continue
            copy = copy_by_key.setdefault(_copy_key(path), _Copy(header.description, header.newest_checkpoint))
            for name, shape, region, dtype, position in header.parts:
                copy.parts.setdefault(name, []).append(StoredPart(shape, region, dtype, path, position))
        return copy_by_key


@dataclasses.dataclass(frozen=True)
class _Header:
    """The header of a file of a copy, which lies at the end of the file.

    Args:
        description: the description of the state.
        newest_checkpoint: step of the run's newest checkpoint when the copy was taken.
        parts: the parts of arrays in the file.
    """

    description: Description
    newest_checkpoint: int
    parts: tuple[_Part, ...]


@dataclasses.dataclass(frozen=True)
class _Copy:
    """The parts of a copy that lie on this host.

    Args:
        description: the description of the state.
        newest_checkpoint: step of the newest checkpoint when the copy was taken.
        parts: parts of the arrays, by the arrays' names.
    """

    description: Description
    newest_checkpoint: int
    parts: dict[str, list[StoredPart]] = dataclasses.field(default_factory=dict)


def _copy_key(path: Path) -> CopyKey:
    """Return the key of the copy that a file belongs to."""
    _, start_time, _, step, _, _ = path.name.split("-")
    return int(start_time), int(step)


def _copies_root() -> Path:
    """Return the folder that holds the copies of all runs on this host."""
    folder_name = os.environ.get(FOLDER_VARIABLE)
    return Path(folder_name) if folder_name else Path("/dev/shm") / f"jaxscale-{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class _Record:
    """The content of `RUN_FILE`: the run's number, its directory, and the time of the start with the last copies."""

    number: int
    directory: str
    start: int

    def __post_init__(self) -> None:
        if not (0 <= self.number <= MAX_INT32 and 0 <= self.start <= MAX_INT32):
            raise UserError(f"{RUN_FILE}: got {self.number} and {self.start}, expected 31-bit integers")


def _read_record(run_dir: Any) -> tuple[int, int]:
    """Return (number of a run, start time of its last copies) on the first process, and (0, 0) on all others."""
    if not is_first():
        return 0, 0
    try:
        record = from_json(_Record, read_json(run_dir / RUN_FILE))
        if record.directory == str(run_dir):
            return record.number, record.start
    except UserError:
        pass  # the file is missing or damaged: with a new number, no copy is read
    number = secrets.randbelow(2**31)
    _write_record(run_dir, number, 0)
    return number, 0


def _write_record(run_dir: Any, number: int, start_time: int) -> None:
    """Write the number of a run, and the start time of its last copies, to the run directory."""
    with explain_write_errors(run_dir):
        write_json(run_dir / RUN_FILE, {"number": number, "directory": str(run_dir), "start": start_time})


def forget_copies(run_dir: Any) -> None:
    """Remove the record of a run's copies, so that no later start of the run reads them."""
    path = run_dir / RUN_FILE
    if is_first() and path.exists():
        with explain_write_errors(run_dir):
            path.unlink()


def _common_keys(keys: Sequence[CopyKey]) -> set[CopyKey]:
    """Return the keys that every process has among its eight newest ones."""
    import jax

    if jax.process_count() == 1:
        return set(keys)
    from jax.experimental.multihost_utils import process_allgather

    padded_keys = np.full((8, 2), -1, np.int32)
    padded_keys[: len(keys[-8:])] = np.reshape(keys[-8:], (-1, 2))
    tables = process_allgather(padded_keys).tolist()
    return set.intersection(*({(start_time, step) for start_time, step in table} for table in tables)) - {(-1, -1)}


def _read_header(path: Path) -> _Header | None:
    """Return the header of a file; `None` if the file is damaged, or of another version."""
    try:
        with path.open("rb") as file:
            array_bytes = file.seek(-12, os.SEEK_END)
            trailer = file.read()
            header_length = int.from_bytes(trailer[:8], "little")
            if header_length > array_bytes:
                return None
            array_bytes = file.seek(-12 - header_length, os.SEEK_END)
            header_bytes = file.read(header_length)
        if zlib.crc32(header_bytes) != int.from_bytes(trailer[8:], "little"):
            return None
        content = parse_json(header_bytes, "the header")
        content_by_field: dict[str, Any] = content if isinstance(content, dict) else {}
        parts = load(content_by_field.get("parts"), tuple[_Part, ...], "parts")
    except (OSError, UserError):
        return None
    description, newest_checkpoint = content_by_field.get("description"), content_by_field.get("newest_checkpoint")
    if not isinstance(description, dict) or invalid_fields(description) or type(newest_checkpoint) is not int:
        return None
    if not all(_is_in_file(part, array_bytes) for part in parts):
        return None
    return _Header(Description.of(description), newest_checkpoint, parts)


def _is_in_file(part: _Part, array_bytes: int) -> bool:
    """Return whether a part is a region of its array, and its bytes lie within the first `array_bytes` of the file."""
    _, shape, region, dtype_name, position = part
    if len(region) != len(shape):
        return False
    if not all(0 <= start <= end <= dim_size for (start, end), dim_size in zip(region, shape, strict=True)):
        return False
    dtype = dtype_of(dtype_name)
    return dtype is not None and 0 <= position <= array_bytes - element_count(region) * dtype.itemsize
