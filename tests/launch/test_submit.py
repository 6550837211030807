"""A launch that follows its job: at a terminal, after its end, and when it is interrupted."""

import os
import textwrap

from jaxscale.launch import Cluster, Slurm
from jaxscale.launch.submit import launch
from jaxscale.records.attempts import Attempt, write_attempt
from tests.launch.command_words import COMMAND


def _fake_slurm(folder, monkeypatch, looks):
    """Put an sbatch and a squeue into the path; the job writes a line at each of some looks, and then it has ended."""
    log = folder / "run" / "processes" / "slurm-7.log"
    scripts = {
        "sbatch": "echo Submitted batch job 7",
        "squeue": f"""
            n=$(cat {folder}/looks 2>/dev/null || echo 0); echo $((n + 1)) > {folder}/looks
            echo "line $n" >> {log}
            [ $n -lt {looks} ] && echo "7 batch plays R" || echo "slurm_load_jobs error: Invalid job id" >&2
            [ $n -lt {looks} ]
        """,
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("jaxscale.launch.submit.FOLLOW_SECONDS", 0.01)


def test_a_launch_at_a_terminal_follows_the_job_and_returns_its_code(tmp_path, monkeypatch, capsys):
    _fake_slurm(tmp_path, monkeypatch, looks=3)
    (tmp_path / "run" / "processes").mkdir(parents=True)
    for launch_name, attempt_code in (("slurm-3", 2), ("slurm-7", 4)):
        write_attempt(tmp_path / "run" / "processes", Attempt(1, launch_name, attempt_code, 40))
    code = launch(Cluster("gpu h100 x 16", Slurm()), COMMAND, str(tmp_path / "run"), None)
    assert code == 4
    assert capsys.readouterr().out.splitlines() == ["Submitted batch job 7", "line 0", "line 1", "line 2", "line 3"]


def test_a_job_without_an_attempt_is_no_success(tmp_path, monkeypatch, capsys):
    _fake_slurm(tmp_path, monkeypatch, looks=1)
    assert launch(Cluster("gpu h100 x 16", Slurm()), COMMAND, str(tmp_path / "run"), None) == 1
    assert f"job 7 has ended, and recorded no attempt: see {tmp_path}/run/" in capsys.readouterr().out


def test_an_interrupt_leaves_the_job_in_the_queue(tmp_path, monkeypatch, capsys):
    _fake_slurm(tmp_path, monkeypatch, looks=3)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert launch(Cluster("gpu h100 x 16", Slurm()), COMMAND, str(tmp_path / "run"), None) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"job 7 goes on, and scancel 7 ends it; follow it: jaxscale status {tmp_path}/run --log 0"
