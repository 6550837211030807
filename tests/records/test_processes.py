"""Two processes over gloo train as one does: same losses, one log, one stop, one checkpoint."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.records import processes
from jaxscale.records.metrics import read_metrics

PROGRAM = Path(__file__).parents[1] / "training" / "process.py"
RESTORING = PROGRAM.with_name("restoring.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(program, folder, *arguments):
    return subprocess.Popen(
        [sys.executable, program, folder, *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "JAXSCALE_CACHE": str(folder / "cache"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def together(*processes):
    """Outputs of processes that run at the same time."""
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-3000:]
            outputs.append(out)
    finally:
        for process in processes:
            process.kill()
    return outputs


def trained(folder, stop_at, *from_step):
    """Both processes train; the second one alone gets the signal."""
    port = free_port()
    return together(*(start(PROGRAM, folder, port, index, stop_at if index else 0, *from_step) for index in range(2)))


@pytest.mark.slow
def test_two_processes_train_stop_and_continue_as_one(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    alone = start(PROGRAM, tmp_path, 0, 0, 0)
    _, err = alone.communicate(timeout=240)
    assert alone.returncode == 0, err[-3000:]
    first, second = trained(tmp_path, stop_at=7)
    assert "PREEMPTED" in first
    assert "after step 7" in first
    assert "after step 7" in second
    said = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert len(said) == 1, "the second process says nothing else"
    first, second = trained(tmp_path, stop_at=0)
    assert "DONE 12" in first
    assert "DONE 12" in second
    found, expected = (read_metrics(tmp_path / name, "train") for name in ("run", "alone"))
    assert found.column("step").tolist() == list(range(1, 13))
    assert found.column("tokens").tolist() == expected.column("tokens").tolist()
    np.testing.assert_allclose(found.column("loss"), expected.column("loss"), rtol=1e-5)
    np.testing.assert_allclose(found.column("grad_norm"), expected.column("grad_norm"), rtol=1e-4)
    held_out = [read_metrics(tmp_path / name, "eval").column("loss") for name in ("run", "alone")]
    np.testing.assert_allclose(*held_out, rtol=1e-5)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "train" for line in lines) == 12, "one process writes"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    # both return to a checkpoint, and make the same steps again
    first, second = trained(tmp_path, 0, 10)
    assert "DONE 12" in first
    assert "DONE 12" in second
    returned = read_metrics(tmp_path / "run")
    assert [row["step"] for row in returned if row["kind"] == "train"] == list(range(1, 13))
    assert [row["loss"] for row in returned if row["kind"] == "train"] == found.column("loss").tolist()
    (event,) = [row for row in returned if row.get("returned")]
    assert (event["step"], event["aside"]) == (10, ["00000012.aside"])
    assert len(json.loads((tmp_path / "run" / "returns.json").read_text())) == 1


@pytest.mark.slow
def test_what_one_process_cannot_read_all_pass_over(tmp_path):
    """A checkpoint, a description and arrays hidden from one process: none of them waits for the other for ever."""
    port = free_port()
    first, second = together(*(start(RESTORING, tmp_path, port, index) for index in range(2)))
    assert "RESTORED 1 1.0 [2, 3, 4]" in first
    assert "RESTORED 1 1.0 [2, 3, 4]" in second
    assert first.count("reading failed on another process") == 3
    assert "another process" not in second


def other_process(monkeypatch, grade):
    """As if another process had succeeded (0), failed mildly (1) or gravely (2)."""
    monkeypatch.setattr(processes, "_max_over_processes", lambda mine: max(mine, grade))


def failing(problem):
    raise problem


@pytest.mark.parametrize(
    ("mine", "other", "expected", "message"),
    [
        (None, 1, LookupError, "reading failed on another process"),
        (None, 2, UserError, "another process failed"),
        (LookupError("here"), 0, LookupError, "here"),
        (LookupError("here"), 1, LookupError, "here"),
        (LookupError("here"), 2, UserError, "another process failed"),
        (OSError("grave"), 0, OSError, "grave"),
        (OSError("grave"), 1, OSError, "grave"),
    ],
)
def test_processes_go_on_together_or_not_at_all(monkeypatch, mine, other, expected, message):
    other_process(monkeypatch, other)
    with pytest.raises(expected, match=message):
        processes.call_on_all(lambda: 3 if mine is None else failing(mine), LookupError)


def test_all_went_well(monkeypatch):
    other_process(monkeypatch, 0)
    assert processes.call_on_all(lambda: 3, LookupError) == 3
