"""Checks that the files of a checkpoint can be read at all, before Orbax opens them and waits for a pipe without end.

A device such as /dev/zero never ends, either, and a description of gigabytes would fill the memory of the host.
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

_REMOVALS = 20
_REMOVAL_PAUSE_S = 0.1


def check_kinds(checkpoint: Any) -> None:
    """Check that a checkpoint has folders and regular files alone, and no description of more bytes than a bound.

    Args:
        checkpoint: folder of the checkpoint; one in a bucket is not checked, since objects are always regular.

    Raises:
        UserError: a file is a device, a pipe or a socket, or is too large.
        OSError: a file or folder cannot be reached, as one that may not be read, or a link to itself.

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
            os.stat(os.path.join(folder, name))  # a link that leads nowhere is listed, too
        max_bytes = None if Path(folder).name == ARRAY_FOLDER else MAX_JSON_BYTES
        for name in file_names:
            check_regular(os.path.join(folder, name), max_bytes)


def remove(path: Any) -> None:
    """Remove a folder, or the file or link in its place, if there is one.

    Threads of a save that failed may still write into the folder, so it is removed again while new files appear.
    """
    if not is_remote(path) and (os.path.islink(path) or not path.is_dir()):
        path.unlink(missing_ok=True)
        return
    for attempt in range(_REMOVALS):
        try:
            path.rmtree(missing_ok=True)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == _REMOVALS - 1:
                raise
            time.sleep(_REMOVAL_PAUSE_S)
        else:
            return


def _raise(error: OSError) -> None:
    """Raise an error that `os.walk` would pass over."""
    raise error
