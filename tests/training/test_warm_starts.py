"""Runs from a warm compile cache neither hang nor crash; the bare loop did, before the cache left such programs out."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("warm_starts.py")


def failures(*arguments: str) -> str:
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_smallest_program_that_failed():
    assert failures("--starts", "10", "--cold", "2", "bare loop").endswith("\n0 failed\n")


@pytest.mark.slow
def test_starts_of_every_layout():
    """The recorded one has 20 starts each: python tests/training/warm_starts.py"""
    assert failures("--starts", "2", "--cold", "1").endswith("\n0 failed\n")
