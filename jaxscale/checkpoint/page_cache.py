"""Writes out and drops the pages of a checkpoint's files while TensorStore appends to them in the background (Linux).

TensorStore copies the whole state into the page cache. If its pages are written out and dropped while a file grows, the
next pages are those just dropped. In a virtual machine, whose host must first provide fresh pages, that saves most of
the processor time of the threads that write (`experiments/benchmarks/checkpoint.py` measures it), and the page cache
keeps what it held, such as the training data. A restore right after the save reads from the disk. Durability does not
depend on it: TensorStore still calls `fsync` before Orbax commits.

References:
    sync_file_range(2), posix_fadvise(2): Linux manual pages.
"""

import contextlib
import ctypes
import glob
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale.checkpoint.mirror import UNFINISHED_MARK

_MIN_BYTES = 64 << 20
"""Smaller states are left to the system."""
_WINDOW_BYTES = 16 << 20
_PAUSE_S, _LOOK_S = 0.004, 0.05
_QUIET_S = 2.0
"""A file that has not grown for this long is closed, and opened again if it grows."""
_LONGEST_QUIET_S = 600.0
"""The thread ends if no file has grown for this long, such as when other processes never finish."""
_START, _WAIT = 2, 1 | 2 | 4
"""Flags of sync_file_range: start to write pages out; wait until they are written."""


def drop_written_pages(has_ended: Callable[[], bool], path: Any, byte_count: int) -> None:
    """Start a thread that drops the pages of a running save from the page cache, once they are written, until its end.

    If the system refuses a call, the thread ends, and the save goes on without it.

    Args:
        has_ended: function that returns whether the save has ended, with or without an error.
        path: folder of the checkpoint; buckets are not followed.
        byte_count: bytes that this process writes; a small number is not followed.
    """
    import jax

    if sys.platform != "linux" or "://" in str(path) or byte_count < _MIN_BYTES:
        return
    data_folder = f"*/ocdbt.process_{jax.process_index()}/d/*"  # others may write on the same file system
    prefix = glob.escape(str(path))
    patterns = (f"{prefix}{UNFINISHED_MARK}*/{data_folder}", f"{prefix}/{data_folder}")
    thread = threading.Thread(target=_follow, args=(has_ended, patterns), name="drop-written-pages", daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no thread left
        thread.start()


def _follow(has_ended: Callable[[], bool], patterns: tuple[str, ...]) -> None:
    """Drop what a save has written to the files that match the patterns, until it ends; then the rest of them."""
    files: dict[str, _GrowingFile] = {}  # those that are open, by their names, which stay when the folder is renamed
    closed_sizes: dict[str, int] = {}  # bytes of each file when it was closed
    look_time, growth_time = 0.0, time.monotonic()
    try:
        while not has_ended() and time.monotonic() < growth_time + _LONGEST_QUIET_S:
            if time.monotonic() >= look_time:
                _open_grown(patterns, files, closed_sizes)
                look_time = time.monotonic() + _LOOK_S
            for name, file in list(files.items()):
                file.drop_written()
                growth_time = max(growth_time, file.growth_time)
                if time.monotonic() >= file.growth_time + _QUIET_S:
                    closed_sizes[name] = file.drop_rest()
                    os.close(files.pop(name).descriptor)
            time.sleep(_PAUSE_S)
        _open_grown(patterns, files, closed_sizes)
        for file in files.values():
            file.drop_rest()
    except OSError:  # a file system without these calls, or no descriptor left
        return
    finally:
        for file in files.values():
            with contextlib.suppress(OSError):
                os.close(file.descriptor)


def _open_grown(patterns: tuple[str, ...], files: dict[str, "_GrowingFile"], closed_sizes: dict[str, int]) -> None:
    """Add to `files` those that match the patterns and hold more bytes than when they were closed."""
    for path in map(Path, (path for pattern in patterns for path in glob.iglob(pattern))):
        closed_size = closed_sizes.get(path.name, 0)
        with contextlib.suppress(FileNotFoundError):  # Orbax has just renamed the folder
            if path.name not in files and path.stat().st_size > closed_size:
                files[path.name] = _GrowingFile(path, closed_size)


class _GrowingFile:
    """A file that another thread appends to, whose pages are written out and dropped.

    Args:
        path: path of the file.
        start: offset in bytes from which on its pages are dropped.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.growth_time = time.monotonic()  # when it was last found larger, in seconds
        # offsets: the end of the file, of what is being written out, and of what was dropped
        self._byte_count = self._written_stop = self._dropped_stop = start

    def drop_written(self) -> None:
        """Start to write out what was appended, and drop what was started in the last call."""
        byte_count = self._grow()
        if byte_count - self._written_stop < _WINDOW_BYTES:
            return
        _sync_range(self.descriptor, self._written_stop, byte_count, _START)
        self._drop(self._written_stop)
        self._written_stop = byte_count

    def drop_rest(self) -> int:
        """Write out and drop all that the file holds; return its bytes."""
        self._drop(self._grow())
        self._written_stop = self._dropped_stop
        return self._dropped_stop

    def _grow(self) -> int:
        """Return the bytes of the file, and record whether it has grown."""
        byte_count = os.fstat(self.descriptor).st_size
        if byte_count > self._byte_count:
            self._byte_count, self.growth_time = byte_count, time.monotonic()
        return byte_count

    def _drop(self, stop: int) -> None:
        """Wait until the pages up to an offset are written, and drop them."""
        if stop > self._dropped_stop:
            _sync_range(self.descriptor, self._dropped_stop, stop, _WAIT)
            os.posix_fadvise(self.descriptor, self._dropped_stop, stop - self._dropped_stop, os.POSIX_FADV_DONTNEED)
            self._dropped_stop = stop


def _sync_range(descriptor: int, start: int, stop: int, flags: int) -> None:
    """Call sync_file_range(2), which Python lacks.

    Raises:
        OSError: the file system does not support it.
    """
    try:
        sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
    except AttributeError as error:
        raise OSError("the C library has no sync_file_range") from error
    if sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), ctypes.c_uint(flags)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
