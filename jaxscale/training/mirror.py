"""Checkpoints in a bucket that Orbax cannot reach: it writes to a local folder, which is copied to the bucket.

Orbax knows local folders and gs://. For the others (s3://) a checkpoint is written to a temporary folder (TMPDIR) and
uploaded in the background, the file that commits it last; to be read it is downloaded. It leaves out several processes:
their parts are on disks of several machines, where Orbax cannot join them.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxscale.training.storage import is_remote

COMMITTED = "commit_success.txt"
"""The file whose presence makes a folder a checkpoint, whatever wrote it."""


def is_mirrored(path: Any) -> bool:
    """Whether checkpoints get to `path` by way of a local folder.

    Example:
        >>> [is_mirrored(path) for path in ("runs/a", "gs://bucket/a", "s3://bucket/a")]
        [False, False, True]
    """
    return is_remote(path) and not str(path).startswith("gs://")


class Upload:
    """A save to a local folder that goes on to a bucket.

    Args:
        saving: what Orbax is doing: its `result()` waits for it.
        local: the folder it writes; it is removed in the end.
        there: where it goes.
    """

    def __init__(self, saving: Any, local: Path, there: Any) -> None:
        self._saving, self._local, self._there = saving, local, there
        thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._done = thread.submit(self._run)
        thread.shutdown(wait=False)  # it takes nothing more; what was submitted goes on

    def _run(self) -> None:
        try:
            self._saving.result()
            files = [file for file in self._local.rglob("*") if file.is_file()]
            for file in sorted(files, key=lambda file: file.name == COMMITTED):
                _copy(file, self._there / file.relative_to(self._local).as_posix())
        finally:
            shutil.rmtree(self._local.parent, ignore_errors=True)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the upload.

        Raises:
            TimeoutError: it goes on.
        """
        self._done.result(timeout)


def staging(path: Any) -> Path:
    """A new local path with the name of `path`, for `Upload`."""
    return Path(tempfile.mkdtemp(prefix="jaxscale-checkpoint-")) / path.name


@contextlib.contextmanager
def local_copy(path: Any, *, arrays: bool = True) -> Iterator[Any]:
    """The checkpoint at `path` as Orbax can read it: itself, or a copy that is removed afterwards.

    Args:
        path: of the checkpoint.
        arrays: copy their data too, and not only what describes them.
    """
    from etils import epath

    if not is_mirrored(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxscale-checkpoint-") as folder:
        here = Path(folder) / path.name
        _download(path, here, arrays)
        yield epath.Path(here)


def _download(there: Any, here: Path, arrays: bool) -> None:
    here.mkdir(parents=True)
    for item in there.iterdir():
        if not item.is_dir():
            _copy(item, here / item.name)
        elif arrays or item.name != "d":  # where Orbax's array store keeps its data
            _download(item, here / item.name, arrays)


def _copy(source: Any, target: Any) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 24)
