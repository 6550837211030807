"""Storage of a run's files, in a local folder or in a bucket (gs://, s3://) through etils.epath.

Objects in a bucket cannot be appended to. So for a bucket, `open_append` keeps the file in memory and uploads all of it
every `UPLOAD_SECONDS`, on `flush` and on close. A run flushes its log before it saves a checkpoint, so a killed run
loses only lines that it writes again. Locking is left out: one process writes a run's log.

Tests (tests/records/test_storage.py) train a run in a bucket, stop it, and continue it past a damaged checkpoint. They
generate text with it, evaluate it, and rename it for a new run. Its checkpoints go to gs:// through TensorStore's
driver, over HTTP to a server on the same machine that implements the required part of Google's JSON API. For s3:// they
go through a local folder (`mirror`). All other files go through epath to an fsspec file system that has, like an object
store, no empty folders. Not tested are gcsfs and s3fs themselves, the buckets of Google and Amazon with their
credentials, errors and speed, and several processes in one bucket.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UPLOAD_SECONDS = 30.0
"""Seconds between two uploads of a file that is appended to in a bucket."""


def is_remote(path: Any) -> bool:
    """Return whether `path` is in a bucket.

    Example:
        >>> is_remote("gs://bucket/run"), is_remote("runs/a")
        (True, False)
    """
    return "://" in os.fspath(path)


def run_path(path: Any) -> Any:
    """Return the path object of a run's folder: a `pathlib.Path`, or for a bucket the similar `etils.epath.Path`.

    Example:
        >>> run_path("runs/a").name
        'a'
    """
    if not is_remote(path):
        return Path(path)
    from etils import epath

    return epath.Path(path)


@contextlib.contextmanager
def _add_path_to_errors(path: Any) -> Iterator[None]:
    """Add the path to an OSError that the context raises without a path, such as one from `write`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


class LocalAppender:
    """Appends to a local file. Every write goes to the system at once, so a killed process tears at most one line."""

    def __init__(self, path: Path):
        self.path = path
        with _add_path_to_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append `data`, in as many writes as the system needs."""
        with _add_path_to_errors(self.path):
            while data:
                data = data[self._file.write(data) :]

    def flush(self) -> None:
        """Do nothing, because no data is buffered."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteAppender:
    """Appends to an object in a bucket: holds the whole object in memory, and uploads it again as it grows."""

    def __init__(self, path: Any):
        self.path = path
        self._data = bytearray(path.read_bytes() if path.exists() else b"")
        self._uploaded_bytes, self._last_try = len(self._data), time.monotonic()

    def write(self, data: bytes) -> None:
        """Append `data`, and upload the object if the last upload is long enough ago."""
        self._data += data
        if time.monotonic() - self._last_try >= UPLOAD_SECONDS:
            self._last_try = time.monotonic()
            # a short outage should not end the run: the next upload repeats all data, or close raises
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Upload the object if it has grown since the last upload."""
        if self._uploaded_bytes < len(self._data):
            with _add_path_to_errors(self.path):
                self.path.write_bytes(bytes(self._data))
            self._uploaded_bytes, self._last_try = len(self._data), time.monotonic()

    def close(self) -> None:
        """Upload what was not uploaded yet."""
        self.flush()


Appender = LocalAppender | RemoteAppender


def open_append(path: Any) -> Appender:
    """Open a file to append bytes to, local or in a bucket.

    Raises:
        OSError: the disk is full or read-only; `filename` is the path. Later writes may raise it too.
    """
    return RemoteAppender(run_path(path)) if is_remote(path) else LocalAppender(run_path(path))
