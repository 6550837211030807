"""Joining: each scheduler's variables give the place of a process, and malformed ones are refused by name."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quick import environment

from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.heartbeat import Writer, read_heartbeats
from jaxscale.platforms.join import ProcessPlace, _missing_ranks_text, first_host, local_gpu_numbers, place_of
from jaxscale.records.metrics import read_metrics

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JOBSET = {
    "JOBSET_NAME": "plays",
    "REPLICATED_JOB_NAME": "slice",
    "JOB_INDEX": "1",
    "JOB_COUNT": "2",
    "JOB_COMPLETION_INDEX": "3",
    "PODS_PER_JOB": "4",
}
OPENMPI_6 = ProcessPlace("OpenMPI", "[fe80::1]:61442", 2, 1, 1, 2)
OWN = {"JAXSCALE_COORDINATOR": "a:5000", "JAXSCALE_PROCESSES": "3", "JAXSCALE_RANK": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, ProcessPlace("Slurm", "gpu03:62477", 5, 3, 1, 2)),
        (TORCHRUN, ProcessPlace("torchrun", "10.0.0.1:29501", 4, 1, 1, 2)),
        (OPENMPI, ProcessPlace("OpenMPI", f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 2, 1, 1, 2)),
        (JOBSET, ProcessPlace("JobSet", "plays-slice-0-0.plays:61440", 8, 7)),
        (OWN, ProcessPlace("JAXSCALE_* variables", "a:5000", 3, 2)),
        (
            {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"},
            ProcessPlace("GKE's TPU variables", "t0:61440", 2, 1),
        ),
        (SLURM | OWN, ProcessPlace("JAXSCALE_* variables", "a:5000", 3, 2)),
        (SLURM | OPENMPI, place_of(OPENMPI)),
        (JOBSET | {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}, place_of(JOBSET)),
        (SLURM | {"JAXSCALE_COORDINATOR": "10.1.1.1:7000"}, ProcessPlace("Slurm", "10.1.1.1:7000", 5, 3, 1, 2)),
        (
            {name: OPENMPI[name] for name in OPENMPI if "uri" not in name} | {"JAXSCALE_COORDINATOR": "a:7000"},
            ProcessPlace("OpenMPI", "a:7000", 2, 1, 1, 2),
        ),
        (OPENMPI | {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp6://[fe80::1,fe80::2]:4"}, OPENMPI_6),
        (SLURM | {"JAXSCALE_PROCESSES": "1", "JAXSCALE_RANK": "0", "JAXSCALE_COORDINATOR": "a:1"}, None),
        ({"JAXSCALE_MINE": "a variable of the user's own"}, None),
        ({}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({name: SLURM[name] for name in SLURM if "STEP" not in name}, None),  # in an sbatch script, outside of srun
    ],
)
def test_variables_give_the_place_of_a_process(variables, expected):
    assert place_of(variables) == expected


def test_two_steps_and_a_requeued_job_use_ports_of_their_own():
    changes = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "18"}]
    assert len({place_of(SLURM | change).coordinator for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[007-15,20]", "n007"), ("r[1-2]-n[3-4],x", "r1-n3"), ("a-b[2,4]", "a-b2")],
)
def test_the_first_host_of_a_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, "got rank 4 of 4 processes, expected 0 to 3"),
        (TORCHRUN | {"RANK": "\u00b2"}, "environment variable RANK: got '\u00b2', expected a whole number"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "expected HOST:PORT"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "SLURM_STEP_TASKS_PER_NODE: got '2x3'"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: got ''"),
        (OPENMPI | {"OMPI_MCA_orte_hnp_uri": "x"}, "set JAXSCALE_COORDINATOR"),
        ({name: OPENMPI[name] for name in OPENMPI if "uri" not in name}, "set JAXSCALE_COORDINATOR"),  # OpenMPI 5
        ({"JAXSCALE_RANK": "0"}, "JAXSCALE_COORDINATOR, JAXSCALE_PROCESSES is not"),
        (OWN | {"JAXSCALE_COORDINATR": "a:1"}, "did you mean 'JAXSCALE_COORDINATOR'"),
        (OWN | {"JAXSCALE_COORDINATOR": "a:99999"}, "expected HOST:PORT"),
        ({"JAXSCALE_COORDINATOR": "a:1"}, "set JAXSCALE_PROCESSES and JAXSCALE_RANK, too"),
    ],
)
def test_malformed_variables_are_refused_by_name(variables, message):
    with pytest.raises(UserError) as caught:
        place_of(variables)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("processes", "rank", "variables", "expected"),
    [
        (1, 0, {}, [0, 1, 2, 3, 4, 5, 6, 7]),  # JAX under Slurm would take GPU 0 alone
        (2, 1, {}, [4, 5, 6, 7]),
        (8, 3, {}, [3]),
        (4, 3, {"CUDA_VISIBLE_DEVICES": "6", "SLURM_GPUS_ON_NODE": "4"}, [0]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"}, [0, 1]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, [2, 3]),
    ],
)
def test_processes_of_a_host_share_its_gpus(processes, rank, variables, expected, tmp_path):
    for name in [*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm"]:
        (tmp_path / name).touch()
    assert (
        local_gpu_numbers(ProcessPlace("x", "a:1", processes, rank, rank, processes), variables, tmp_path) == expected
    )


def test_gpus_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(UserError, match="3 processes on this host cannot share 4 GPUs evenly"):
        local_gpu_numbers(ProcessPlace("x", "a:1", 3, 0, 0, 3), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


EXPERIMENT = """
import jaxscale as jx

def experiment():
    return jx.Experiment(
        name="joined",
        model=jx.models.Decoder(vocab=256, context=16, layers=2, embed=8, heads=2, mlp=16),
        data=jx.data.Text({text!r}, context=16),
        optimizer=jx.Optimizer(warmup=5, learning_rate=1e-2),
        steps=6, batch=8,
        evaluation=jx.Evaluation(every=0),
        samples=jx.Samples(prompts=()),
        plan=jx.Plan({plan}),
    )
"""


def _start(file: Path, out: Path, variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxscale", "train", str(file), "--out", str(out), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(**variables), text=True, **pipes)


def _torchrun(port: int, rank: int) -> dict[str, str]:
    changes = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    return TORCHRUN | changes | {"MASTER_ADDR": "localhost", "JAX_NUM_CPU_DEVICES": "2"}


PLANS = [
    # by default: processes that a launcher starts, one of which is killed (`tests/launch/test_launch.py`)
    pytest.param('mesh="fsdp:4", zero=3', marks=pytest.mark.variant),
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (
            'mesh="data:4"',
            'pipeline="1f1b:2x4", mesh="fsdp:2"',
            'mesh="fsdp:2,tensor:2", zero=2, memory="full"',
            'mesh="replica:2,fsdp:2", reduce="int8"',
        )
    ),
]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in probes]


def _free_port() -> int:
    return _free_ports(1)[0]


def _experiment(folder: Path, plan: str) -> Path:
    """Write an experiment and its text."""
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    file = folder / "joined.py"
    file.write_text(EXPERIMENT.format(text=str(folder / "text.txt"), plan=plan))
    return file


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_of_two_processes_equals_a_run_of_one(plan, tmp_path):
    file, port = _experiment(tmp_path, plan), _free_port()
    together = [_start(file, tmp_path / "two", _torchrun(port, rank)) for rank in (0, 1)]
    assert main(["train", str(file), "--out", str(tmp_path / "alone")]) == 0
    for process in together:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if row["kind"] == "train"] for name in ("alone", "two")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(losses[1]) == 6  # one log, one writer
    assert [beat.phase for beat in read_heartbeats(tmp_path / "two" / "processes").values()] == ["finished"] * 2


def test_a_process_with_another_seed_is_named(tmp_path):
    file, port = _experiment(tmp_path, 'mesh="fsdp:4", zero=3'), _free_port()
    seeds = ((), ("--seed", "5"))
    different = [_start(file, tmp_path / "no", _torchrun(port, rank), *seeds[rank]) for rank in (0, 1)]
    outputs = [process.communicate(timeout=300)[0] for process in different]
    assert [process.returncode for process in different] == [2, 2], outputs
    assert "rank 1 differs from rank 0: experiment: seed (5 here, 0 there)" in outputs[1]
    assert "another process failed and reports the reason" in outputs[0]


def test_under_a_watchdog_the_missing_ranks_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_HEARTBEATS", str(tmp_path))
    for rank in (0, 2):
        writer = Writer(tmp_path, rank)
        writer.start()
        writer.close()
    assert _missing_ranks_text(ProcessPlace("Slurm", "a:1", 4, 0)) == f"no heartbeat in {tmp_path} from rank 1, 3"
    monkeypatch.delenv("JAXSCALE_HEARTBEATS")
    assert "the outputs of the others" in _missing_ranks_text(ProcessPlace("Slurm", "a:1", 4, 0))


def test_a_process_whose_peers_are_missing_ends_with_a_message(tmp_path):
    file = tmp_path / "joined.py"
    file.write_text(EXPERIMENT.format(text="unread", plan=""))
    processes = [
        _start(file, tmp_path / f"run {rank}", _torchrun(port, rank) | {"JAXSCALE_JOIN_TIMEOUT": "3"})
        for rank, port in enumerate(_free_ports(2))  # each process is alone in its run
    ]
    starts = ("after 3 s, not all 2 processes have joined", "rank 1 of 2 waited for rank 0 at localhost")
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 2, output
        assert f"jaxscale: torchrun: {starts[rank]}" in output
        assert "Traceback" not in output
        assert "Check failure" not in output
        assert not (tmp_path / f"run {rank}").exists()


def test_a_port_in_use_is_refused(tmp_path):
    file = tmp_path / "joined.py"
    file.write_text(EXPERIMENT.format(text="unread", plan=""))
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        process = _start(file, tmp_path / "run", _torchrun(port - 1, 0))
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert f"torchrun: port {port} of the coordinator cannot be used" in output
