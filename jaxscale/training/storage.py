"""Where a run's files lie: a local folder, or a bucket (gs://, s3://) through etils.epath.

Objects in a bucket cannot be appended to. `open_append` is the one place that knows: for a bucket it keeps the file in
memory and uploads the whole of it every `UPLOAD_SECONDS`, on `flush` and on close. A run flushes its log before it
saves a checkpoint, so one that is killed loses no line that it does not write again. It leaves out locking: one process
writes a run's log.

What is proven (tests/training/test_storage.py): a run in a bucket trains, is stopped, continues past a damaged
checkpoint, generates, is evaluated, and makes way for a new one. Its checkpoints go to gs:// through TensorStore's own
driver, over HTTP to a server on the same machine that speaks its part of Google's JSON API; to s3:// by way of a local
folder (`mirror`). All else goes through epath to an fsspec file system that has an object store's manners: there is no
folder without an object in it. What is not: gcsfs and s3fs themselves, the buckets of Google and Amazon, their
credentials, errors and speed, and several processes in one bucket.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

UPLOAD_SECONDS = 30.0
"""Seconds between two uploads of a file that is appended to in a bucket."""


def is_remote(path: Any) -> bool:
    """Whether `path` lies in a bucket.

    Example:
        >>> is_remote("gs://bucket/run"), is_remote("runs/a")
        (True, False)
    """
    return "://" in os.fspath(path)


def run_path(path: Any) -> Any:
    """The path object of a run's folder: `pathlib.Path`, or `etils.epath.Path` for a bucket, which behaves alike.

    Example:
        >>> run_path("runs/a").name
        'a'
    """
    if not is_remote(path):
        return Path(path)
    from etils import epath

    return epath.Path(path)


class LocalAppender:
    """Every write goes to the operating system at once: SIGKILL tears at most the line being written."""

    def __init__(self, path: Path):
        self.path = path
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends `data`, in as many writes as the system takes."""
        with _naming(self.path):
            while data:
                data = data[self._file.write(data) :]

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RemoteAppender:
    """Holds an object whole, and uploads it again as it grows."""

    def __init__(self, path: Any):
        self.path = path
        self._data = bytearray(path.read_bytes() if path.exists() else b"")
        self._stored, self._tried = len(self._data), time.monotonic()

    def write(self, data: bytes) -> None:
        """Appends `data`, and uploads when it is time."""
        self._data += data
        if time.monotonic() - self._tried >= UPLOAD_SECONDS:
            self._tried = time.monotonic()
            # a bucket out of reach for a moment should not end the run: the next upload has it all, or close raises
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Uploads what is not there yet."""
        if self._stored < len(self._data):
            with _naming(self.path):
                self.path.write_bytes(bytes(self._data))
            self._stored, self._tried = len(self._data), time.monotonic()

    def close(self) -> None:
        """Uploads what is left."""
        self.flush()


Appender = LocalAppender | RemoteAppender


def open_append(path: Any) -> Appender:
    """Opens a file to append bytes to, wherever it lies.

    Raises:
        OSError: with the path as its `filename`, from here or from a later write: the disk is full, or read-only.
    """
    return RemoteAppender(run_path(path)) if is_remote(path) else LocalAppender(run_path(path))


class _naming:  # noqa: N801 - reads as the statement it is
    """Puts the path into an OSError that has none, as those of `write` have not."""

    def __init__(self, path: Any):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(self.path)) from error
