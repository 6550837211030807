"""The experiment of asynchronous pipelines: it runs at its small size, and its loop is what the executor computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "async_pipeline.py"


def ran(*options):
    """The last line of what it prints, as JSON."""
    command = [sys.executable, str(FILE), "--tiny", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_it_runs(tmp_path):
    page = tmp_path / "curves.html"
    given = ["--steps", "50", "--seeds", "0", "--rules", "pipemare", "--halves", "2bw", "-o", str(page)]
    found = ran(*given)["held out"]
    assert list(found) == ["synchronous", "2bw, after half synchronous", "pipemare"]
    losses = [loss for (loss,) in found.values()]
    assert max(losses) - min(losses) < 0.2
    assert "pipemare, seed 0" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["2bw", "pipedream", "pipemare"])
def test_the_loop_is_what_the_executor_computes(rule):
    """Beside how far both are from weights without delay; it fails by itself where they differ."""
    assert ran("--check", "--rules", rule)[rule] < 2e-3
