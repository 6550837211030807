"""Processes that OpenMPI starts train like those of a launch; skipped without Debian's package openmpi-bin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.records.metrics import read_metrics

FILE = Path(__file__).with_name("faulty.py")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_two_processes_of_openmpi_equal_those_of_a_launch(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "TEXT": str(tmp_path / "text.txt")}
    variables["PYTHONPATH"] = str(FILE.parents[2])
    program = [sys.executable, "-m", "jaxscale"]
    loopback = ["--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", *loopback, "-np", "2", *program]
    commands = {
        "mpi": [*mpirun, "train", str(FILE), "--out", str(tmp_path / "mpi")],
        "launch": [*program, "launch", str(FILE), "--cluster", "local:2", "--out", str(tmp_path / "launch")],
    }
    losses = []
    for name, command in commands.items():
        result = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", timeout=300)
        assert result.returncode == 0, result.stderr
        losses.append([row["loss"] for row in read_metrics(tmp_path / name, "train")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
