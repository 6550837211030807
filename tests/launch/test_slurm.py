"""Launches in a real Slurm of two nodes on this machine: a whole run, a kill, a signal, a requeue, a stop.

Needs root and Slurm's daemons, Debian's packages slurmctld, slurmd, slurm-client and munge; skipped without them.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.heartbeat import read_heartbeats
from jaxscale.records.attempts import read_attempts
from jaxscale.records.metrics import read_metrics

HERE = Path(__file__).parent
CLUSTER = """
from jaxscale.launch import Cluster, Slurm

cluster = Cluster(
    platform="cpu x 2", hosts=2, scheduler=Slurm({partition!r}, time="{time}", is_exclusive=False),
    shared={shared!r}, python={python!r},
    setup=("export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1 PYTHONPATH={root}",), grace=20,
)
"""
# launches, acts once rank 0 has entered a step, starts a requeued job at once, and waits for the end
DRIVER = """
{python} -m jaxscale launch {file} --cluster {cluster} --steps {steps} || exit
for _ in $(seq 1200); do
  step=$(grep -o '"step": [0-9]*' {run}/processes/rank-00000.json 2>/dev/null | grep -o '[0-9]*' || echo 0)
  [ "${{step:-0}}" -ge {act_step} ] && break; sleep 0.05
done
{act}
for _ in $(seq 1200); do
  [ -z "$(squeue -h -o %T)" ] && break
  # a node refuses a job whose earlier processes it ended in the same second
  [ "$(squeue -h -o %T)" = PENDING ] && sleep 4 && scontrol update JobId=1 StartTime=now 2>/dev/null
  sleep 0.5
done
scontrol show job
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("slurmctld") is None or shutil.which("munged") is None,
        reason="needs root and Slurm's daemons",
    ),
]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 400)
    return path


def _run(
    folder: Path, text: Path, act: str = "true", fault: str = "", steps: int = 12, time: int = 10, partition: str = ""
) -> tuple[Path, str]:
    """Launch a run in a sandbox; return its folder, and what Slurm reports of the job with the job's own output."""
    folder.chmod(0o755)
    cluster = folder / "cluster.py"
    facts = {"shared": str(folder), "python": sys.executable, "root": HERE.parents[1]}
    cluster.write_text(CLUSTER.format(**facts, time=time, partition=partition))
    run_dir = folder / "runs" / "faulty"
    python = f"PYTHONPATH={HERE.parents[1]} {sys.executable}"
    act = act.format(program=f"{python} -m jaxscale", run=run_dir)
    driver = DRIVER.format(
        python=python, file=HERE / "faulty.py", cluster=cluster, run=run_dir, steps=steps, act_step=20, act=act
    )
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"FAULT": fault, "TEXT": str(text)}
    result = subprocess.run(
        [HERE / "slurm_sandbox.sh", "2", "bash", "-c", driver],
        env=variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    logs = "".join(path.read_text(errors="replace") for path in (run_dir / "processes").glob("slurm-*.log"))
    return run_dir, f"{result.stdout}\n{result.stderr}\n{logs}"


def _losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(run_dir, "train")]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> list[tuple[int, float]]:
    run_dir, output = _run(tmp_path_factory.mktemp("whole"), text, steps=400)
    assert "JobState=COMPLETED" in output, output
    return _losses(run_dir)


def test_a_killed_task_is_named_and_the_run_comes_back_in_its_allocation(text, tmp_path, whole):
    run_dir, output = _run(tmp_path, text, fault="SIGKILL:1:stepping:30:1", steps=400)
    assert "JobState=COMPLETED" in output, output
    assert "Restarts=0" in output
    assert re.search(r"attempt 1: rank 1 on \S+ was ended by SIGKILL", output)
    assert _losses(run_dir) == whole
    assert [attempt.code for attempt in read_attempts(run_dir / "processes")] == [137, 0]


@pytest.mark.parametrize("act", ["scancel --signal=TERM 1", "scontrol requeue 1"])
def test_a_signal_saves_and_the_job_is_requeued(act, text, tmp_path, whole):
    run_dir, output = _run(tmp_path, text, act, steps=400)
    assert "JobState=COMPLETED" in output, output
    assert "Restarts=1" in output
    assert re.search(r"stopped by (SIGTERM|a signal to another process) after step \d+, and saved", output)
    assert _losses(run_dir) == whole
    assert [attempt.code for attempt in read_attempts(run_dir / "processes")] == [75, 0]


def test_a_run_beyond_its_time_limit_saves_and_is_requeued(text, tmp_path):
    run_dir, output = _run(tmp_path, text, steps=800, time=1)
    assert "JobState=COMPLETED" in output, output
    codes = [attempt.code for attempt in read_attempts(run_dir / "processes")]
    assert len(codes) > 1
    assert codes == [75] * (len(codes) - 1) + [0]
    assert [step for step, _ in _losses(run_dir)] == list(range(1, 801))


def test_an_unknown_partition_is_refused_in_the_words_of_slurm(text, tmp_path):
    _, output = _run(tmp_path, text, partition="nope")
    assert "sbatch refused the document: sbatch: error: invalid partition specified: nope" in output


def test_a_stopped_run_is_not_requeued(text, tmp_path):
    run_dir, output = _run(tmp_path, text, "{program} stop {run}", steps=400)
    assert "ExitCode=75:0" in output, output
    assert "Restarts=0" in output
    assert 20 <= len(_losses(run_dir)) < 400


PLANS = {
    "data": "--plan.mesh data:4 --plan.zero 0",
    "zero": "--plan.mesh fsdp:4 --plan.zero 3",
    "pipeline": "--plan.mesh fsdp:2 --plan.pipeline 1f1b:2x4 --plan.zero 0",
}


@pytest.mark.parametrize("tasks", [2, 4])
def test_bare_tasks_join_without_a_flag_and_equal_one_process(tasks, text, tmp_path):
    tmp_path.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"TEXT": str(text), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}
    train = f"{sys.executable} -m jaxscale train {HERE / 'faulty.py'} --steps 20"
    commands = [
        f"JAX_NUM_CPU_DEVICES={4 // tasks} srun -N 2 -n {tasks} --overcommit {train} {flags} --out {tmp_path / name}"
        for name, flags in PLANS.items()
    ]
    driver = [HERE / "slurm_sandbox.sh", "2", "bash", "-c", " && ".join(commands)]
    result = subprocess.run(driver, env=variables, capture_output=True, text=True, errors="replace", timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    for name, flags in PLANS.items():
        out = tmp_path / f"{name}-alone"
        alone = [*train.split(), *flags.split(), "--out", str(out)]
        subprocess.run(alone, env=variables | {"JAX_NUM_CPU_DEVICES": "4"}, check=True, capture_output=True)
        joined, expected = _losses(tmp_path / name), _losses(out)
        assert [step for step, _ in joined] == list(range(1, 21))
        assert [loss for _, loss in joined] == pytest.approx([loss for _, loss in expected], rel=1e-5)
        beats = read_heartbeats(tmp_path / name / "processes")
        assert sorted(beats) == list(range(tasks))
        seconds = max(beat.seconds_by_phase["starting"] + beat.seconds_by_phase["joining"] for beat in beats.values())
        print(f"{tasks} tasks, {name}: {seconds:.1f} s to join")
