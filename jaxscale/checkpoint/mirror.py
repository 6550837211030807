"""Checkpoints in a bucket that Orbax cannot access, through a local folder that is copied to and from the bucket.

Orbax supports local folders and gs://. For other buckets (s3://), a checkpoint is written to a temporary folder (in
TMPDIR) and uploaded in the background, with its commit file last. A checkpoint is downloaded before it is read. Several
processes are not supported, because Orbax cannot join shards that are on the disks of several machines.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxscale.records.storage import is_remote

COMMITTED = "commit_success.txt"
"""Name of the file that Orbax writes last; a folder without this file is not a checkpoint."""
UNFINISHED_MARK = ".orbax-checkpoint-tmp"
"""Text in the names of local folders that Orbax has not committed yet."""


def is_mirrored(path: Any) -> bool:
    """Return whether checkpoints at `path` are written and read through a local folder.

    Example:
        >>> [is_mirrored(path) for path in ("runs/a", "gs://bucket/a", "s3://bucket/a")]
        [False, False, True]
    """
    return is_remote(path) and not str(path).startswith("gs://")


def upload(orbax_save: Any, local_folder: Path, bucket_path: Any) -> Future[None]:
    """Start a background upload of a save's local folder to a bucket.

    Args:
        orbax_save: future of the save that Orbax is running.
        local_folder: the folder that Orbax writes; its parent folder is removed after the upload.
        bucket_path: path of the checkpoint in the bucket.

    Returns:
        A future that is done once the upload has finished.
    """

    def wait_and_upload() -> None:
        """Wait for the save, upload its files, and remove the local copies."""
        try:
            orbax_save.result()
            local_files = [local_file for local_file in local_folder.rglob("*") if local_file.is_file()]
            for local_file in sorted(local_files, key=lambda local_file: local_file.name == COMMITTED):
                _copy(local_file, bucket_path / local_file.relative_to(local_folder).as_posix())
        finally:
            shutil.rmtree(local_folder.parent, ignore_errors=True)

    executor = ThreadPoolExecutor(1, thread_name_prefix="upload")
    future = executor.submit(wait_and_upload)
    executor.shutdown(wait=False)  # the executor accepts no further tasks, but finishes the submitted one
    return future


def make_staging_path(path: Any) -> Path:
    """Create a temporary folder for `upload`; return a path in this folder with the last component of `path`."""
    return Path(tempfile.mkdtemp(prefix="jaxscale-checkpoint-")) / path.name


@contextlib.contextmanager
def local_copy(path: Any, *, with_arrays: bool = True) -> Iterator[Any]:
    """Provide a path from which Orbax can read a checkpoint, as a context manager.

    The value of the context is `path` itself, or the path of a local copy that is removed when the context ends.

    Args:
        path: path of the checkpoint.
        with_arrays: whether a local copy contains the arrays' data in addition to their description.
    """
    from etils import epath

    if not is_mirrored(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxscale-checkpoint-") as folder:
        copy_path = Path(folder) / path.name
        _download(path, copy_path, with_arrays)
        yield epath.Path(copy_path)


def _download(bucket_folder: Any, local_folder: Path, with_arrays: bool) -> None:
    """Copy a folder of a bucket to a local folder; if `with_arrays` is false, leave out the arrays' data."""
    local_folder.mkdir(parents=True)
    for path in bucket_folder.iterdir():
        if not path.is_dir():
            _copy(path, local_folder / path.name)
        elif with_arrays or path.name != "d":  # Orbax stores the arrays' data in the folder "d"
            _download(path, local_folder / path.name, with_arrays)


def _copy(source_path: Any, target_path: Any) -> None:
    """Copy a file to another path; either path may be local or in a bucket."""
    with source_path.open("rb") as reader, target_path.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 24)
