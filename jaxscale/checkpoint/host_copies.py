"""HostCopies: copies of a run's state in the memory of its hosts, from which a restart goes on where one is newer.

A copy costs no disk and no network, so that a run may take one every few steps. It outlives the processes, because it
is a file in a file system that Linux keeps in memory, and it is lost with its host. Each part of an array is written
once per host. After a restart, on the same number of devices or on another one, the processes take the newest copy of
which every host has the parts that its devices need; a host that is new has none. (Orbax's emergency
checkpoints serve restarts on as many devices as before, whose ids they put into the old order.)
"""

import contextlib
import dataclasses
import json
import math
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
"""File in the run directory: the number that the run's folders of copies have on all hosts, the directory itself, since
a directory may be copied, and the start that wrote the last copies."""
KEPT = 2
"""Number of copies: while the newest one is written, or if a process dies meanwhile, the one before is whole."""

Region = tuple[tuple[int, int], ...]
"""Start and end of a part of an array along each dim."""
_Part = tuple[str, tuple[int, ...], Region, str, int]
"""Name and shape of an array, the region of it that a file holds, its dtype, and its first byte in the file."""
CopyKey = tuple[int, int]
"""When the processes of a copy started, in seconds since 1970 by the first one's clock, and the copy's step. What one
start has written is never mixed with another's, which may have other devices and round differently."""


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A part of an array in a file.

    Args:
        shape: shape of the whole array.
        region: the region of the array.
        dtype: name of the array's dtype.
        path: the file.
        position: first byte in the file.
    """

    shape: tuple[int, ...]
    region: Region
    dtype: str
    path: Path
    position: int


class HostCopies:
    """The copies of one run in the memory of this host. Every process calls the same methods at the same steps.

    Args:
        run_dir: the run directory.
        leaves: shape, dtype and sharding of each array of the canonical tree, by name.

    Raises:
        UserError: there is no file system in memory, or it is too small for three copies.
    """

    def __init__(self, run_dir: Any, leaves: Mapping[str, Any]) -> None:
        self._run_dir, self._leaves = run_dir, leaves
        record = call_on_all(lambda: _read_record(run_dir), LookupError)
        # a later start has a later time, also if the clock of another first host is behind
        start_time = max(int(time.time()), record[1] + 1)
        self._number, self._last_start, self._start_time = send_from_first([*record, start_time])
        self.folder = _root() / str(self._number)
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._has_reported = False
        call_on_all(self._make_folder, LookupError)
        self._hosts = self._host_of_each_process()
        call_on_all(self._check_space, LookupError)

    # -- writing -------------------------------------------------------------------------------------------------------

    def save_arrays(self, arrays: Mapping[str, Any], description: Description, newest_checkpoint: int = 0) -> None:
        """Copy the parts that this process writes to the host, and write them in the background.

        The caller may donate the arrays once this method has returned.

        Args:
            arrays: the canonical tree.
            description: description of the copy.
            newest_checkpoint: step of the run's newest checkpoint; the copy is not read once this checkpoint and all
                newer ones are gone, as when a user goes back to an older one.
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
            _write_record(self._run_dir, self._number, self._start_time)
        # All processes have written the two copies before this one: each waited for its last but one before it took
        # part in the steps since, and these are done.
        keys = sorted(_key(path) for path in self.folder.glob(f"*-rank-{process_index():05d}"))
        if len(keys) >= KEPT:
            self._remove(lambda key: key < keys[-KEPT])
        header = {"description": dataclasses.asdict(description), "newest_checkpoint": newest_checkpoint}
        self._thread = threading.Thread(target=self._write, args=(parts, header), name="host copy")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the copy that is being written is whole."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def clear(self) -> None:
        """Remove the copies of the run on this host."""
        self.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _parts_to_write(self, array: Any) -> Iterator[tuple[Region, Any]]:
        """Yield each region of an array that this process writes with a shard: the first process of its host does."""
        shape, me = array.shape, process_index()
        writer_by_region: dict[Region, int] = {}
        for device, index in array.sharding.devices_indices_map(shape).items():
            process = device.process_index
            if self._hosts[process] == self._hosts[me]:
                region = _region(index, shape)
                writer_by_region[region] = min(process, writer_by_region.get(region, process))
        written: set[Region] = set()
        for shard in array.addressable_shards:
            region = _region(shard.index, shape)
            if writer_by_region[region] == me and region not in written:
                written.add(region)
                yield region, shard

    def _write(self, parts: Sequence[tuple[str, tuple[int, ...], Region, np.ndarray]], header: dict[str, Any]) -> None:
        """Write the file of this process; a full memory leaves the earlier copies.

        Args:
            parts: name and shape of an array, and a region of it with its values.
            header: the description and further facts, by their names.
        """
        path = self._file((self._start_time, header["description"]["step"]), process_index())
        half_path = path.with_suffix(".half")
        positions = np.cumsum([0, *(values.nbytes for *_, values in parts)]).tolist()
        header["parts"] = [
            [name, shape, region, str(values.dtype), position]
            for (name, shape, region, values), position in zip(parts, positions, strict=False)
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with half_path.open("wb") as file:
                for *_, values in parts:
                    file.write(values.reshape(-1).view(np.uint8).data)
                text = json.dumps(header).encode()
                file.write(text + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little"))
            half_path.replace(path)
        except OSError as error:
            self._error = error
            half_path.unlink(missing_ok=True)

    def _file(self, key: CopyKey, rank: int) -> Path:
        """Return the path of a process's file of a copy."""
        return self.folder / f"start-{key[0]:010d}-step-{key[1]:08d}-rank-{rank:05d}"

    def _remove(self, is_unneeded: Callable[[CopyKey], bool]) -> None:
        """Remove the files of unneeded copies; other processes of the host may do so, too."""
        for path in self.folder.glob("start-*-rank-?????"):
            if is_unneeded(_key(path)):
                path.unlink(missing_ok=True)

    def _make_folder(self) -> None:
        """Make the folder, leave a mark of this process there, and remove files that killed processes left half."""
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
        """Return the first process that shares its memory with a process, by the marks in the folder, for each."""
        import jax

        if jax.process_count() == 1:
            return [0]
        from jax.experimental.multihost_utils import process_allgather

        marks = [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"mark-{self._start_time}-*")]
        return process_allgather(np.int32(min(marks))).tolist()

    def _check_space(self) -> None:
        """Refuse a file system without room for the copies that are kept and a new one."""
        nbytes = 0
        for leaf in self._leaves.values():
            host = self._hosts[process_index()]
            regions = {
                _region(index, leaf.shape)
                for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
                if self._hosts[device.process_index] == host
            }
            nbytes += sum(_count(region) for region in regions) * np.dtype(leaf.dtype).itemsize
        used = 0
        for path in self.folder.glob("start-*"):
            with contextlib.suppress(OSError):  # another process may remove it
                used += path.stat().st_size
        free = shutil.disk_usage(self.folder).free + used
        if (KEPT + 1) * nbytes > free:
            raise UserError(
                f"checkpoint.memory_every: {KEPT + 1} copies of {size(nbytes)} do not fit into {self.folder.parent}, "
                f"which has {size(free)}: enlarge it (docker --shm-size, a pod's emptyDir with medium Memory), set "
                f"{FOLDER_VARIABLE} to another folder in memory, or set checkpoint.memory_every to 0"
            )

    # -- reading -------------------------------------------------------------------------------------------------------

    def restore_arrays(self, leaves: Mapping[str, Any], newer_than: int, before: int) -> Restored | None:
        """Restore the newest copy of which every host has what its devices need.

        Only copies of the start that wrote the last ones are read, and only those that hold exactly the arrays that are
        asked for: the layout of quantized state, for instance, may depend on the mesh, and checkpoints convert it.

        Args:
            leaves: shape, dtype and sharding of each array to read, by name.
            newer_than: step of the newest checkpoint; copies that are not newer are not read.
            before: number of steps of the run; copies of the last step and of later ones are not read.

        Returns:
            The copy; `None` if there is none.
        """
        import jax

        copies = {
            key: copy
            for key, copy in self._copies().items()
            if key[0] == self._last_start
            and key[1] < before
            and key[1] > newer_than >= copy.newest_checkpoint
            and set(copy.parts) == set(leaves)
            and all(_is_covered(leaf, copy.parts[name]) for name, leaf in leaves.items())
        }
        newest = max(_common(sorted(copies)), default=None)
        if newest is None:
            return None
        parts = {
            name: [part for part in copies[newest].parts[name] if _is_of(part, leaf)] for name, leaf in leaves.items()
        }

        def read() -> dict[str, Any]:
            """Read the arrays of this process's devices."""
            return {
                name: jax.make_array_from_callback(
                    leaf.shape,
                    leaf.sharding,
                    lambda index, leaf=leaf, name=name: _read(parts[name], _region(index, leaf.shape), leaf.dtype),
                )
                for name, leaf in leaves.items()
            }

        arrays = call_on_all(read, LookupError)
        return Restored(copies[newest].description, arrays, origin=", from the copy in the hosts' memory")

    def _copies(self) -> dict[CopyKey, "_Copy"]:
        """Return the copies on this host; torn files are left out."""
        copies: dict[CopyKey, _Copy] = {}
        for path in sorted(self.folder.glob("start-*-rank-?????")):
            header = _header(path)
            if header is None:
                continue
            copy = copies.setdefault(_key(path), _Copy(header.description, header.newest_checkpoint))
            for name, shape, region, dtype, position in header.parts:
                copy.parts.setdefault(name, []).append(StoredPart(shape, region, dtype, path, position))
        return copies


@dataclasses.dataclass(frozen=True)
class _Header:
    """What the end of a file of a copy holds.

    Args:
        description: the description of the state.
        newest_checkpoint: step of the run's newest checkpoint when the copy was taken.
        parts: parts of arrays.
    """

    description: Description
    newest_checkpoint: int
    parts: tuple[_Part, ...]


@dataclasses.dataclass(frozen=True)
class _Copy:
    """What a host has of a copy.

    Args:
        description: the description of the state.
        newest_checkpoint: step of the newest checkpoint when the copy was taken.
        parts: parts of the arrays, by the arrays' names.
    """

    description: Description
    newest_checkpoint: int
    parts: dict[str, list[StoredPart]] = dataclasses.field(default_factory=dict)


def _key(path: Path) -> CopyKey:
    """Return the key of the copy that a file belongs to."""
    _, start_time, _, step, _, _ = path.name.split("-")
    return int(start_time), int(step)


def _root() -> Path:
    """Return the folder of all runs' copies on this host."""
    folder_name = os.environ.get(FOLDER_VARIABLE)
    return Path(folder_name) if folder_name else Path("/dev/shm") / f"jaxscale-{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class _Record:
    """The content of `RUN_FILE`: the run's number, its directory, and the start that wrote the last copies."""

    number: int
    directory: str
    start: int

    def __post_init__(self) -> None:
        if not (0 <= self.number <= MAX_INT32 and 0 <= self.start <= MAX_INT32):
            raise UserError(f"{RUN_FILE}: got {self.number} and {self.start}, expected numbers of 31 bits")


def _read_record(run_dir: Any) -> tuple[int, int]:
    """Return the number of a run, and the start that wrote the last copies; the first process reads or draws them."""
    if not is_first():
        return 0, 0
    try:
        record = from_json(_Record, read_json(run_dir / RUN_FILE))
        if record.directory == str(run_dir):
            return record.number, record.start
    except UserError:
        pass  # there is none, or it is damaged: a new number means that no copy is read
    number = secrets.randbelow(2**31)
    _write_record(run_dir, number, 0)
    return number, 0


def _write_record(run_dir: Any, number: int, start_time: int) -> None:
    """Write the number of a run, and the start that wrote the last copies, to the run directory."""
    with explain_write_errors(run_dir):
        write_json(run_dir / RUN_FILE, {"number": number, "directory": str(run_dir), "start": start_time})


def forget_copies(run_dir: Any) -> None:
    """Let no later start of a run read its copies, as when it goes on without copies."""
    path = run_dir / RUN_FILE
    if is_first() and path.exists():
        with explain_write_errors(run_dir):
            path.unlink()


def _common(keys: Sequence[CopyKey]) -> set[CopyKey]:
    """Return the keys that all processes have, of the newest eight."""
    import jax

    if jax.process_count() == 1:
        return set(keys)
    from jax.experimental.multihost_utils import process_allgather

    padded = np.full((8, 2), -1, np.int32)
    padded[: len(keys[-8:])] = np.reshape(keys[-8:], (-1, 2))
    tables = process_allgather(padded).tolist()
    return set.intersection(*({(start_time, step) for start_time, step in table} for table in tables)) - {(-1, -1)}


def _header(path: Path) -> _Header | None:
    """Return the content at the end of a file that describes its parts; `None` if it is torn, or of another version."""
    try:
        with path.open("rb") as file:
            array_bytes = file.seek(-12, os.SEEK_END)
            tail = file.read()
            length = int.from_bytes(tail[:8], "little")
            if length > array_bytes:
                return None
            array_bytes = file.seek(-12 - length, os.SEEK_END)
            text = file.read(length)
        if zlib.crc32(text) != int.from_bytes(tail[8:], "little"):
            return None
        content = parse_json(text, "the header")
        fields: dict[str, Any] = content if isinstance(content, dict) else {}
        parts = load(fields.get("parts"), tuple[_Part, ...], "parts")
    except (OSError, UserError):
        return None
    description, newest_checkpoint = fields.get("description"), fields.get("newest_checkpoint")
    if not isinstance(description, dict) or invalid_fields(description) or type(newest_checkpoint) is not int:
        return None
    if not all(_is_in_file(part, array_bytes) for part in parts):
        return None
    return _Header(Description.of(description), newest_checkpoint, parts)


def _is_in_file(part: _Part, array_bytes: int) -> bool:
    """Return whether a part is a region of its array, whose bytes lie within the first `array_bytes` of the file."""
    _, shape, region, dtype_name, position = part
    if len(region) != len(shape):
        return False
    if not all(0 <= start <= end <= dim for (start, end), dim in zip(region, shape, strict=True)):
        return False
    dtype = dtype_of(dtype_name)
    return dtype is not None and 0 <= position <= array_bytes - _count(region) * dtype.itemsize


def _region(index: Any, shape: tuple[int, ...]) -> Region:
    """Return the region that a sharding's index selects of an array."""
    return tuple(part.indices(dim)[:2] for part, dim in zip(index, shape, strict=True))


def _count(region: Region) -> int:
    """Return the number of elements of a region."""
    return math.prod(end - start for start, end in region)


def _overlap(one: Region, other: Region) -> Region:
    """Return the region that two regions share; its ends may lie before its starts."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _is_of(part: StoredPart, leaf: Any) -> bool:
    """Return whether a part is one of an array of this shape and dtype."""
    return (part.shape, part.dtype) == (leaf.shape, str(leaf.dtype))


def _is_covered(leaf: Any, parts: Sequence[StoredPart]) -> bool:
    """Return whether parts of an array cover all that this process's devices hold of it."""
    regions = {part.region for part in parts if _is_of(part, leaf)}
    return all(
        _coverage(_region(index, leaf.shape), regions)
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    )


def _coverage(region: Region, pieces: set[Region]) -> bool:
    """Return whether pieces, of which no two overlap, cover a region."""
    overlaps = [_overlap(region, piece) for piece in pieces]
    return _count(region) == sum(_count(overlap) for overlap in overlaps if all(start < end for start, end in overlap))


def _read(parts: Sequence[StoredPart], region: Region, dtype: Any) -> np.ndarray:
    """Return a region of an array, read from the parts that cover it."""
    result = np.empty([end - start for start, end in region], dtype)
    for part in {part.region: part for part in parts}.values():
        overlap = _overlap(region, part.region)
        if all(start < end for start, end in overlap):
            shape = [end - start for start, end in part.region]
            stored = np.memmap(part.path, np.uint8, "r", part.position, (math.prod(shape) * result.itemsize,))
            source = np.asarray(stored).view(dtype).reshape(shape)
            source_slices = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, part.region, strict=True))
            slices = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, region, strict=True))
            result[slices] = source[source_slices]
    return result
