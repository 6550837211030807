"""Find the files that paths and globs denote, and read their text, with checks.

A path or glob may have a scheme (`gs://`, `s3://`); etils.epath opens such files. Files are read one at a time, each as
a whole, and their bytes stay unchanged: newlines are not translated, and a byte order mark is not dropped.
"""

import glob
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxscale.data import arrow
from jaxscale.errors import UserError, near_miss
from jaxscale.values.limits import MAX_NAME_BYTES
from jaxscale.values.read_files import is_name_too_long

SCHEMES = ("gs", "s3")
"""Schemes of the buckets from which data are read."""
_WILDCARDS = "*?["


def path_object(path: str) -> Any:
    """Return the path as a `pathlib.Path`; if it has a scheme, return an `etils.epath.Path`."""
    if "://" not in path:
        return pathlib.Path(path)
    scheme = path.partition("://")[0]
    if scheme not in SCHEMES:
        raise UserError(f"{path}: got the scheme {scheme!r}, expected a local path, gs:// or s3://")
    from etils import epath

    return epath.Path(path)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the path as text that does not depend on the working directory.

    Example:
        >>> absolute_path("gs://bucket/a.txt")
        'gs://bucket/a.txt'
    """
    path_text = os.fspath(path)
    return path_text if "://" in path_text else os.path.abspath(os.path.expanduser(path_text))


def find_files(paths: tuple[str, ...]) -> list[str]:
    """Return the files that paths and globs denote, in the order of `paths`; a glob's files are sorted by name.

    Raises:
        UserError: a path does not exist (the message suggests a similar name), is a folder, or is a glob that matches
            no file.
    """
    return [file for path in paths for file in _matching_files(path)]


def _matching_files(path: str) -> list[str]:
    """Return the files that one path or glob denotes."""
    location = path_object(path)
    if _call_with_client(path, location.is_file):
        return [path]
    if _call_with_client(path, location.is_dir):
        files = arrow.dataset_files(location, path)
        if files is not None:
            return files
        raise UserError(f"{path} is a folder, expected text files: give a glob such as {path}/*.txt")
    if any(wildcard in path for wildcard in _WILDCARDS):
        files = sorted(match for match in _glob(path) if path_object(match).is_file())
        if not files:
            raise UserError(f"no file matches {path}: expected at least one; check the folder and the pattern")
        return files
    if "://" not in path and os.path.exists(path):
        raise UserError(f"{path} is a device, a pipe or a socket, expected a file; copy its content to a file first")
    folder = location.parent
    sibling_names = [entry.name for entry in folder.iterdir()] if _call_with_client(path, folder.is_dir) else []
    folder_text = "" if sibling_names else f" (its folder {folder} is missing or empty)"
    raise UserError(f"no such file: {path}{folder_text}{near_miss(location.name, sibling_names)}")


def _glob(path: str) -> list[str]:
    """Return the paths that match a glob, with or without a scheme."""
    if "://" not in path:
        return glob.glob(path, recursive=True)
    scheme, _, pattern = path.partition("://")
    path_parts = pattern.split("/")
    wildcard_index = next(i for i, part in enumerate(path_parts) if any(wildcard in part for wildcard in _WILDCARDS))
    root = path_object(f"{scheme}://{'/'.join(path_parts[:wildcard_index])}")
    return [os.fspath(match) for match in root.glob("/".join(path_parts[wildcard_index:]))]


def _call_with_client(path: str, action: Callable[[], Any]) -> Any:
    """Return `action()`; raise UserError if a client package is missing or the remote path cannot be reached."""
    try:
        return action()
    except OSError as error:
        if not is_name_too_long(error):
            raise
        raise UserError(f"{path[:60]}...: the name of a file has at most {MAX_NAME_BYTES} bytes") from None
    except ImportError as error:
        raise UserError(f"{path} needs another package ({error}): pip install 'jaxscale[remote]'") from error
    except Exception as error:
        if "://" not in path:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be reached: {reason}; check the name, the network and the login") from error


def read(path: str) -> bytes:
    """Read the bytes of one file."""
    try:
        return _call_with_client(path, path_object(path).read_bytes)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check that this user may read it") from error


def digest(content: bytes) -> str:
    """Return the SHA-256 of the content in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def decode(content: bytes, path: str) -> str:
    """Return the text of a file, decoded from its bytes.

    Args:
        content: the bytes of the file.
        path: path of the file, for messages.

    Raises:
        UserError: the file is empty, binary (with a NUL byte), or not UTF-8; the message gives the bad byte's offset.

    Example:
        >>> decode("Où".encode(), "a.txt")
        'Où'
        >>> decode("Où".encode("latin-1"), "a.txt")
        Traceback (most recent call last):
        ...
        jaxscale.errors.UserError: a.txt is not UTF-8: byte 0xf9 at offset 1; convert it, e.g. with iconv -t utf-8
    """
    if not content or content.isspace():
        raise UserError(f"{path} is empty: expected text")
    if (offset := content.find(b"\0")) >= 0:
        raise UserError(f"{path} is binary: NUL byte at offset {offset}; expected UTF-8 text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise UserError(
            f"{path} is not UTF-8: byte 0x{byte:02x} at offset {error.start}; convert it, e.g. with iconv -t utf-8"
        ) from error
