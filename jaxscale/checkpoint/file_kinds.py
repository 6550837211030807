"""Checks the kinds and sizes of a checkpoint's files before Orbax opens them.

Orbax would wait forever for a pipe, read a device such as /dev/zero without end, and fill host memory with a
description of several gigabytes.
"""

import errno
import os
import time
from pathlib import Path
from typing import Any

from jaxscale.records.storage import is_remote
from jaxscale.values.limits import MAX_JSON_BYTES
from jaxscale.values.read_files import check_regular

ARRAY_FOLDER = "d"
"""Name of the folders in which Orbax keeps the arrays; all other files of a checkpoint are descriptions."""

_MAX_REMOVALS = 20
_REMOVAL_PAUSE_S = 0.1


def check_kinds(checkpoint: Any) -> None:
    """Check that a checkpoint has only folders and regular files, and no description larger than `MAX_JSON_BYTES`.

    Args:
        checkpoint: folder of the checkpoint; one in a bucket is not checked, since objects are always regular.

    Raises:
        UserError: a file is a device, a pipe or a socket, or is too large.
        OSError: a file or folder cannot be reached: it may not be read, or is a link to itself, for example.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "_METADATA").symlink_to("/dev/zero")
        >>> check_kinds(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: .../_METADATA is a device, expected a regular file; copy the content to a file first
    """
    if is_remote(checkpoint):
        return
    for folder, folder_names, file_names in os.walk(checkpoint, onerror=_raise):
        for name in folder_names:
            os.stat(os.path.join(folder, name))  # raises OSError for a broken link, which `os.walk` lists, too
        max_bytes = None if Path(folder).name == ARRAY_FOLDER else MAX_JSON_BYTES
        for name in file_names:
            check_regular(os.path.join(folder, name), max_bytes)


def remove(path: Any) -> None:
    """Remove the folder, file or link at a path, if there is one.

    Threads of a save that failed may still write into the folder, so it is removed again while new files appear.
    """
    if not is_remote(path) and (os.path.islink(path) or not path.is_dir()):
        path.unlink(missing_ok=True)
        return
    for attempt in range(_MAX_REMOVALS):
        try:
            path.rmtree(missing_ok=True)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == _MAX_REMOVALS - 1:
                raise
            time.sleep(_REMOVAL_PAUSE_S)
        else:
            return


def _raise(error: OSError) -> None:
    """Raise `error`; without this callback, `os.walk` ignores errors."""
    raise error
