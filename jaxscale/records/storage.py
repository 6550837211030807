"""Storage of a run's files, in a local folder or in a bucket (gs://, s3://) through etils.epath.

An object in a bucket cannot be appended to. So for a bucket, `open_append` keeps the file in memory and uploads the
whole file every `UPLOAD_SECONDS`, on `flush` and on close. A run flushes its log before it saves a checkpoint. So a
killed run loses only lines that the continued run writes again. Files are not locked, because only one process writes
a run's log.

Tests (tests/records/test_storage.py) start a run in a bucket, stop the run, and continue it past a damaged checkpoint.
They also generate text with the run, evaluate the run, and rename it for a new run. In these tests, checkpoints for
gs:// go through TensorStore's driver, over HTTP, to a server on the same machine, which implements the required part
of Google's JSON API. Checkpoints for s3:// go through a local folder (`mirror`). All other files go through epath to an
fsspec file system that, like an object store, has no empty folders. The tests do not cover gcsfs and s3fs themselves,
the buckets of Google and Amazon (credentials, errors, speed), or several processes in one bucket.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_NAME_BYTES
from jaxscale.values.read_files import check_own_file

BUCKET_SCHEMES = ("gs", "s3")
"""URL schemes of the buckets that can contain a run."""
UPLOAD_SECONDS = 30.0
"""Seconds between two uploads of a growing file to a bucket."""


def is_remote(path: Any) -> bool:
    """Return whether `path` is in a bucket.

    Example:
        >>> is_remote("gs://bucket/run"), is_remote("runs/a")
        (True, False)
    """
    return "://" in os.fspath(path)


def run_path(path: Any) -> Any:
    """Return a path object: an `etils.epath.Path` for a bucket, and a `pathlib.Path`, with similar methods, otherwise.

    Example:
        >>> run_path("runs/a").name
        'a'
    """
    if not is_remote(path):
        return Path(path)
    from etils import epath

    return epath.Path(path)


def check_location(path: Any) -> None:
    """Raise UserError if a path, local or in a bucket, cannot be a run directory. Call this before anything is traced.

    Raises:
        UserError: the path is empty or too long, has an unknown scheme, has a file as a parent, or is in a bucket that
            cannot be reached.

    Example:
        >>> check_location("http://host/run")
        Traceback (most recent call last):
        jaxscale.errors.UserError: http://host/run: got the scheme 'http', expected a local path, gs:// or s3://
    """
    path_text = os.fspath(path)
    if not path_text.strip() or "\0" in path_text:
        raise UserError(f"got the path {path_text!r}, expected the path of a folder, such as runs/first")
    try:
        os.fsencode(path_text)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise UserError(f"got the path {path_text!r}, which has a character that no file name can have") from None
    if is_remote(path_text):
        scheme = path_text.partition("://")[0]
        if scheme not in BUCKET_SCHEMES:
            raise UserError(f"{path_text}: got the scheme {scheme!r}, expected a local path, gs:// or s3://")
        try:
            run_path(path_text).exists()
        except ImportError as error:
            raise UserError(f"{path_text}: a package is missing ({error}): pip install 'jaxscale[remote]'") from None
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{path_text} cannot be reached: {reason}; check the name, the network and the login"
            ) from None
        return
    local_path = Path(path_text)
    longest_name = max(local_path.parts, key=lambda name: len(os.fsencode(name)), default="")
    if len(os.fsencode(longest_name)) > MAX_NAME_BYTES:
        byte_count = len(os.fsencode(longest_name))
        raise UserError(
            f"{path_text[:40]}...: a name in the path has {byte_count:,} bytes, expected at most {MAX_NAME_BYTES}"
        )
    for ancestor in (local_path, *local_path.parents):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(ancestor.stat().st_mode):
                return
            prefix = "" if ancestor == local_path else f"{path_text}: "
            raise UserError(f"{prefix}{ancestor} is a file, expected a folder; choose another path")


def write_whole(path: Any, content: str | bytes) -> None:
    """Write a file atomically: even if the process is killed, the file has either its old or its new content.

    The content is written to a temporary file, which is flushed to disk and then renamed. After a full disk or a loss
    of power, the old file remains. A bucket stores an object whole or not at all.

    Raises:
        OSError: the disk is full or read-only; `filename` is the path.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_whole(path, "new")
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('new', 1)
    """
    content_bytes = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(content_bytes)
        return
    temporary_path = path.with_name(f"{path.name}.half")
    try:
        with _add_path_to_errors(path), temporary_path.open("wb") as file:
            file.write(content_bytes)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary_path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _add_path_to_errors(path: Any) -> Iterator[None]:
    """Add a path to an OSError from the context that has no path, such as an error from `write`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


class LocalAppender:
    """Appends to a local file. Writes are not buffered, so a killed process leaves at most one incomplete line.

    Attributes:
        path: path of the file.

    Raises:
        UserError: the path is a folder, a device or a pipe, or a link to another file in the same folder.
    """

    def __init__(self, path: Path):
        self.path = path
        with _add_path_to_errors(path):
            check_own_file(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append `data`, in as many system calls as are necessary."""
        with _add_path_to_errors(self.path):
            remaining_data = data
            while remaining_data:
                remaining_data = remaining_data[self._file.write(remaining_data) :]

    def flush(self) -> None:
        """Do nothing, because no data is buffered."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteAppender:
    """Appends to an object in a bucket: keeps the whole object in memory, and repeatedly uploads it as it grows.

    Attributes:
        path: path of the object.
    """

    def __init__(self, path: Any):
        self.path = path
        self._data = bytearray(path.read_bytes() if path.exists() else b"")
        self._uploaded_byte_count, self._last_try_time = len(self._data), time.monotonic()

    def write(self, data: bytes) -> None:
        """Append `data`. Upload the object if the last attempt to upload was at least `UPLOAD_SECONDS` ago."""
        self._data += data
        if time.monotonic() - self._last_try_time >= UPLOAD_SECONDS:
            self._last_try_time = time.monotonic()
            # a short outage should not end the run: the next upload sends all data again; only `close` raises errors
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Upload the object if it has grown since the last upload."""
        if self._uploaded_byte_count < len(self._data):
            with _add_path_to_errors(self.path):
                self.path.write_bytes(bytes(self._data))
            self._uploaded_byte_count, self._last_try_time = len(self._data), time.monotonic()

    def close(self) -> None:
        """Upload the object if some of its data has not been uploaded yet."""
        self.flush()


Appender = LocalAppender | RemoteAppender


def open_append(path: Any) -> Appender:
    """Open a file, local or in a bucket, to which bytes can be appended.

    Raises:
        OSError: the disk is full or read-only; `filename` is the path. Later writes may also raise this error.
    """
    return RemoteAppender(run_path(path)) if is_remote(path) else LocalAppender(run_path(path))
