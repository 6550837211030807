"""The harness of faults runs; its full counts are for the command itself."""

import json
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


def test_an_unknown_part_is_refused():
    result = subprocess.run([sys.executable, str(HARNESS), "--part", "floods"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "invalid choice: 'floods'" in result.stderr
