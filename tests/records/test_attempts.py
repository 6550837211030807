"""The attempts of a launched run are read back, and a damaged line costs that line alone."""

import json

import pytest

from jaxscale.records.attempts import FILE, Attempt, read_attempts, write_attempt

ATTEMPTS = [
    Attempt(1, "a", 137, 4, 0.5, 11.0, "rank 0 was ended", {"stepping": 3.0}),
    Attempt(2, "a", 0, 8, 11.0, 20.0),
    Attempt(3, "b", 2, 8),
]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"number": 2, "launch"',
        b"\xff\xfe",
        b"[" * 100_000,
        b"3",
        json.dumps({"number": "2", "launch": "a", "code": 0, "step": 8}).encode(),
        json.dumps({"number": 2, "launch": "a", "code": 0, "step": 8, "end_time": []}).encode(),
        json.dumps({"number": 2, "launch": "a", "code": 0, "step": 8, "of a newer version": 1}).encode(),
    ],
    ids=lambda line: repr(line[:30]),
)
def test_a_damaged_line_is_left_out(line, tmp_path):
    for attempt in ATTEMPTS:
        write_attempt(tmp_path, attempt)
    assert read_attempts(tmp_path) == ATTEMPTS
    lines = (tmp_path / FILE).read_bytes().split(b"\n")
    (tmp_path / FILE).write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
    assert read_attempts(tmp_path) == [ATTEMPTS[0], ATTEMPTS[2]]
