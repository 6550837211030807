"""The check that the experiment file of a run may be executed: this user has trained with it, or declared it trusted.

A run directory holds a copy of its experiment file, and opening the run executes the copy. A stranger's run could thus
execute any code. So a copy is executed only if a record outside of the run directory permits it. The record has the
SHA-256 of the file's text, and the folder whose modules and files the copy would use. `train` writes this record, and
so does `--trust`. With `JAXSCALE_TRUST=PATH`, the runs in that folder are trusted without records.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.records.storage import is_remote, write_whole

VARIABLE = "JAXSCALE_TRUST"
"""Environment variable with the path of a trusted run, or of a folder of trusted runs."""
_recorded_names: set[str] = set()
"""Names of the records that this process has made. They count even if their files could not be written."""


def record_trust(sha256: str, origin: Path) -> None:
    """Record that an experiment file may be executed.

    Args:
        sha256: SHA-256 of the file's text.
        origin: path under which the file runs.
    """
    record_name = _record_name(sha256, origin)
    _recorded_names.add(record_name)
    folder = _records_folder()
    with contextlib.suppress(OSError):  # without the record, a later command asks for --trust
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(folder / record_name):
            record_json = {"sha256": sha256, "folder": os.path.realpath(origin.parent), "file": origin.name}
            write_whole(folder / record_name, json.dumps(record_json) + "\n")
            (folder / record_name).chmod(0o600)  # by default, members of the user's group may be able to write files


def check_trust(sha256: str, origin: Path, run_folder: Any, copy: Any) -> None:
    """Refuse to execute an experiment file that the user has neither trained with nor declared to be trusted.

    Args:
        sha256: SHA-256 of the file's text.
        origin: path under which the file would run.
        run_folder: directory of the run.
        copy: path of the copied file.

    Raises:
        UserError: the file is not trusted.
    """
    record_name = _record_name(sha256, origin)
    if record_name in _recorded_names or is_below(run_folder, os.environ.get(VARIABLE, "")):
        return
    if _is_private(_records_folder()) and _is_private(_records_folder() / record_name):
        return
    raise UserError(
        f"{run_folder} was not trained here by you. To open it, jaxscale would execute {str(copy)!r}, with the modules "
        f"in {str(origin.parent)!r}; that code could do all that you can do. Read it first. If you trust it, use "
        f"--trust, Run.open(directory, trust=True) in Python, or {VARIABLE}={run_folder}"
    )


def is_below(path: Any, folder: str) -> bool:
    """Return whether `path` is `folder` or lies below it. Symbolic links in local paths are resolved.

    Example:
        >>> is_below("runs/a", "runs"), is_below("runs/../a", "runs"), is_below("gs://b/run", "gs://b/r")
        (True, False, False)
    """
    path_text = os.fspath(path)
    if not folder.strip() or "\0" in folder or is_remote(path_text) != is_remote(folder):
        return False
    if is_remote(path_text):
        path_parts, folder_parts = path_text.rstrip("/").split("/"), folder.rstrip("/").split("/")
    else:
        path_parts, folder_parts = (
            list(Path(os.path.realpath(path_text)).parts),
            list(Path(os.path.realpath(folder)).parts),
        )
    return ".." not in path_parts and path_parts[: len(folder_parts)] == folder_parts


def _records_folder() -> Path:
    """Return the folder of the records, in the user's cache.

    It does not depend on `JAXSCALE_CACHE`, because users may share that folder.
    """
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return Path(folder if os.path.isabs(folder) else Path("~/.cache").expanduser()) / "jaxscale" / "trusted"


def _record_name(sha256: str, origin: Path) -> str:
    """Return the name of a record: a hash over the text's SHA-256 and the resolved path of the file's folder."""
    return hashlib.sha256(f"{sha256}\0{os.path.realpath(origin.parent)}".encode()).hexdigest()


def _is_private(path: Path) -> bool:
    """Return whether a path exists, belongs to this user, and cannot be written to by other users."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
