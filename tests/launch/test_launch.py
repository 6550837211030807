"""Whole runs on this machine: launched, killed, hung, stopped, and bitwise those of an undisturbed run."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick import environment

from jaxscale import heartbeat
from jaxscale.cli import main
from jaxscale.records.attempts import read_attempts
from jaxscale.records.hours import hours
from jaxscale.records.metrics import read_metrics

FILE = Path(__file__).with_name("faulty.py")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 400)
    return path


def _launch(
    text: Path, out: Path, fault: str, *words: str, processes: int = 2, **more_variables: str
) -> tuple[int, str, float]:
    """Launch a run on this machine; return the exit code, the output and the seconds."""
    variables = {"JAX_NUM_CPU_DEVICES": "1", "FAULT": fault, "TEXT": str(text), "MESH": f"fsdp:{processes}"}
    command = [sys.executable, "-m", "jaxscale", "launch", str(FILE), "--cluster", f"local:{processes}"]
    start_time = time.monotonic()
    result = subprocess.run(
        [*command, "--out", str(out), *words],
        env=environment(**variables | more_variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return result.returncode, result.stdout.decode(errors="replace"), time.monotonic() - start_time


def _losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(run_dir, "train")]


def test_a_killed_run_comes_back_bitwise_reports_what_that_cost_and_trains_as_one_process_does(
    text, tmp_path, monkeypatch
):
    code, output, seconds = _launch(text, tmp_path / "killed", "SIGKILL:1:stepping:7:1")
    assert code == 0, output
    assert "after step 4" in output
    assert re.search(r"attempt 1: rank 1 on \S+ was ended by SIGKILL", output)
    assert [step for step, _ in _losses(tmp_path / "killed")] == list(range(1, 13))
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    losses_of_6 = [row["loss"] for row in rows if row["kind"] == "train" and row["step"] == 6]
    assert len(losses_of_6) == 2
    assert losses_of_6[0] == losses_of_6[1]  # before the death and after it
    first, second = read_attempts(tmp_path / "killed" / "processes")
    assert (first.code, second.code, first.step) == (137, 0, 7)
    run_hours = hours(tmp_path / "killed")
    assert run_hours is not None
    (cause, lost), *others = run_hours.lost
    assert not others
    assert "SIGKILL" in cause
    new_row = [row for row in rows if row["kind"] == "train" and row["step"] == first.step][-1]
    assert abs(lost - (new_row["time"] - first.end_time)) < 2
    assert abs(run_hours.seconds - (second.end_time - first.start_time)) < 0.1
    parts = sum(run_hours.seconds_by_phase.values()) + lost
    assert abs(parts - run_hours.seconds) < 0.1
    assert "Lost to restarts" in (tmp_path / "killed" / "report.html").read_text()
    start_seconds = run_hours.seconds_by_phase["starting"]  # of two attempts; the launcher itself starts once
    assert run_hours.seconds < seconds < run_hours.seconds + start_seconds
    # only the order of sums differs from the run of one process
    monkeypatch.setenv("TEXT", str(text))
    monkeypatch.setattr(heartbeat.Writer, "set", heartbeat.Writer.set)  # the file replaces it: restored at the end
    assert main(["train", str(FILE), "--out", str(tmp_path / "alone")]) == 0
    alone = [loss for _, loss in _losses(tmp_path / "alone")]
    assert [loss for _, loss in _losses(tmp_path / "killed")] == pytest.approx(alone, rel=1e-5)


FAULTS = {
    "raise:1:stepping:7:1": (0, r"rank 1 on \S+ ended with code 1 in stepping, step 7: RuntimeError: made by the test"),
    "mistake:1:stepping:7:1": (2, r"rank 1 on \S+ ended with code 2 .* UserError: made by the test"),
    "exit:0:stepping:3:1": (0, r"rank 0 on \S+ ended with code 3 in stepping, step 3: SystemExit: 3"),
    "SIGKILL:0:stepping:7:1": (0, r"rank 0 on \S+ was ended by SIGKILL"),
    "SIGSEGV:1:compiling:0:1": (0, r"rank 1 on \S+ was ended by SIGSEGV"),
    "sleep:1:data:5:1": (0, r"rank 1 on \S+ did not leave data: it has been in data, step 5 \(faulty.py:\d+ _set_and_"),
    "spin:1:initializing:0:1": (0, r"rank 1 on \S+ did not leave initializing"),
    "sleep:0:compiling:0:1": (0, r"rank 0 on \S+ did not leave compiling"),
    "sleep:0:saving:8:1": (0, r"rank 0 on \S+ did not leave saving"),
    "SIGSTOP:0:stepping:5:1": (0, r"rank 0 on \S+ is frozen"),
    "raise:0:data:5:9": (5, "gave up: three attempts in a row failed at step 5"),
    "SIGTERM:1:stepping:7:1": (0, "stopped by a signal to another process after step 7, and saved"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, text, tmp_path):
    expected_code, expected_text = FAULTS[fault]
    timeouts = "stepping=20,data=20,initializing=20,restoring=20,compiling=60,saving=20,frozen=10"
    code, output, seconds = _launch(text, tmp_path / "run", fault, "--timeouts", timeouts)
    assert code == expected_code, output
    assert re.search(expected_text, output), output
    assert seconds < 200
    if code == 0:
        assert [step for step, _ in _losses(tmp_path / "run")] == list(range(1, 13))


def _quarter(text, out, fault, *words, processes=4, mesh="replica:4,fsdp:2"):
    """Launch four replicas of two devices, with copies in memory after every second step and no checkpoint."""
    flags = ["--batch", "24", "--checkpoint.every", "100", "--checkpoint.memory_every", "2", *words]
    return _launch(text, out, fault, *flags, processes=processes, MESH=mesh, JAX_NUM_CPU_DEVICES="2")


@pytest.mark.slow
def test_a_run_goes_on_from_memory_with_three_of_four_replicas(text, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "memory"))
    code, output, _ = _quarter(text, tmp_path / "elastic", "SIGKILL:2:stepping:8:1", "--elastic", "replica")
    assert code == 0, output
    assert "was lost; the run goes on with 3 of 4 replicas, and with a batch of 24 in 2 microbatches" in output
    assert "after step 6, from the copy in the hosts' memory" in output
    first, second = read_attempts(tmp_path / "elastic" / "processes")
    assert second.code == 0
    new_row = read_metrics(tmp_path / "elastic", "train")[first.step - 1]
    assert new_row["time"] - first.end_time < 60
    assert [step for step, _ in _losses(tmp_path / "elastic")] == list(range(1, 13))
    assert _quarter(text, tmp_path / "whole", "")[0] == 0
    losses, whole_losses = ([loss for _, loss in _losses(tmp_path / name)] for name in ("elastic", "whole"))
    assert losses[:6] == whole_losses[:6]
    assert losses == pytest.approx(whole_losses, rel=1e-5)  # the same rows in each step, summed in another order
    assert not list((tmp_path / "memory").iterdir())  # the copies go when the run is done
    # by hand: a run that ends at the same step, launched again with three replicas
    code, output, _ = _quarter(text, tmp_path / "hand", "mistake:2:stepping:8:1")
    assert code == 2, output
    by_hand = {"processes": 3, "mesh": "replica:3,fsdp:2"}
    code, output, _ = _quarter(text, tmp_path / "hand", "", "--plan.microbatches", "2", **by_hand)
    assert code == 0, output
    assert _losses(tmp_path / "hand") == _losses(tmp_path / "elastic")


@pytest.mark.slow
def test_a_restart_of_all_goes_on_from_memory_bitwise(text, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "memory"))
    code, output, _ = _quarter(text, tmp_path / "run", "SIGKILL:1:stepping:8:1", processes=2, mesh="fsdp:4")
    assert code == 0, output
    assert "after step 6, from the copy in the hosts' memory" in output
    assert _quarter(text, tmp_path / "whole", "", processes=2, mesh="fsdp:4")[0] == 0
    assert _losses(tmp_path / "run") == _losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_mesh_without_devices_of_a_process_is_refused_and_not_tried_again(text, tmp_path):
    code, output, _ = _launch(text, tmp_path / "run", "", MESH="fsdp:2", JAX_NUM_CPU_DEVICES="2")
    assert code == 2, output
    assert "takes 2 of 4 devices, so that 1 of 2 processes have none: use a mesh of 4 devices" in output
    assert "attempt 2" not in output


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.parametrize("phase", ["stepping", "saving"])
def test_a_disk_that_one_process_fills_ends_the_run_with_the_reason_and_the_checkpoint_before(phase, text, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    step = 7 if phase == "stepping" else 8
    try:
        code, output, seconds = _launch(text, disk / "run", f"fill:1:{phase}:{step}:1", FILL=str(disk))
        assert code == 2, output
        assert re.search(r"cannot write .*[Nn]o space left", output), output
        assert "intact" in output
        assert seconds < 60
        (disk / "filler").unlink()
        code, output, _ = _launch(text, disk / "run", "")
        assert code == 0, output
        assert "after step 4" in output
        assert [step for step, _ in _losses(disk / "run")] == list(range(1, 13))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_processes_meet_in_spite_of_proxies(text, tmp_path):
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY"), "http://192.0.2.9:3128")
    code, output, _ = _launch(text, tmp_path / "run", "", "--timeouts", "joining=40", **proxies)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "steps"), [(2, (2, 5, 9, 12)), (4, (7,))])
def test_kill_9_at_any_rank_and_step_is_bitwise_undisturbed(processes, steps, text, tmp_path):
    assert _launch(text, tmp_path / "whole", "", processes=processes)[0] == 0
    expected = _losses(tmp_path / "whole")
    for rank in range(processes):
        for step in steps:
            run_dir = tmp_path / f"{rank}-{step}"
            code, output, _ = _launch(text, run_dir, f"SIGKILL:{rank}:stepping:{step}:1", processes=processes)
            assert code == 0, output
            assert _losses(run_dir) == expected, (rank, step)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", str(FILE)], "launch lacks --cluster"),
        (["launch", str(FILE), "--cluster", "local:x"], "is not a file"),
        (["launch", str(FILE), "--cluster", "local:2", "--log-every", "0"], "--log-every: got 0"),
        (["launch", str(FILE), "--cluster", "local:2", "--timeouts", "x=1"], "unknown phase in --timeouts"),
        (["launch", str(FILE), "--clutser", "local:2"], "unknown flag '--clutser' of launch; did you mean '--cluster'"),
        (
            ["launch", str(FILE), "--cluster", "local:2", "--out", "no/such/folder/run", "--resume", "never"],
            "--resume never: ",
        ),
        (["watch"], "watch lacks the command to run: jaxscale watch [flags] -- CMD"),
        (["watch", "--ranks", "0", "--", "true"], "--ranks: got 0"),
        (["retry", "--", "true"], "retry lacks --out"),
        (["status", "no/such/run"], "does not exist"),
        (["status", "gs://b/run"], "is in a bucket"),
        (["stop", "no/such/run"], "does not exist"),
        (["fit", str(FILE), "--cluster", "local:2", "--platform", "cpu"], "got --platform and --cluster"),
    ],
)
def test_mistakes_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.setenv("TEXT", "text.txt")
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_starts_no_backend_and_passes_the_words_on(tmp_path, text):
    words = ["--steps", "30", "--plan.zero", "2", "--name", "a b", "--resume", "never", "--dry-run"]
    code = f"""
import sys
from jaxscale.cli import main
code = main(["launch", {str(FILE)!r}, "--cluster", "local:3", "--out", {str(tmp_path / "run")!r}, *{words!r}])
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
sys.exit(code)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TEXT": str(text)}
    )
    assert result.returncode == 0, result.stderr
    line = result.stdout.splitlines()[-1]
    assert line.endswith(f"train {FILE} --steps=30 '--name=a b' --plan.zero=2 --out={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()
