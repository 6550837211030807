"""Find the files of a path, and read their text, with checks.

A path is a file, a glob, or either of them with a scheme (`gs://`, `s3://`), which is opened by etils.epath. One file
at a time is in memory whole. Bytes are unchanged: no newline is translated, no byte order mark is dropped.
"""

import glob
import hashlib
import os
import pathlib
from typing import Any

from jaxscale.errors import UserError, near_miss

_WILDCARDS = "*?["


def locate(path: str) -> Any:
    """Return the path as an object with `read_bytes` and `glob`: pathlib's, or etils.epath's if it has a scheme."""
    if "://" not in path:
        return pathlib.Path(path)
    from etils import epath

    return epath.Path(path)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the path as text that does not depend on the working directory.

    Example:
        >>> absolute("gs://bucket/a.txt")
        'gs://bucket/a.txt'
    """
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def find(paths: tuple[str, ...]) -> list[str]:
    """Return the files of paths and globs, in the order of the paths; the files of one glob are sorted by name.

    Raises:
        UserError: a path does not exist (the message suggests a similar name), is a folder, or is a glob that matches
            no file.
    """
    return [name for path in paths for name in _expand(path)]


def _expand(path: str) -> list[str]:
    """Return the files of one path or glob."""
    location = locate(path)
    if _call_with_client(path, location.is_file):
        return [path]
    if _call_with_client(path, location.is_dir):
        raise UserError(f"{path} is a folder, expected text files: give a glob such as {path}/*.txt")
    if any(wildcard in path for wildcard in _WILDCARDS):
        names = sorted(name for name in _glob(path) if locate(name).is_file())
        if not names:
            raise UserError(f"no file matches {path}: expected at least one; check the folder and the pattern")
        return names
    folder = location.parent
    sibling_names = [entry.name for entry in folder.iterdir()] if _call_with_client(path, folder.is_dir) else []
    folder_note = "" if sibling_names else f" (its folder {folder} is missing or empty)"
    raise UserError(f"no such file: {path}{folder_note}{near_miss(location.name, sibling_names)}")


def _glob(path: str) -> list[str]:
    """Return the paths that match a glob, with or without a scheme."""
    if "://" not in path:
        return glob.glob(path, recursive=True)
    scheme, _, pattern = path.partition("://")
    path_parts = pattern.split("/")
    wildcard_index = next(i for i, part in enumerate(path_parts) if any(wildcard in part for wildcard in _WILDCARDS))
    root = locate(f"{scheme}://{'/'.join(path_parts[:wildcard_index])}")
    return [os.fspath(name) for name in root.glob("/".join(path_parts[wildcard_index:]))]


def _call_with_client(path: str, action: Any) -> Any:
    """Return `action()`; if the client of a remote file system is not installed, raise an error that names it."""
    try:
        return action()
    except ImportError as error:
        raise UserError(f"{path} needs another package ({error}): pip install 'jaxscale[remote]'") from error


def read(path: str) -> bytes:
    """Read the bytes of one file."""
    try:
        return _call_with_client(path, locate(path).read_bytes)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check that this user may read it") from error


def digest(content: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def decode(content: bytes, path: str) -> str:
    """Decode the text of a file from its bytes.

    Raises:
        UserError: the file is empty, binary (holds a NUL byte), or not UTF-8; the message names the byte's offset.

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
