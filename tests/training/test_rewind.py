"""A run returns to a named checkpoint with `from_step`, with another learning rate or guard, and goes on from there."""

import dataclasses
import json
import shutil

import pytest

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Guard
from jaxscale.recipe.plan import Plan
from jaxscale.records.metrics import read_metrics
from jaxscale.training.loop import train
from jaxscale.training.run import Run
from jaxscale.values import override

pytestmark = pytest.mark.usefixtures("shared_steps")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")
SLOWER = Optimizer(warmup=5, learning_rate=5e-3)


def exact(run_dir):
    return [{name: row[name] for name in EXACT} for row in read_metrics(run_dir, "train")]


def events(run_dir, name):
    return [row for row in read_metrics(run_dir, "event") if row["name"] == name]


def folders(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def returns(run_dir):
    return json.loads((run_dir / "returns.json").read_text())


FILE = """
from jaxscale import Checkpointing, Evaluation, Experiment, Guard, Optimizer, Plan, Samples
from jaxscale.data import Text
from jaxscale.models import Decoder

def experiment():
    return Experiment(
        name="exploding",
        model=Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
        data=Text({text!r}, context=16),
        optimizer=Optimizer(learning_rate=1e-2, final_learning_rate=1e30, schedule="linear"),
        steps=8,
        batch=4,
        evaluation=Evaluation(every=0, batches=2),
        samples=Samples(every=0, prompts=()),
        checkpoint=Checkpointing(every=1, minutes=None, best=False, keep=2),
        guard=Guard(patience=3),
        plan=Plan(mesh="data:2"),
    )
"""


def test_the_advice_of_exit_code_4_can_be_followed(toy, tmp_path, capsys):
    file, run_dir = tmp_path / "exploding.py", tmp_path / "run"
    file.write_text(FILE.format(text=str(toy().data.path)))
    words = ["train", str(file), "--out", str(run_dir)]
    assert main(words) == 4
    assert "Go on from it with --from 1 and a lower --optimizer.learning_rate" in capsys.readouterr().err
    assert main([*words, "--optimizer.final_learning_rate", "1e-3"]) == 2
    assert "one that returns to a checkpoint with --from STEP also guard, optimizer.learning_rate" in (
        capsys.readouterr().err
    )
    slower = [*words, "--from", "1", "--optimizer.final_learning_rate=1e-3", "--guard.patience", "4"]
    assert main(slower) == 0
    output = capsys.readouterr().out
    assert "continuing" in output
    assert "after step 1" in output
    assert "newer checkpoints are now 00000002.aside, 00000003.aside; remove them" in output
    assert "optimizer.final_learning_rate was 1e+30 and is 0.001 after step 1" in output
    assert [row["step"] for row in exact(run_dir)] == list(range(1, 9))
    assert not events(run_dir, "skipped"), "the skipped steps were made again"
    event = events(run_dir, "resume")[-1]
    changes = {"guard.patience": [3, 4], "optimizer.final_learning_rate": [1e30, 1e-3]}
    assert (event["step"], event["returned"], event["changes"]) == (1, True, changes)
    (record,) = returns(run_dir)
    assert (record["step"], record["changes"], record["aside"]) == (1, changes, event["aside"])
    assert {"00000003.aside", "00000007", "00000008"} <= set(folders(run_dir))
    assert Run.open(run_dir).experiment.guard.patience == 4
    assert main(slower) == 0, "the same command shows the finished run, and does not return again"
    assert "has already returned to step 1 with these settings and this plan" in capsys.readouterr().out
    assert len(returns(run_dir)) == 1


def test_a_finished_run_returns_and_repeats_its_steps_bit_for_bit(toy, whole):
    losses = exact(whole)
    assert folders(whole) == ["00000005", "00000010", "00000012"]
    train(toy(), out=whole, from_step=5, quiet=True)
    assert exact(whole) == losses
    assert folders(whole) == ["00000005", "00000010", "00000010.aside", "00000012", "00000012.aside"]
    assert [row["step"] for row in events(whole, "resume")] == [5]


def test_a_run_that_was_stopped_after_its_return_goes_on_by_the_same_call(toy, whole, tmp_path):
    twin = shutil.copytree(whole, tmp_path / "twin")
    experiment = toy(optimizer=SLOWER, checkpoint=Checkpointing(every=2, minutes=None, keep=9))

    def stop(event):
        return event.kind == "step" and event.step == 7

    train(experiment, out=whole, from_step=5, callbacks=[stop], quiet=True)
    stopped_step = max(Checkpoints(whole / "checkpoints", write=False).steps())
    assert 5 < stopped_step < 12
    train(experiment, out=whole, from_step="5", quiet=True)
    assert events(whole, "resume")[-1]["step"] == stopped_step
    train(experiment, out=twin, from_step=5, quiet=True)
    assert exact(whole) == exact(twin)
    slowest = dataclasses.replace(experiment, optimizer=Optimizer(warmup=5, learning_rate=2e-3))
    train(slowest, out=whole, from_step=5, callbacks=[stop], quiet=True)
    assert [row["step"] for row in events(whole, "resume")] == [5, stopped_step, 5]
    plan = override(Plan(), {"mesh": "data:2", "microbatches": "2"})
    train(slowest, plan, out=whole, from_step=5, callbacks=[stop], quiet=True)
    assert [row["step"] for row in events(whole, "resume")] == [5, stopped_step, 5, 5], "another plan is another return"
    assert "00000012.aside-2" in folders(whole), "nothing that was set aside is overwritten"


@pytest.mark.parametrize(
    ("from_step", "message"),
    [
        (7, "from step 7: .* has checkpoints of the steps 5, 10, 12"),
        (0, "from step 0: .* has checkpoints of the steps 5, 10, 12"),
        ("five", "from step five: .* has checkpoints of the steps 5, 10, 12"),
        ("²", "from step ²: .* has checkpoints of the steps 5, 10, 12"),
        (-5, "from step -5: .* has checkpoints of the steps 5, 10, 12"),
        (12, "from step 12: the run has 12 steps, so no step is left after it"),
        (10, r"from step 10: .*\(step 10: .*; .* has checkpoints of the steps 5, 12"),
    ],
)
def test_a_step_to_which_no_run_can_return_is_refused_and_nothing_changes(toy, whole, from_step, message):
    for path in (whole / "checkpoints" / "00000010").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:-100])
    before = {path: path.read_bytes() for path in whole.glob("*.json*")}, folders(whole)
    with pytest.raises(UserError, match=message):
        train(toy(optimizer=SLOWER), out=whole, from_step=from_step, quiet=True)
    after = {path: path.read_bytes() for path in whole.glob("*.json*")}, folders(whole)
    after[0][whole / "metrics.jsonl"] = before[0][whole / "metrics.jsonl"]  # it has a line on how the start ended
    assert after == before


def test_what_may_not_change_is_refused(toy, whole, tmp_path):
    with pytest.raises(UserError, match=r"another experiment: seed \(1 here, 0 there\)"):
        train(toy(seed=1), out=whole, from_step=5, quiet=True)
    with pytest.raises(UserError, match=r"another experiment: optimizer\.b1"):
        train(toy(optimizer=Optimizer(warmup=5, learning_rate=1e-2, b1=0.5)), out=whole, from_step=5, quiet=True)
    with pytest.raises(UserError, match=r"another experiment: guard\.spike"):
        train(toy(guard=Guard(spike=3.0)), out=whole, quiet=True)
    with pytest.raises(UserError, match=r"from step 5: .*none holds no run"):
        train(toy(), out=tmp_path / "none", from_step=5, quiet=True)
    with pytest.raises(UserError, match="from step 5: resume is never"):
        train(toy(), out=whole, from_step=5, resume="never", quiet=True)


def test_newer_copies_in_the_memory_of_the_host_are_removed(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_MEMORY", str(tmp_path / "memory"))
    experiment = toy(checkpoint=Checkpointing(every=5, minutes=None, memory_every=1))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "drop_host_copies", lambda self: self._host_copies.wait())  # as after a SIGKILL
        train(experiment, out=tmp_path / "run", quiet=True)
    copies = set((tmp_path / "memory").rglob("*-rank-00000"))
    assert copies
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000012")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000010")
    train(experiment, out=tmp_path / "run", from_step=5, quiet=True)
    assert events(tmp_path / "run", "resume")[-1]["step"] == 5
    assert not copies & set((tmp_path / "memory").rglob("*-rank-00000"))
