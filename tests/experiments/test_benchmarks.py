"""Every benchmark works at its small size and ends with its figures as JSON; what it measures is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "benchmarks"
PARTS = {
    *("figures", "results", "page", "plain_loop", "many_leaves", "nanogpt_torch", "fit_models", "update_program"),
    *("stale_weights", "schedules", "async_pipeline", "transformers_peer", "vision_torch", "images_torch"),
}
"""Parts of benchmarks, and what draws pages and prints tables without figures as JSON."""
BENCHMARKS = sorted(
    path.stem for path in FOLDER.glob("*.py") if '"--tiny"' in path.read_text() and path.stem not in PARTS
)


def test_every_benchmark_has_a_small_size():
    assert {path.stem for path in FOLDER.glob("*.py")} - PARTS == set(BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs(name):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--tiny"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures
    assert all(set(figure) == {"value", "unit", "bar", "holds"} for figure in figures.values())
