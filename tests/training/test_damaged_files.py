"""Damage to the files of a run gives verified content, an older checkpoint by name, or one error.

`python experiments/faults.py --part files --part disk` tries hundreds of cases.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxscale.checkpoint.restore import restore_newest
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import UserError
from jaxscale.records.metrics import read_metrics
from jaxscale.records.record import RunRecord
from jaxscale.report.page import report_html
from jaxscale.step.build import build
from jaxscale.training.loop import train

pytestmark = pytest.mark.usefixtures("shared_steps")
NEWEST = "checkpoints/00000012"


def link(path, target):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def grow(path):
    os.truncate(path, 8 << 30)


FALL_BACKS = {
    "a device for a description": lambda run: link(run / NEWEST / "_CHECKPOINT_METADATA", "/dev/zero"),
    "a pipe for a description": lambda run: pipe(run / NEWEST / "state" / "_METADATA"),
    "a link to itself": lambda run: link(run / NEWEST / "state" / "d", "d"),
    "a description of 8 GiB": lambda run: grow(run / NEWEST / "state" / "manifest.ocdbt"),
    "a link to another step": lambda run: link(run / NEWEST, "00000005"),
    "a file for a folder": lambda run: (shutil.rmtree(run / NEWEST), (run / NEWEST).write_text("")),
}


@pytest.fixture(scope="module")
def step(toy):
    return build(toy())


@pytest.mark.parametrize("name", FALL_BACKS)
def test_what_is_no_checkpoint_gives_way_to_the_one_before_by_name(toy, step, whole, capsys, name):
    FALL_BACKS[name](whole)
    (whole / f"{NEWEST}.damaged").write_text("of an earlier damage")
    restored = restore_newest(whole, step)
    assert restored.description.step == 10
    assert "jaxscale: checkpoint of step 12 is damaged and skipped: " in capsys.readouterr().err
    messages = []
    Checkpoints(whole / "checkpoints").restore_arrays(step.canonical_abstract(), set_aside=True, say=messages.append)
    assert len(messages) == 1
    assert Checkpoints(whole / "checkpoints").steps() == [5, 10]


def test_a_name_that_is_not_the_runs_own_is_no_step(whole):
    (whole / NEWEST).rename(whole / "checkpoints" / "12")
    assert Checkpoints(whole / "checkpoints", write=False).steps() == [5, 10]
    assert (whole / "checkpoints" / "12").exists()


REFUSED = {
    "a log that is a pipe": (lambda run: pipe(run / "metrics.jsonl"), r"metrics\.jsonl is a pipe"),
    "a log that is a device": (lambda run: link(run / "metrics.jsonl", "/dev/zero"), r"metrics\.jsonl is a device"),
    "a log in another file": (
        lambda run: link(run / "metrics.jsonl", "samples.txt"),
        r"metrics\.jsonl is a link to .*samples\.txt",
    ),
    "a log of 8 GiB": (
        lambda run: grow(run / "metrics.jsonl"),
        r"metrics\.jsonl is damaged: a line has over 16,777,216 bytes",
    ),
    "a lock in another file": (lambda run: link(run / "lock", "metrics.jsonl"), "lock is a link to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_appended_to_is_refused_and_nothing_else_is_touched(toy, whole, name):
    (whole / "samples.txt").write_text("a sample")
    shutil.rmtree(whole / NEWEST)
    damage, message = REFUSED[name]
    damage(whole)
    log = None if "metrics" in message else (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        train(toy(), out=whole, quiet=True)
    assert (whole / "samples.txt").read_text() == "a sample"
    assert log is None or (whole / "metrics.jsonl").read_bytes() == log


def test_checkpoints_without_their_experiment_are_not_continued(toy, whole):
    (whole / "experiment.json").unlink()
    with pytest.raises(UserError, match=r"has checkpoints, but no experiment\.json"):
        train(toy(), out=whole, quiet=True)
    assert Checkpoints(whole / "checkpoints", write=False).steps() == [5, 10, 12]


def test_a_report_is_made_of_what_can_be_read(whole):
    pipe(whole / "metrics.jsonl")
    (whole / "samples.txt").symlink_to("/dev/zero")
    link(whole / "layout.json", "layout.json")
    (whole / "processes" / "rank-00000.json").unlink()
    (whole / "processes" / "rank-00000.json").symlink_to("/dev/zero")
    record = RunRecord.read(whole)
    assert [line.partition(":")[0] for line in record.unread] == ["layout.json", "metrics.jsonl", "samples.txt"]
    assert "is a pipe, expected a regular file" in report_html(record)


def test_a_run_without_its_checkpoints_says_that_it_starts_again(toy, whole, capsys):
    before = read_metrics(whole, "train").column("loss")
    shutil.rmtree(whole / "checkpoints")
    train(toy(), out=whole)
    assert "holds no checkpoint: the run starts again at step 1" in capsys.readouterr().out
    np.testing.assert_array_equal(read_metrics(whole, "train").column("loss"), before)


@pytest.mark.parametrize("name", ["plan.json", "tokenizer.json", "source/source.json"])
def test_a_changed_file_is_not_used(toy, whole, name):
    from jaxscale.checkpoint.restore import read_tokenizer
    from jaxscale.records.source import load_experiment

    path = whole / name
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match=rf"{name} is not what the run wrote.*start the run again"):
        read_tokenizer(whole) if name == "tokenizer.json" else load_experiment(whole)
    train(toy(steps=13), out=whole, quiet=True)
    load_experiment(whole)
    assert read_tokenizer(whole) is not None


def test_the_output_may_be_a_file_on_a_full_disk(toy, whole, monkeypatch):
    """A run loses its lines on the screen alone; a command whose output is its result ends with a message."""
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        train(toy(steps=13), out=whole)
        with pytest.raises(OSError, match="No space left"):  # the text that is left, as at the exit
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert Checkpoints(whole / "checkpoints", write=False).steps()[-1] == 13
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "jaxscale", "report", str(whole)]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        "jaxscale: cannot write the output: No space left on device. Free some space, and start again\n"
    )


def test_a_lock_that_cannot_be_written_is_one_sentence(toy, tmp_path):
    """On a full disk, a file can often be made, but not be written."""
    run = tmp_path / "run"
    run.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(UserError, match=r"cannot write .*lock: File too large.*Free some space"):
            train(toy(), out=run, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_may_not_be_read_is_one_sentence(whole):
    """In a process without the rights of root, to which modes mean nothing."""
    run = whole
    (run / "source").chmod(0)
    program = (
        "import sys; sys.path.insert(0, 'experiments')\n"
        "from fault_injection.forks import drop_root_reading\n"
        "from jaxscale.cli.main import main\n"
        "drop_root_reading()\n"
        f"sys.exit(main(['evaluate', {str(run)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (run / "source").chmod(0o700)
    assert result.returncode == 2, result.stderr
    assert "source.json: Permission denied. Check that you may read" in result.stderr
    assert result.stderr.count("\n") == 1
