"""The schedulers' documents: valid by the schedulers' own schemas and clients, and safe for any word of the command."""

import ast
import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import jaxscale
from jaxscale.errors import UserError
from jaxscale.launch import Cluster, JobSet, Local, QueuedResource, Slurm, Ssh
from jaxscale.launch.cluster import read_cluster
from jaxscale.launch.documents import PROXIES, passed_variables
from jaxscale.launch.jobset import jobset
from jaxscale.launch.queued_resource import accelerator_type, request
from jaxscale.launch.slurm import sbatch_script
from jaxscale.launch.ssh import ALIVE, ssh_commands
from jaxscale.launch.submit import check_mesh, launch
from jaxscale.platforms.join import place_of
from tests.launch.command_words import COMMAND

CONFIGS = sorted((Path(jaxscale.__file__).parents[1] / "tpu_configs").glob("*.py"))
TPU = QueuedResource("p", "z", "r")
POD = JobSet("image:1")


# -- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_cluster_of_the_repository_prints_its_document(path, capsys):
    cluster = read_cluster(str(path))
    assert launch(cluster, COMMAND, cluster.run_dir("plays"), None, is_dry_run=True) == 0
    out = capsys.readouterr().out
    assert "train" in out
    assert ("JAXSCALE_TRUST" in out) is not isinstance(cluster.scheduler, Local)  # this machine has the user's records
    assert not re.search(r"token|password|secret", out, re.IGNORECASE)
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_repository_has_the_clusters_that_the_documentation_names():
    assert {path.stem for path in CONFIGS} >= {
        "v5e_16", "v5e_256", "v5p_128", "v6e_256", "v6e_2x256", "7x_64", "v4_64", "h100_8", "h100_slurm", "h200_slurm",
        "b200_slurm", "gke_v5e", "gke_h100", "colab",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("platform", "hosts", "chips", "accelerator"),
    [  # the shapes of xpk 1.16 (system_characteristics.py): machines per slice, chips per machine, type of the slice
        ("tpu v5e:4x4", 4, 4, "v5litepod-16"),
        ("tpu v5e:16x16", 64, 4, "v5litepod-256"),
        ("tpu v5p:4x4x4", 16, 4, "v5p-128"),
        ("tpu v5p:4x4x8", 32, 4, "v5p-256"),
        ("tpu v4:4x4x4", 16, 4, "v4-128"),
        ("tpu 7x:4x4x4", 16, 4, "tpu7x-128"),
        ("tpu v6e:4x4", 4, 4, "v6e-16"),
        ("tpu v6e:16x16", 64, 4, "v6e-256"),
    ],
)
def test_shapes_of_slices(platform, hosts, chips, accelerator):
    cluster = Cluster(platform, TPU, shared="gs://b")
    assert (cluster.host_count, cluster.chips_per_host, accelerator_type(cluster)) == (hosts, chips, accelerator)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster("tpu v5e:5x5", TPU), "v5e:5x5|5x5"),
        (lambda: Cluster("gpu h100 x 8", TPU), "QueuedResource: got the platform 'gpu h100 x 8', expected a TPU"),
        (lambda: Cluster("gpu h100 x 10", Slurm(), hosts=4), "10 chips of 'gpu h100 x 10' cannot be shared evenly"),
        (lambda: Cluster("cpu x 4", Slurm()), "expected the number of machines"),
        (lambda: Cluster("gpu h100 x 8", hosts=0), "Cluster.hosts: got 0"),
        (lambda: Cluster("gpu h100 x 16", Ssh(("a",))), r"got 1 addresses, expected 2"),
        (
            lambda: Cluster("gpu h100 x 8", Slurm(), variables=("TOKEN=abc",)),
            "expected the name of an environment variable",
        ),
        (lambda: Cluster("gpu h100 x 8", setup=("module load cuda",)), "Cluster.setup: expected none with Local"),
        (lambda: Cluster("gpu h100 x 8", grace=1), "Cluster.grace: got 1 seconds"),
        (lambda: Cluster("gpu h100 x 8", Slurm(), python="a\nb"), "expected one line"),
        (lambda: Slurm(time="tomorrow"), "Slurm.time: got 'tomorrow'"),
        (lambda: Slurm(partition="a b"), "expected a word without spaces"),
        (lambda: Slurm(gpus="four"), "expected 'gpus-per-node', 'gres'"),
        (lambda: Slurm(options=("-p x",)), "expected an option of sbatch"),
        (lambda: Slurm(jobs=0), "Slurm.jobs: got 0"),
        (lambda: JobSet(""), "JobSet.image: got ''"),
        (lambda: JobSet("i", queue="Q_1"), "lower-case letters, digits and hyphens"),
        (lambda: JobSet("i", secrets=("x" * 64,)), r"\(64 characters\), expected at most 63"),
        (lambda: JobSet("i", restarts=-1), "JobSet.restarts: got -1"),
        (lambda: QueuedResource("p", "z", ""), "QueuedResource.runtime: got ''"),
        (lambda: QueuedResource("p", "z", "r", spot=True, reservation="x"), "got spot and a reservation"),
        (lambda: Ssh(()), "Ssh.hosts: got none"),
        (lambda: Ssh(("a", "a")), "each address once"),
        (lambda: Ssh(("-oProxyCommand=x",)), "expected an address"),
        (lambda: Ssh(("a",), port=80), "Ssh.port: got 80"),
        (lambda: Local(0), "local: got 0 processes"),
        (lambda: read_cluster(None), "launch lacks --cluster"),
        (lambda: read_cluster("tpu_configs/h200_slrum.py"), "did you mean 'tpu_configs/h200_slurm.py'"),
        (lambda: read_cluster("local:0"), "local: got 0 processes"),
    ],
)
def test_bad_facts_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no cluster"),
        ("cluster = 3", "defines no cluster"),
        ("from jaxscale.launch import Cluster\ncluster = Cluster('gpu h1000 x 8')", "unknown gpu 'h1000'"),
        ("1 / 0", "ZeroDivisionError"),
        ("cluster =", "SyntaxError"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}.*{message}"):
        read_cluster(str(path))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fsdp:16", "which has 16 devices, but 'tpu v6e:4x4 x 2' has 32"),
        ("tensor:32", "whose tensor axis spans 2 slices"),
        ("replica:2,fsdp:16", None),
        (None, None),
    ],
)
def test_the_mesh_fits_the_cluster(mesh, message):
    experiment = jaxscale.Experiment(
        name="plays",
        model=jaxscale.models.Decoder(vocab=64, context=8, layers=1, heads=1, embed=8),
        data=jaxscale.data.Text("text.txt", context=8),
        plan=jaxscale.Plan(mesh=mesh),
    )
    cluster = Cluster("tpu v6e:4x4 x 2", POD, shared="gs://b")
    if message is None:
        check_mesh(cluster, experiment)
    else:
        with pytest.raises(UserError, match=message):
            check_mesh(cluster, experiment)


# -- Slurm and ssh ----------------------------------------------------------------------------------------------------


def _fake_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put programs on the path that print their words, and `python` that runs what follows `--`."""
    folder.mkdir()
    (folder / "python").write_text('#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    (folder / "srun").write_text('#!/bin/bash\nwhile [ "$1" != python ]; do shift; done; exec "$@"\n')
    (folder / "scontrol").write_text('#!/bin/bash\necho scontrol "$@"\n')
    (folder / "show").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"; exit ${CODE:-0}\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_words_of_the_command_reach_the_processes_unchanged(tmp_path, monkeypatch):
    _fake_programs(tmp_path / "bin", monkeypatch)
    cluster = Cluster("gpu h200 x 32", Slurm(partition="h200"), shared="/shared")
    folder = tmp_path / "a $(b) 'c'"
    folder.mkdir()
    script = sbatch_script(cluster, COMMAND, "/shared/runs/it's $HOME", "data=5", str(folder))
    lines = script.replace("-m jaxscale train", "show").replace("-- python show", "-- show")
    result = subprocess.run(
        ["bash", "-c", lines], capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "7"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == COMMAND[1:]
    for code, requeues in ((75, True), (130, True), (1, False), (2, False)):
        result = subprocess.run(
            ["bash", "-c", lines],
            capture_output=True,
            text=True,
            env={**os.environ, "SLURM_JOB_ID": "7", "CODE": str(code)},
        )
        assert result.returncode == code
        assert ("scontrol requeue 7" in result.stdout) == requeues
    words = ssh_commands(Cluster("gpu h200 x 16", Ssh(("n1", "n2"))), COMMAND, "runs/x", None, 3, str(folder))
    shell_text = words[1][-1].replace("-m jaxscale train", "show").replace("-- python show", "-- show")
    result = subprocess.run(["bash", "-c", shell_text], input="", capture_output=True, text=True)
    assert result.stdout.splitlines() == COMMAND[1:], result.stderr


def test_the_options_of_a_batch_script(monkeypatch):
    queue = Slurm("big", "acme", "high", "2-00:00:00", "gres", ("--constraint=ib",), "img.sqsh", jobs=3)
    cluster = Cluster(
        "gpu b200 x 16", queue, shared="/shared", setup=("module load cuda",), interface="ib0", cache="/scratch/c"
    )
    script = sbatch_script(cluster, COMMAND, "/shared/runs/plays 100%", None, "/home/me")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))
    assert options == {
        "job-name": "plays-100-", "nodes": "2", "ntasks-per-node": "1", "partition": "big", "account": "acme",
        "qos": "high", "time": "2-00:00:00", "signal": "TERM@120", "gres": "gpu:8", "open-mode": "append",
        "output": '"/shared/runs/plays 100%%/processes/slurm-%j.log"', "requeue": "", "constraint": "ib",
        "exclusive": "", "mem": "0", "dependency": "singleton",
    }  # fmt: skip
    assert "module load cuda\n" in script
    assert "export NCCL_SOCKET_IFNAME=ib0\n" in script
    assert "--container-image=img.sqsh --container-mounts=/home/me:/home/me,/shared:/shared" in script
    assert all(name in script for name in PROXIES)
    with pytest.raises(UserError, match="expected printable characters"):
        sbatch_script(cluster, COMMAND, "/a\nb", None)


def test_ssh_gives_each_host_its_place_and_each_attempt_its_port():
    cluster = Cluster("gpu h200 x 16", Ssh(("n1", "n2"), user="me", options=("-i key",)))
    first, second = (ssh_commands(cluster, COMMAND, "runs/x", None, attempt) for attempt in (1, 2))
    assert first[0][:-1] == ["ssh", "-o", "BatchMode=yes", "-i", "key", *ALIVE, "me@n1"]
    places = []
    for words in (*first, second[0]):
        script = shlex.split(words[-1])[2]
        pairs = re.findall(r"^export (JAXSCALE_\w+)=(.*)$", script, re.MULTILINE)
        places.append(place_of(dict(pairs)))
    assert [(place.coordinator, place.rank) for place in places if place] == [
        ("n1:61441", 0), ("n1:61441", 1), ("n1:61442", 0),
    ]  # fmt: skip


def test_variables_are_passed_on_by_name_alone(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "do-not-print")
    cluster = Cluster("gpu h200 x 16", Ssh(("n1", "n2")), variables=("MY_TOKEN",))
    assert "do-not-print" not in str(ssh_commands(cluster, COMMAND, "runs/x", None, 1))
    assert passed_variables(cluster) == {"MY_TOKEN": "do-not-print"}
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(UserError, match="MY_TOKEN is not set here"):
        passed_variables(cluster)
    pods = Cluster("tpu v5e:4x4", POD, shared="gs://b", variables=("MY_TOKEN",))
    with pytest.raises(UserError, match=r"put them into a Kubernetes secret, and name it in JobSet\.secrets"):
        jobset(pods, COMMAND, "gs://b/runs/x", None)
    with pytest.raises(UserError, match="read them on the machines"):
        request(dataclasses.replace(pods, scheduler=TPU), COMMAND, "gs://b/runs/x", None)


def test_a_missing_or_refusing_scheduler_is_reported(tmp_path, monkeypatch):
    cluster = Cluster("gpu h200 x 16", Slurm("nope"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"cannot run sbatch .*write the document with --dry-run, and run `sbatch .*job\.sbatch`"
    ):
        launch(cluster, COMMAND, str(tmp_path / "run"), None)
    with pytest.raises(UserError, match="cannot run kubectl"):
        launch(Cluster("tpu v5e:4x4", POD, shared="gs://b"), COMMAND, "gs://b/runs/x", None)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(UserError, match="sbatch refused the document: sbatch: error: invalid partition"):
        launch(cluster, COMMAND, str(tmp_path / "run"), None)
