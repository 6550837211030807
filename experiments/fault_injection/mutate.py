"""Mutations of files that keep their form, so that a fuzzer gets past the parser to what the values mean.

A `Form` takes the bytes of a file apart into JSON values and builds them again, checksums and lengths included. A
mutation changes a few of the values; every so often the bytes are changed instead, and then the file is torn.
"""

import csv
import dataclasses
import hashlib
import io
import json
import math
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

DEEP = "\ue000deep"
"""A text that becomes thousands of nested lists when the values are written."""
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 64, 255, 65_537, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**20, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e16, 1e308, -1e308, math.inf, -math.inf, math.nan),
)
"""Numbers at which types, formats and sums go wrong."""
TEXTS = (
    *("", " ", "0", "-1", "1e400", "nan", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}", "a\0b", "a/../b", "/"),
    *(
        "\ud800",
        "\N{ZERO WIDTH NO-BREAK SPACE}",
        "x" * 300,
        "none",
        "null",
        "a:b",
        ":",
        ",",
        "=",
        "<b>",
        "%s {0}",
        "\n",
    ),
)
"""Texts that are no names, no numbers, or not quite."""
CHARACTERS = "0123456789-+.,:;=/\\x_ eE\"'{}[]()<>\0\n\r\t\N{SUPERSCRIPT TWO}\N{FULLWIDTH DIGIT ONE}\ud800"


@dataclasses.dataclass(frozen=True)
class Form:
    """How the bytes of a file become JSON values, and how values become bytes.

    Args:
        parse: returns the values; raises ValueError or another error for bytes of another form.
        build: returns the bytes.
    """

    parse: Callable[[bytes], Any]
    build: Callable[[Any], bytes]


def dumps(values: Any) -> bytes:
    """Return JSON values as JSON, with nested lists for `DEEP`."""
    text = json.dumps(values)
    if DEEP[1:] in text:
        text = text.replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)
    return text.encode()


def _parse_lines(data: bytes) -> list[Any]:
    """Return the values of JSON lines; a line that is not JSON becomes a list with its text alone."""
    values: list[Any] = []
    for line in data.decode("utf-8", "replace").removesuffix("\n").split("\n"):
        try:
            values.append(json.loads(line))
        except ValueError:
            values.append([line])
    return values


def _build_lines(values: Any) -> bytes:
    """Return JSON lines."""
    return b"\n".join(map(dumps, values if isinstance(values, list) else [values])) + b"\n"


def _build_safetensors(values: Any) -> bytes:
    """Return a safetensors file of a header and a number of bytes of data."""
    header = dumps(values["header"])
    body_bytes = values["bytes"] if isinstance(values["bytes"], int) else 0
    return len(header).to_bytes(8, "little") + header + bytes(min(max(body_bytes, 0), 4096))


def _parse_safetensors(data: bytes) -> Any:
    header_bytes = int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8 : 8 + header_bytes]), "bytes": max(len(data) - 8 - header_bytes, 0)}


def _parse_cells(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode())))


def _build_cells(values: Any) -> bytes:
    rows = values if isinstance(values, list) else [values]
    lines = (",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)
    return "\n".join(lines).encode("utf-8", "replace")


def _parse_description(data: bytes) -> Any:
    return json.loads(data)["custom_metadata"]


def _build_description(values: Any) -> bytes:
    """Return Orbax's file with the description of a checkpoint, whose SHA-256 is right."""
    if isinstance(values, dict) and "jaxscale" in values:
        content = json.loads(dumps(values["jaxscale"]))
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        values = {**values, "jaxscale": content, "sha256": digest}
    return dumps({"item_handlers": {}, "custom_metadata": values})


def _parse_host_copy(data: bytes) -> Any:
    length = int.from_bytes(data[-12:-4], "little")
    return {"bytes": len(data) - 12 - length, "header": json.loads(data[-12 - length : -12])}


def _build_host_copy(values: Any) -> bytes:
    """Return a copy of a state in a host's memory: the arrays, the header, its length and its CRC."""
    text = dumps(values["header"])
    array_bytes = bytes(values["bytes"]) if isinstance(values["bytes"], int) and 0 <= values["bytes"] < 4096 else b""
    return array_bytes + text + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")


JSON = Form(json.loads, dumps)
FOLDER = Form(json.loads, lambda values: json.dumps(values).encode())
"""The contents of several files by their names; a target writes each, with nested lists for `DEEP`."""
LINES = Form(_parse_lines, _build_lines)
SAFETENSORS = Form(_parse_safetensors, _build_safetensors)
CELLS = Form(_parse_cells, _build_cells)
DESCRIPTION = Form(_parse_description, _build_description)
HOST_COPY = Form(_parse_host_copy, _build_host_copy)


def mutated(data: bytes, form: Form, words: Sequence[str], rng: random.Random) -> bytes:
    """Return the bytes of a file with a few changes.

    Args:
        data: the bytes.
        form: form of the file.
        words: keys and values of the format.
        rng: source of random numbers.
    """
    if rng.random() < 0.1:
        return with_changed_bytes(data, rng)
    try:
        root = [form.parse(data)]  # in a list, so that the whole value can be replaced, too
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
            _change(root, words, rng)
        return form.build(root[0])
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        csv.Error,
    ):  # bytes or values of another form
        return with_changed_bytes(data, rng)


def with_changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some replaced, removed, repeated or cut off."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(content) + 1)
        stop = min(start + rng.choice((1, 1, 2, 8, 40)), len(content))
        action = rng.randrange(5)
        if action == 0:
            content[start:stop] = rng.randbytes(stop - start)
        elif action == 1:
            del content[start:stop]
        elif action == 2:
            content[start:start] = content[start:stop]
        elif action == 3:
            content[start:start] = rng.choice(CHARACTERS).encode("utf-8", "surrogatepass")
        elif rng.random() < 0.3:
            del content[start:]
    return bytes(content)


def _change(root: list[Any], words: Sequence[str], rng: random.Random) -> None:
    """Change one value, name or item of the JSON values in a list of length 1."""
    places: list[tuple[Any, Any]] = []  # a container, and a key or an index in it
    pending: list[Any] = [root]
    while pending:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], dict | list):
                pending.append(container[key])
    container, key = rng.choice(places)
    action = rng.randrange(10)
    if action == 0 and container is not root:
        del container[key]
    elif action == 1 and isinstance(container, dict):  # the value of another name, or another name of the value
        name = rng.choice([*words, *TEXTS, *map(str, container)])
        container[name] = container[key] if rng.random() < 0.5 else container.pop(key)
    elif action == 2 and isinstance(container, list) and container is not root:
        container.insert(rng.randrange(len(container) + 1), container[key])
    elif action == 3:  # what stands elsewhere
        other_container, other_key = rng.choice(places)
        container[key] = json.loads(json.dumps(other_container[other_key]))
    elif action == 4 and isinstance(container[key], dict):
        container[key][rng.choice([*words, *TEXTS])] = _value(words, rng)
    elif action == 5:
        container[key] = rng.choice(([container[key]], {"type": container[key]}, str(container[key])[:1000]))
    elif action <= 8 and isinstance(container[key], int | float | str):
        container[key] = _near(container[key], words, rng)
    else:
        container[key] = _value(words, rng)


def _value(words: Sequence[str], rng: random.Random) -> Any:
    """Return a value of any kind."""
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4 and words:
        return rng.choice(words)
    if kind < 6:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, [], {}, [[]], [None], [-1], {"a": {}}, {"": ""}, ["a", 1], DEEP))


def _near(value: int | float | str, words: Sequence[str], rng: random.Random) -> Any:
    """Return a value that differs a little: a near number, a text with another character or word."""
    if isinstance(value, str):
        start = rng.randrange(len(value) + 1)
        stop = min(start + rng.randrange(3), len(value))
        middle = rng.choice(
            [rng.choice(CHARACTERS), "", str(rng.choice(NUMBERS))[:40], *(words and [rng.choice(words)])]
        )
        return value[:start] + middle + value[stop:]
    if rng.random() < 0.4:
        return rng.choice(NUMBERS)
    try:
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, float(value), str(value), bool(value), [value, value])
        )
    except (OverflowError, ValueError):
        return 0
