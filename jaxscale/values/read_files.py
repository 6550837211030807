"""Read files that other programs may have written: only regular files, of limited size, and JSON of limited depth.

A device such as /dev/zero never ends, and a pipe may block forever. Both are refused before they are opened.
"""

import contextlib
import errno
import json
import os
import re
import stat
from typing import Any

from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_JSON_BYTES, MAX_JSON_DEPTH

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def read_bytes(path: Any, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file, local or in a bucket.

    Args:
        path: path object of the file.
        max_bytes: the most bytes that the file may have.

    Raises:
        UserError: the file does not exist, is not a regular file, is too large, or cannot be read.
    """
    try:
        if "://" not in os.fspath(path):
            check_regular(path, max_bytes)
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check the path, and that you may read it"
        ) from None
    except UserError:
        raise
    except ValueError as error:  # a NUL in the path, or a character that the file system's encoding lacks
        raise UserError(f"cannot read {path}: it cannot be the name of a file ({error})") from None
    if len(content) > max_bytes:
        raise UserError(f"{path} has {len(content):,} bytes, expected at most {max_bytes:,}")
    return content


def check_regular(path: Any, max_bytes: int | None = None) -> int:
    """Return the number of bytes of a regular local file.

    Args:
        path: path of the file.
        max_bytes: the most bytes that the file may have; `None` for no limit.

    Raises:
        UserError: the path is a folder, a device, a pipe or a socket, or the file is too large.
        OSError: the file does not exist, or cannot be accessed.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind_text = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise UserError(f"{path} is {kind_text}, expected a regular file; copy the content to a file first")
    if max_bytes is not None and status.st_size > max_bytes:
        raise UserError(f"{path} has {status.st_size:,} bytes, expected at most {max_bytes:,}")
    return status.st_size


def is_regular(path: Any) -> bool:
    """Return whether a path leads to a regular file. For an invalid file name, return False.

    Example:
        >>> is_regular("/dev/zero"), is_regular("n" * 300), is_regular("a\\0b")
        (False, False, False)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def parse_json(text: str | bytes, place: str) -> Any:
    """Return the JSON value in a text.

    Args:
        text: the text, or its bytes in UTF-8.
        place: name of the text's file; messages begin with this name.

    Raises:
        UserError: the text is not JSON in UTF-8, is nested too deeply, or has a number with thousands of digits.

    Example:
        >>> parse_json('{"a": [1]}', "a.json")
        {'a': [1]}
        >>> parse_json("[" * 100_000, "a.json")
        Traceback (most recent call last):
        jaxscale.errors.UserError: a.json: its JSON is nested too deeply, expected at most 64 levels
    """
    try:
        json_value = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise _deep_json_error(place) from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        if "integer string conversion" in str(error):
            error = ValueError("a whole number has more than 4,300 digits")
        raise UserError(f"{place} is not JSON: {error}") from None
    if _is_deeper(json_value, MAX_JSON_DEPTH):
        raise _deep_json_error(place)
    return json_value


def _deep_json_error(place: str) -> UserError:
    """Return the error for JSON that is nested too deeply."""
    return UserError(f"{place}: its JSON is nested too deeply, expected at most {MAX_JSON_DEPTH} levels")


def _is_deeper(json_value: Any, depth: int) -> bool:
    """Return whether a JSON value has more than `depth` nested levels."""
    level_values = [json_value]
    for _ in range(depth + 1):
        containers = [item for item in level_values if isinstance(item, dict | list)]
        if not containers:
            return False
        level_values = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def whole_number(text: str) -> int | None:
    """Return the whole number in a text of at most 18 digits from 0 to 9; `None` for any other text.

    `str.isdigit` would accept any number of digits, and superscripts, for which `int` raises an error.

    Example:
        >>> whole_number("12"), whole_number("\\N{SUPERSCRIPT TWO}"), whole_number("-1"), whole_number("9" * 5000)
        (12, None, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def check_own_file(path: Any) -> None:
    """Raise an error for a path that must not be written to: a folder, device or pipe, or a link into its own folder.

    Args:
        path: a local path; the file need not exist.

    Raises:
        UserError: the path exists and is not a regular file, or is a link to another file in the same folder.
        OSError: the path cannot be accessed.
    """
    if not os.path.lexists(path):
        return
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)
    folder_path, target_path = os.path.realpath(os.path.dirname(path)), os.path.realpath(path)
    if os.path.islink(path) and os.path.commonpath([folder_path, target_path]) == folder_path:
        raise UserError(f"{path} is a link to {target_path}, another file beside it; remove the link")


def is_folder(path: Any) -> bool:
    """Return whether a path leads to a folder. For an invalid folder name, return False.

    Example:
        >>> is_folder("/"), is_folder("n" * 300), is_folder("a\\0b")
        (True, False, False)
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_name_too_long(error: OSError) -> bool:
    """Return whether an OSError reports that a file name is too long (over 255 bytes)."""
    return error.errno == errno.ENAMETOOLONG
