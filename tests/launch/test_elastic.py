"""Elastic runs: the sizes at which a plan can go on, and the machines that are left."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.data import Text
from jaxscale.errors import UserError
from jaxscale.launch import Cluster, JobSet, Local, Slurm, Ssh
from jaxscale.launch.elastic import Elastic, possible_sizes, with_fields
from jaxscale.launch.ssh import launch_ssh, ssh_commands, unreachable_ending
from jaxscale.launch.submit import check_copies, elastic_of
from jaxscale.launch.verdict import Ending
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Checkpointing, Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.records.metrics import read_metrics


def _experiment(batch: int = 24, **plan) -> Experiment:
    model = Decoder(vocab=64, context=8, layers=1, embed=8, heads=2)
    return Experiment("plays", model, Text("x"), batch=batch, plan=Plan(**{"mesh": "replica:4,fsdp:2", **plan}))


@pytest.mark.parametrize("batch", [8, 24, 48, 64, 96])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_every_size_has_the_same_batch_and_no_more_rows_at_a_time(batch, microbatches):
    if batch % (8 * microbatches):
        return
    experiment = _experiment(batch, microbatches=microbatches)
    rows = batch // (8 * microbatches)
    sizes_by_count = possible_sizes(experiment)
    assert sizes_by_count[4].fields == {"plan.mesh": "replica:4,fsdp:2", "plan.microbatches": str(microbatches)}
    for replicas, size in sizes_by_count.items():
        count = int(size.fields["plan.microbatches"])
        assert batch % (count * replicas * 2) == 0
        assert batch // (count * replicas * 2) <= rows
    assert (3 in sizes_by_count) == (batch % 6 == 0)
    assert {1, 2} <= set(sizes_by_count)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mesh": "fsdp:8"}, "got the mesh fsdp:8, expected a replica axis"),
        ({"mesh": None}, "got the mesh auto"),
        ({"mesh": "replica:2", "pipeline": "1f1b:2x4"}, "its schedule fixes the microbatches"),
        ({"mesh": "replica:2", "diloco": "every=10"}, "each replica has weights of its own"),
        ({"mesh": "replica:2", "reduce": "int8"}, "each replica keeps its rounding errors"),
    ],
)
def test_a_plan_that_belongs_to_its_replicas_is_refused(plan, message):
    with pytest.raises(UserError, match=message):
        possible_sizes(_experiment(**plan))


def _killed(rank: int) -> Ending:
    return Ending(rank, f"node{rank}", 1, "exit", -9)


def test_lost_replicas_are_left_out_until_none_can_go_on(capsys):
    elastic = Elastic(possible_sizes(_experiment()), 8)
    assert elastic.slots == list(range(8))
    elastic.note(None)
    elastic.note(Ending(3, "node3", 1, "exit", 1))  # an error of the program is no lost machine
    elastic.note(Ending(3, "node3", 1, "timeout"))
    assert elastic.slots == list(range(8))
    elastic.note(_killed(3))
    assert elastic.slots == [0, 1, 4, 5, 6, 7]
    assert elastic.size.fields == {"plan.mesh": "replica:3,fsdp:2", "plan.microbatches": "2"}
    elastic.note(_killed(3))  # the fourth process of this attempt is number 5 of all
    assert elastic.slots == [0, 1, 6, 7]
    elastic.note(Ending(0, "node0", 1, "frozen"))
    assert elastic.slots == [6, 7]
    elastic.note(_killed(1))
    assert elastic.slots == list(range(8))
    err = capsys.readouterr().err
    assert "replica 1 (node3) was lost; the run goes on with 3 of 4 replicas, and with a batch of 24 in 2 micro" in err
    assert "cannot go on with fewer replicas, and starts all 4 again" in err


def test_a_host_that_ssh_does_not_reach_is_lost(tmp_path):
    processes = [subprocess.Popen(["sh", "-c", f"exit {code}"], text=True) for code in (1, 255, 0)]
    for process in processes:
        process.wait()
    assert unreachable_ending(processes, 2) == Ending(1, "the host of rank 1", 2, "missing")
    assert unreachable_ending(processes[::2], 2) is None


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(UserError, match="batch 12 cannot be split into 1 microbatches over mesh replica:4,fsdp:2"):
        possible_sizes(_experiment(batch=12))


def test_a_size_that_does_not_divide_the_batch_leaves_a_machine_idle():
    elastic = Elastic(possible_sizes(_experiment(batch=16)), 4)
    elastic.note(_killed(0))
    assert elastic.slots == [1, 2]  # 16 rows cannot be split over 3 replicas
    elastic.note(_killed(0))
    assert elastic.slots == [2, 3]


def test_copies_in_the_memory_of_pods_are_refused():
    experiment = dataclasses.replace(_experiment(), checkpoint=Checkpointing(memory_every=5))
    check_copies(Cluster("gpu h100 x 32", Slurm()), experiment)
    with pytest.raises(UserError, match=r"checkpoint\.memory_every: a JobSet restarts in new pods"):
        check_copies(Cluster("gpu h100 x 32", JobSet("image:1")), experiment)


def test_only_launchers_that_start_the_processes_are_elastic():
    experiment = _experiment()
    assert elastic_of(Cluster("local", Local(4)), experiment, None) is None
    assert elastic_of(Cluster("local", Local(4)), experiment, "replica").slots == [0, 1, 2, 3]
    with pytest.raises(UserError, match="got 'slice', expected replica"):
        elastic_of(Cluster("local", Local(4)), experiment, "slice")
    with pytest.raises(UserError, match="6 processes cannot be shared evenly by 4 replicas"):
        elastic_of(Cluster("local", Local(6)), experiment, "replica")
    for scheduler in (Slurm(), JobSet("image:1")):
        with pytest.raises(UserError, match="restarts all machines when one is lost; expected ssh or local"):
            elastic_of(Cluster("gpu h100 x 32", scheduler), experiment, "replica")


def test_the_hosts_that_are_left_get_new_numbers():
    cluster = Cluster("gpu h100 x 32", Ssh(("a", "b", "c", "d")))
    experiment = dataclasses.replace(_experiment(), plan=Plan(mesh="replica:4,fsdp:8"), batch=96)
    elastic = elastic_of(cluster, experiment, "replica")
    elastic.note(_killed(0))
    command = with_fields(["train", "e.py", "--plan.mesh=replica:4,fsdp:8"], elastic.size.fields)
    commands = ssh_commands(cluster, command, "/runs/x", None, 2, "/home", elastic.slots)
    assert [words[-2] for words in commands] == ["b", "c", "d"]
    for rank, words in enumerate(commands):
        assert "export JAXSCALE_PROCESSES=3" in words[-1]
        assert f"export JAXSCALE_RANK={rank}" in words[-1]
        assert "export JAXSCALE_COORDINATOR=b:" in words[-1]
        assert "--plan.mesh=replica:3,fsdp:8" in words[-1]


SSH = """#!/bin/bash
[ "${@: -2:1}" = dead ] && exit 255
exec sh -c "${@: -1}"
"""


@pytest.mark.slow
def test_a_run_over_ssh_goes_on_without_a_host_that_is_not_reached(tmp_path, monkeypatch, capfd):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "TEXT": str(tmp_path / "text.txt")}
    variables["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster("cpu x 2", Ssh(("127.0.0.1", "dead")), hosts=2, python=sys.executable)
    elastic = Elastic(possible_sizes(_experiment(8, mesh="replica:2,fsdp:2")), 2)
    file = Path(__file__).with_name("faulty.py")
    command = ["train", str(file), "--plan.mesh=replica:2,fsdp:2", f"--out={tmp_path / 'run'}"]
    code = launch_ssh(cluster, command, str(tmp_path / "run"), None, elastic)
    assert code == 0, capfd.readouterr()
    assert "replica 1 (the host of rank 1) was lost; the run goes on with 1 of 2 replicas" in capfd.readouterr().err
    assert [row["step"] for row in read_metrics(tmp_path / "run", "train")] == list(range(1, 13))
