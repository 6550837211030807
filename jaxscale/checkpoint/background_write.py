"""Leaves the cores and the memory to the steps while Orbax writes a checkpoint in the background (Linux).

TensorStore copies the whole state into the page cache by one thread. That thread gets a low priority, so that it takes
the time that the steps leave; it gets the normal one again when somebody waits for the save, if the system permits. And
the pages are written out and dropped while the file grows, so that its next pages are those just dropped. In a virtual
machine, whose host must first provide fresh pages, the threads that write 0.93 GB then take 0.24 to 0.52 s of processor
time instead of 1.9 to 2.2 s (two cores of an AMD EPYC (Zen 5), 2026-11-30; `experiments/benchmarks/checkpoint.py`
measures it), and the page cache keeps what it held, such as the training data. Durability does not depend on it:
TensorStore still calls `fsync` before Orbax commits.

References:
    sched(7): on Linux, threads have a nice value of their own; sync_file_range(2) and posix_fadvise(2), Linux manual
    pages.
"""

import contextlib
import ctypes
import glob
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

UNFINISHED_MARK = ".orbax-checkpoint-tmp"
"""Text in the names of folders that Orbax has not committed yet."""
NICENESS = 15
"""Added to the nice value of threads that write; such a thread gets 3.4 % of a core that a step wants (36 / 1060)."""
_WRITER_NAME = "ts_"
"""Start of the names of TensorStore's threads."""
_MIN_BYTES = 64 << 20
"""Smaller states are written at once, at normal priority."""
_WINDOW_BYTES = 16 << 20
_PAUSE_S, _LOOK_S = 0.004, 0.05
_START, _WAIT = 2, 1 | 2 | 4
"""Flags of sync_file_range: start to write pages out; wait until they are written."""


class BackgroundWrite:
    """The future of a save, whose threads have a low priority until somebody waits for it.

    Args:
        save: Orbax's future.
        path: folder of the checkpoint.
        byte_count: bytes of the arrays.
    """

    def __init__(self, save: Any, path: Any, byte_count: int) -> None:
        self._save = save
        self._is_awaited = False
        if sys.platform == "linux" and "://" not in str(path) and byte_count >= _MIN_BYTES:
            threading.Thread(target=self._follow, args=(Path(path),), name="write-behind", daemon=True).start()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the save; without a limit, at normal priority.

        Args:
            timeout: seconds to wait; `None` waits until the save is done.

        Raises:
            TimeoutError: the save is not done.
        """
        if timeout is None and not self._is_awaited:
            self._is_awaited = True
            set_writers_niceness(0)
        return self._save.result(timeout=timeout)

    def _is_done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        try:
            self._save.result(timeout=0)
        except TimeoutError:
            return False
        except Exception:
            return True  # `result` raises it again for those who wait
        return True

    def _follow(self, path: Path) -> None:
        """Lower the priority of the threads that write, and drop the pages of what they have written, until the end."""
        files: dict[str, _GrowingFile] = {}
        pattern = f"{glob.escape(str(path))}{UNFINISHED_MARK}*/*/ocdbt.process_*/d/*"
        look_time = 0.0
        try:
            while not self._is_done():
                if time.monotonic() >= look_time:
                    look_time = time.monotonic() + _LOOK_S
                    if not self._is_awaited:
                        set_writers_niceness(NICENESS)
                    for name in set(glob.iglob(pattern)) - files.keys():
                        with contextlib.suppress(OSError):
                            files[name] = _GrowingFile(name)
                for file in files.values():
                    file.drop_written()
                time.sleep(_PAUSE_S)
        except OSError:  # a file system without these calls: the save goes on without them
            return
        finally:
            for file in files.values():
                os.close(file.descriptor)


class _GrowingFile:
    """A file that another thread appends to, whose pages are written out and dropped."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.open(name, os.O_RDONLY)
        self._started = self._dropped = 0  # bytes whose write-out has started, and that were dropped

    def drop_written(self) -> None:
        """Start to write out what was appended, and drop what was started in the last call."""
        size = os.fstat(self.descriptor).st_size
        if size - self._started < _WINDOW_BYTES:
            return
        _sync_range(self.descriptor, self._started, size, _START)
        if self._started > self._dropped:
            _sync_range(self.descriptor, self._dropped, self._started, _WAIT)
            length = self._started - self._dropped
            os.posix_fadvise(self.descriptor, self._dropped, length, os.POSIX_FADV_DONTNEED)
            self._dropped = self._started
        self._started = size


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


def writer_ids() -> list[int]:
    """Return the ids of TensorStore's threads in this process."""
    thread_ids: list[int] = []
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/self/task/{thread_id}/comm").read_text().startswith(_WRITER_NAME):
                thread_ids.append(int(thread_id))
    return thread_ids


def set_writers_niceness(niceness: int) -> None:
    """Set the nice value of TensorStore's threads, relative to that of the process.

    Without privileges a nice value cannot be decreased again, and stays.

    Args:
        niceness: number to add to the process's own nice value.
    """
    if sys.platform != "linux":
        return
    nice_value = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness)
    for thread_id in writer_ids():
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, thread_id) != nice_value:
                os.setpriority(os.PRIO_PROCESS, thread_id, nice_value)
