"""The harness of faults runs; its full counts are for the command itself."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "experiments" / "faults.py"


@pytest.mark.slow
def test_killed_runs_equal_their_twins():
    result = subprocess.run(
        [sys.executable, str(HARNESS), "--part", "kills", "--count", "4"], capture_output=True, text=True, timeout=600
    )
    summary = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 0, result.stdout
    assert summary["tried"] >= 4
    assert summary["faults"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("part", "count"), [("files", 17), ("disk", 5)])
def test_spoiled_runs_end_as_promised(part, count):
    words = [sys.executable, str(HARNESS), "--part", part, "--count", str(count)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["faults"] == 0
    assert summary["tried"] == count or part == "disk"  # without root, no file system can be mounted


def test_every_flag_of_every_command_can_be_drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    from fault_injection.command_lines import COMMANDS, draw_line

    commands = {draw_line(number, seed)[0] for seed in range(4) for number in range(600)}
    assert commands == set(COMMANDS)


def test_an_unknown_part_is_refused():
    result = subprocess.run([sys.executable, str(HARNESS), "--part", "floods"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "invalid choice: 'floods'" in result.stderr


def test_wild_values_are_accepted_or_refused(tmp_path, monkeypatch, capsys):
    """300 draws of the harness, without a built step; `--part values` makes 10,000, each in a child with limits."""
    monkeypatch.syspath_prepend(HARNESS.parent)
    from fault_injection.values import draw, run_one
    from fault_injection.wild_values import write_data

    write_data(tmp_path)
    counts = collections.Counter()
    for number in range(300):
        try:
            outcome, way = run_one(number, 2026, tmp_path, is_deep=False)
        except Exception as error:
            raise AssertionError(f"draw {number}: {draw(number, 2026, tmp_path)[1]}") from error
        counts[outcome, way] += 1
    capsys.readouterr()  # what the draws print of themselves
    for way in ("constructors", "texts", "JSON"):
        assert counts["refused", way] >= 10
        assert counts["resolved", way] >= 2
    assert counts["constructed", "values alone"] >= 5


@pytest.mark.variant  # of the harness, which CI alone runs
def test_a_planted_fault_is_found(tmp_path, monkeypatch):
    """A draw that raises, one that never ends, one that ends its process, and sound ones before and after them."""
    monkeypatch.syspath_prepend(HARNESS.parent)
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    environment = {**os.environ, "PYTHONPATH": f"{HARNESS.parent}{os.pathsep}{HARNESS.parents[1]}"}
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    outcomes = [line.split(" ", 2) for line in result.stdout.splitlines()]
    assert [outcome[:2] for outcome in outcomes] == [
        *(["0", "sound"], ["1", "fault"], ["2", "fault"], ["3", "sound"]),
        *(["4", "fault"], ["5", "fault"], ["6", "fault"], ["7", "sound"]),
    ]
    details = [outcome[2] for outcome in outcomes]
    assert "ZeroDivisionError" in details[1]
    assert "not over after 1 s of computation" in details[2]
    assert "the process ended with -6" in details[4]
    assert "the process grew by" in details[5]
    assert "deaf to signals" in details[6]


PLANTED = """
import os, signal, time
from fault_injection import draws

draws.MAX_GROWTH_BYTES, draws.GRACE_SECONDS = 100 << 20, 1.0


def run(number):
    if number == 1:
        1 / 0
    while number == 2:
        pass
    if number == 4:
        os.abort()
    if number == 5:
        held = b"x" * (300 << 20)
        time.sleep(5)
    while number == 6:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGPROF})
    return "sound", ""


for outcome in draws.run_draws(run, range(8), 1.0, 5):
    print(outcome.number, outcome.outcome, outcome.detail or "-", flush=True)
"""
