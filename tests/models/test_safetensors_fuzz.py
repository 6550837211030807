"""Mutated safetensors files: one clear error, and nothing is read that the safetensors library refuses."""

import datetime
import json
import math
import random
import struct

import pytest
from safetensors import safe_open

from jaxscale.errors import UserError
from jaxscale.models import safetensors_folder

SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1}


def drawn_header(rng):
    """Return a valid header, and the number of bytes of its data."""
    header, stop = {}, 0
    for number in range(rng.randint(1, 4)):
        shape, dtype = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))], rng.choice(list(SIZES))
        start, stop = stop, stop + SIZES[dtype] * math.prod(shape)
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    if rng.random() < 0.3:
        header["__metadata__"] = {"a": "b"}
    return header, stop


def flipped(text, rng):
    """Return the text with one byte replaced."""
    content = bytearray(text.encode())
    content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def mutated_file(rng):
    """Return the bytes of a file with one mutation of its header, its length or its data."""
    header, body_bytes = drawn_header(rng)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    number = rng.randrange(13)
    if number == 0:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-1, 1, 8, 10**20, -(10**20)])
    elif number == 1:
        entry["shape"].append(rng.choice([0, 1, -1, 2**63, 1.0, "1", None, True]))
    elif number == 2:
        entry["dtype"] = rng.choice(["F33", "", None, 5, "f32", ["F32"]])
    elif number == 3:
        body_bytes = max(body_bytes + rng.choice([-1, 1, 7]), 0)
    elif number == 4:
        header["__metadata__"] = rng.choice([[], 1, {"a": 1}, {"a": None}, None, "x"])
    elif number == 5:
        del entry[rng.choice(list(entry))]
    elif number == 6:
        entry["extra"] = 1
    elif number == 7:
        header["x"] = {"dtype": "U8", "shape": [0], "data_offsets": [rng.randint(0, body_bytes)] * 2}
    elif number == 8:
        header["x"] = rng.choice([1, None, [], {}, "a"])
    text = json.dumps(header)
    if number == 9:
        text = text[:-1] + ', "t0": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
    header_bytes = flipped(text, rng) if number == 10 else (" " * (number == 11) + text).encode()
    length = max(len(header_bytes) + rng.choice([0] * 9 + [-1, 1, 100, 2**62]), 0)
    content = struct.pack("<Q", length) + header_bytes + bytes(body_bytes)
    return content[: rng.randrange(len(content) + 1)] if number == 12 else content


def message_of(folder):
    """Return the message with which the file is refused; `None` if it is read."""
    try:
        safetensors_folder.read(folder)
    except UserError as error:
        return str(error)
    return None


def is_accepted_by_library(path):
    try:
        with safe_open(str(path), "numpy") as file:
            file.keys()
    except Exception:  # the library's error, and those of its bindings
        return False
    return True


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_mutated_file_is_one_error_and_never_more_than_the_library_reads(tmp_path, count):
    seed = int(datetime.date.today().strftime("%Y%m%d"))
    rng = random.Random(f"{seed}/{count}")
    path = tmp_path / "model.safetensors"
    accepted_count = 0
    for number in range(count):
        path.write_bytes(mutated_file(rng))
        message = message_of(tmp_path)
        if message is None:
            accepted_count += 1
            assert is_accepted_by_library(path), f"seed {seed}, file {number}: {path.read_bytes()!r}"
        else:
            assert str(path) in message, f"seed {seed}, file {number}"
    assert count / 50 < accepted_count < count / 2  # some mutations change nothing that matters
