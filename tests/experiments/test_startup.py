"""The startup benchmark works; what it measures is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "experiments" / "benchmarks" / "startup.py"


@pytest.mark.slow
def test_startup_runs():
    ended = subprocess.run([sys.executable, str(BENCHMARK), "--tiny"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert {"import jaxscale beyond import jax", "typo in file", "typo in value beyond it"} <= set(figures)
    assert all(set(figure) == {"value", "unit", "bar", "holds"} for figure in figures.values())
