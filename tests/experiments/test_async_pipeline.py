"""The experiment of asynchronous pipelines runs at its small size; what it measures is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "async_pipeline.py"


@pytest.mark.slow
def test_it_runs(tmp_path):
    page = tmp_path / "curves.html"
    options = ["--tiny", "--half", "--steps", "50", "--seeds", "0", "--rules", "synchronous", "2bw", "pipemare"]
    command = [sys.executable, str(FILE), *options, "-o", str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["synchronous first"] == 25
    losses = [loss for (loss,) in found["held out"].values()]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 0.2
    assert "2bw, seed 0" in page.read_text()
