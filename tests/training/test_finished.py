"""A run is finished if the content of its newest checkpoint proves it; the name of a folder proves nothing."""

import shutil

import pytest

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.records.metrics import read_metrics
from jaxscale.training.loop import train

pytestmark = pytest.mark.usefixtures("shared_steps")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")


def exact(run_dir):
    return [{name: row[name] for name in EXACT} for row in read_metrics(run_dir, "train")]


def last_event(run_dir, name):
    return [row for row in read_metrics(run_dir, "event") if row["name"] == name][-1]


@pytest.mark.parametrize("name", ["00000999", "00000012"])
def test_an_empty_folder_finishes_no_run(toy, whole, capsys, name):
    losses = exact(whole)
    folder = whole / "checkpoints"
    shutil.rmtree(folder / "00000012")
    (folder / name).mkdir()
    run = train(toy(), out=whole)
    output = capsys.readouterr().out
    assert f"checkpoint of step {int(name)} is damaged and skipped" in output
    assert "the run is complete" not in output
    assert exact(whole) == losses
    assert run.step == 12
    assert last_event(whole, "resume")["step"] == 10
    assert (folder / f"{name}.damaged").exists()


def test_a_finished_run_reports_a_damaged_checkpoint_and_trains_again_from_the_one_before(toy, whole, capsys):
    losses = exact(whole)
    for path in (whole / "checkpoints" / "00000012").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(bytes(content))
    train(toy(), out=whole)
    assert "checkpoint of step 12 is damaged and skipped" in capsys.readouterr().out
    assert exact(whole) == losses


@pytest.mark.parametrize("link", [True, False])
def test_a_linked_or_renamed_checkpoint_is_damaged(toy, whole, capsys, link):
    folder = whole / "checkpoints"
    losses = exact(whole)
    shutil.rmtree(folder / "00000012")
    if link:
        (folder / "00000012").symlink_to(folder / "00000010")
    else:
        shutil.copytree(folder / "00000010", folder / "00000012")
    train(toy(), out=whole)
    assert "the folder's name is 00000012, but its content is of step 10" in capsys.readouterr().out
    assert exact(whole) == losses


def test_superscripts_are_no_steps(toy, whole, capsys):
    (whole / "checkpoints" / "²").mkdir()
    assert "²" not in Checkpoints(whole / "checkpoints", write=False).steps()
    train(toy(), out=whole)
    assert "the run is complete" in capsys.readouterr().out
