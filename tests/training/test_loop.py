import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import Diverged, MostlySkipped, Preempted, UserError
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Guard, Samples
from jaxscale.recipe.plan import Plan
from jaxscale.records.metrics import read_metrics
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.training.loop import train
from jaxscale.training.run import Run

pytestmark = pytest.mark.usefixtures("shared_steps")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")


def exact(run):
    return [{name: row[name] for name in EXACT} for row in read_metrics(run, "train")]


def events(run, name):
    return [row for row in read_metrics(run, "event") if row["name"] == name]


def steps_saved(run):
    return Checkpoints(run / "checkpoints", write=False).steps()


def test_a_run_leaves_what_the_contract_says(toy, tmp_path):
    out = tmp_path / "run"
    experiment = toy(
        steps=30,
        evaluation=Evaluation(every=10, batches=2),
        samples=Samples(every=20, prompts=("the ", "cat"), tokens=20),
    )
    run = train(experiment, out=out, quiet=True)
    rows = run.metrics
    assert rows.column("step").tolist() == list(range(1, 31))
    assert rows.column("tokens").tolist() == [4 * 16 * n for n in range(1, 31)]
    assert all(type(row["tokens"]) is int for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.0, "it learns"
    np.testing.assert_allclose(
        rows.column("learning_rate"), [experiment.optimizer.learning_rate_at(n, 30) for n in range(30)], rtol=1e-5
    )
    for name in ("grad_norm", "step_seconds", "tokens_per_second", "flop_per_second"):
        assert (rows.column(name) > 0).all()
    np.testing.assert_allclose(rows.column("tokens_per_second") * rows.column("step_seconds"), 64)
    assert [row["step"] for row in run.evaluations] == [10, 20, 30]
    compiled = events(out, "compile")[0]
    assert {"seconds", "argument_bytes", "temp_bytes"} <= compiled.keys()
    assert events(out, "predicted")[0]["model_flop"] > 0
    (taken,) = events(out, "kernels")
    assert (taken["platform"], taken["attention"], taken["cross_entropy"]) == ("cpu", "plain", "reference")
    assert taken["why"]["attention"] == "kernels are for TPU and GPU"
    assert "attention plain (kernels are for TPU and GPU)" in (out / "report.html").read_text()
    # every 5, every evaluation that is the best yet, the newest three kept
    assert [row["step"] for row in events(out, "checkpoint")] == [5, 10, 15, 20, 25, 30]
    assert steps_saved(out) == [20, 25, 30]
    assert [(s.step, s.prompt) for s in run.samples] == [(20, "the "), (20, "cat"), (30, "the "), (30, "cat")]
    assert all(s.text for s in run.samples)
    assert json.loads((out / "plan.json").read_text())["mesh"] == "data:2"
    assert json.loads((out / "experiment.json").read_text())["steps"] == 30
    assert json.loads((out / "layout.json").read_text())["mesh"] == {"data": 2}
    assert (out / "source" / "source.json").exists()
    assert "toy" in (out / "report.html").read_text()
    assert list((out / "tensorboard").iterdir())
    assert events(out, "finished")[0]["loss"] == run.held_out_loss


def test_log_every_counts_all_steps(toy, tmp_path):
    run = train(toy(), out=tmp_path / "run", log_every=5, quiet=True)
    assert run.metrics.column("step").tolist() == [5, 10, 12]
    assert run.metrics.column("tokens").tolist() == [320, 640, 768]


def test_a_step_over_the_limit_is_refused_once_it_is_compiled(toy, tmp_path):
    with pytest.raises(
        UserError, match=r"the compiled step needs .*B per device, but the limit is 1.00 KiB: set memory"
    ):
        train(toy(), limit="1KiB", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints" / "00000001").exists()


def test_a_finished_run_says_so_and_trains_no_more(toy, whole, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    run = train(toy(), out=whole)
    said = capsys.readouterr().out
    assert re.search(r"toy +finished\n", said)
    assert re.search(r"steps +12 of 12, 768 target tokens\n", said)
    assert "the run is complete: set steps above 12" in said
    assert (whole / "metrics.jsonl").read_bytes() == before
    assert int(run.state.step) == run.step == 12


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(toy, tmp_path):
    constant = toy(optimizer=Optimizer(schedule="constant"))
    train(constant, steps=7, out=tmp_path / "a", quiet=True)
    train(constant, steps=9, out=tmp_path / "a", quiet=True)
    train(constant, steps=9, out=tmp_path / "b", quiet=True)
    assert exact(tmp_path / "a") == exact(tmp_path / "b")
    assert events(tmp_path / "a", "resume")[0]["step"] == 7


def test_continues_under_another_plan(toy, whole):
    drop_checkpoint(whole, 12)
    before = read_metrics(whole, "train")
    run = train(toy(), Plan(mesh=MeshSpec(fsdp=2), zero=3, microbatches=2), out=whole, quiet=True)
    assert [row["step"] for row in events(whole, "resume")] == [10]
    assert run.metrics.column("tokens").tolist() == before.column("tokens").tolist()
    np.testing.assert_allclose(run.metrics.column("loss"), before.column("loss"), rtol=1e-5)
    assert json.loads((whole / "plan.json").read_text())["mesh"] == "fsdp:2"


def drop_checkpoint(run, step):
    shutil.rmtree(run / "checkpoints" / f"{step:08d}")


def test_another_experiment_is_refused_by_name(toy, whole):
    other = toy(seed=7, model=Decoder(vocab=256, context=16, layers=1, embed=8, heads=4, mlp=16))
    with pytest.raises(
        UserError, match=r"another experiment: model.heads \(4 here, 2 there\); seed \(7 here, 0 there\)"
    ):
        train(other, out=whole, quiet=True)


def test_what_may_change_may_change(toy, whole):
    changed = toy(
        steps=14,
        evaluation=Evaluation(every=1, batches=1),
        samples=Samples(every=1, prompts=()),
        checkpoint=Checkpointing(every=1),
    )
    assert train(changed, out=whole, quiet=True).step == 14


def test_never_resuming_keeps_the_old_run_aside(toy, whole):
    shutil.copytree(whole, whole.with_name("whole.1"))
    run = train(toy(), out=whole, resume="never", quiet=True, callbacks=[lambda event: event.step == 3])
    assert run.step == 3
    assert Run.open(whole.with_name("whole.2")).step == 12


def test_two_runs_in_one_directory(toy, whole):
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, whole / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match=r"is in use by process \d+ on "):
            train(toy(), out=whole, quiet=True)
        other.stdin.write(b"\n")
        other.stdin.close()
    assert train(toy(), out=whole, quiet=True).step == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_so(toy, tmp_path, whole, number, monkeypatch):
    stop_after(monkeypatch, 7, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Preempted, match=rf"stopped by {number.name} after step 7, and saved"):
        train(toy(), out=tmp_path / "run", quiet=True)
    monkeypatch.undo()
    assert steps_saved(tmp_path / "run") == [5, 7]
    assert events(tmp_path / "run", "preempted")[0]["step"] == 7
    assert signal.getsignal(signal.SIGINT) is before
    if number == signal.SIGTERM:
        train(toy(), out=tmp_path / "run", quiet=True)
        assert exact(tmp_path / "run") == exact(whole)
        same_checkpoint(tmp_path / "run", whole, 12)


def stop_after(monkeypatch, step, act):
    """`act` while step number `step` runs."""
    from jaxscale.step.train_step import TrainStep

    real, count = TrainStep.__call__, iter(range(1, 1000))

    def run(self, state, batch):
        if next(count) == step:
            act()
        return real(self, state, batch)

    monkeypatch.setattr(TrainStep, "__call__", run)


def same_checkpoint(a, b, step):
    """Equal in every bit, by their checksums, and in the state of the data: the next batch."""
    contents = []
    for folder in (a, b):
        file = folder / "checkpoints" / f"{step:08d}" / "_CHECKPOINT_METADATA"
        contents.append(json.loads(file.read_text())["custom_metadata"]["jaxscale"])
    assert contents[0]["arrays"] == contents[1]["arrays"]
    assert contents[0]["data"] == contents[1]["data"]
    assert contents[0]["tokens"] == contents[1]["tokens"]


def test_divergence_stops_the_run_and_names_the_last_good_checkpoint(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, range(6, 12))
    with pytest.raises(Diverged, match=r"4 steps in a row were skipped up to step 10 .*checkpoints/00000005"):
        train(toy(guard=Guard(patience=4)), out=tmp_path / "run", quiet=True)
    assert [row["step"] for row in events(tmp_path / "run", "skipped")] == [7, 8, 9, 10]
    assert events(tmp_path / "run", "diverged")[0]["checkpoint"] == 5
    assert steps_saved(tmp_path / "run")[-1] == 5


def test_checkpoints_saved_while_steps_are_skipped_are_not_good(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, range(6, 12))
    experiment = toy(guard=Guard(patience=4), checkpoint=Checkpointing(every=1, keep=1, best=False))
    with pytest.raises(Diverged, match=r"up to step 10 .*checkpoints/00000006\."):
        train(experiment, out=tmp_path / "run", quiet=True)
    assert steps_saved(tmp_path / "run") == [6, 9]


def test_fewer_bad_steps_in_a_row_than_the_patience_stop_nothing(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, [1, 2, 3, 6, 7, 8])
    with pytest.raises(MostlySkipped, match=r"^6 of 12 steps \(50%\) were skipped"):
        train(toy(guard=Guard(patience=4)), out=tmp_path / "run", quiet=True)
    assert steps_saved(tmp_path / "run")[-1] == 12
    assert [row["step"] for row in events(tmp_path / "run", "skipped")] == [2, 3, 4, 7, 8, 9]


def spoil(monkeypatch, steps):
    """Parameters that are not numbers after so many steps; a step on them is skipped, and keeps those it was given."""
    from jaxscale.step.train_step import TrainStep

    real = TrainStep.__call__

    def run(self, state, batch):
        if int(state.step) not in steps:
            return real(self, state, batch)
        good = jax.tree.map(jnp.copy, state.params)
        bad = jax.tree.map(lambda p: p * jnp.float32("nan"), state.params)
        after, metrics = real(self, dataclasses.replace(state, params=bad), batch)
        return dataclasses.replace(after, params=good), metrics

    monkeypatch.setattr(TrainStep, "__call__", run)


@pytest.mark.parametrize("when", ["init", "compile"])
def test_a_signal_before_the_first_step_of_a_new_run_loses_nothing(toy, tmp_path, whole, monkeypatch, when):
    compiled = signal_within(monkeypatch, when)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM before the first step: nothing is lost"):
        train(toy(), out=tmp_path / "run", quiet=True)
    assert not compiled, "what comes after the signal is not begun"
    monkeypatch.undo()
    assert events(tmp_path / "run", "preempted")[0]["step"] == 0
    assert steps_saved(tmp_path / "run") == []
    train(toy(), out=tmp_path / "run", quiet=True)
    assert exact(tmp_path / "run") == exact(whole)


@pytest.mark.parametrize("when", ["from_canonical", "compile"])
def test_a_signal_before_the_first_step_of_a_continued_run_loses_nothing(toy, whole, monkeypatch, when):
    before = exact(whole)
    drop_checkpoint(whole, 12)
    compiled = signal_within(monkeypatch, when)
    with pytest.raises(Preempted, match=r"stopped by SIGTERM before step 11\. The checkpoint of step 10 is intact"):
        train(toy(), out=whole, quiet=True)
    assert not compiled
    monkeypatch.undo()
    train(toy(), out=whole, quiet=True)
    assert exact(whole) == before
    assert [row["step"] for row in events(whole, "preempted")] == [10]


def signal_within(monkeypatch, name):
    """SIGTERM while a method of the train step runs; the compilations that were begun."""
    from jaxscale.step.train_step import TrainStep

    compiled, compile_, real = [], TrainStep.compile, getattr(TrainStep, name)

    def told(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return (counted if name == "compile" else real)(self, *arguments)

    def counted(self, *arguments):
        compiled.append(arguments)
        return compile_(self, *arguments)

    monkeypatch.setattr(TrainStep, "compile", counted)
    monkeypatch.setattr(TrainStep, name, told)
    return compiled


def test_a_profile_of_steps_that_never_come_is_refused(toy, tmp_path):
    with pytest.raises(UserError, match=r"profile 13:15: the run has 12 steps, expected FIRST from 1 to 12"):
        train(toy(), out=tmp_path / "run", profile="13:15", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_profile_of_steps_that_lie_behind_is_said(toy, whole, capsys):
    drop_checkpoint(whole, 12)
    train(toy(), out=whole, profile="8:11")
    assert (
        "profile 8:11: the run continues after step 10, so the steps of this range are not traced"
        in capsys.readouterr().out
    )
    assert not (whole / "profile").exists()


@pytest.mark.slow
def test_a_trace_ends_with_its_run(toy, tmp_path, monkeypatch):
    train(toy(), out=tmp_path / "whole", profile="11:20", quiet=True)
    assert events(tmp_path / "whole", "profile")[0]["steps"] == "11:13"
    assert "2 step(s) traced" in (tmp_path / "whole" / "profile" / "summary.txt").read_text()
    with monkeypatch.context() as patch:
        stop_after(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted):
            train(toy(), out=tmp_path / "stopped", profile="3:8", quiet=True)
    assert events(tmp_path / "stopped", "profile")[0]["steps"] == "3:5"
    with monkeypatch.context() as patch:
        stop_after(patch, 3, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(toy(), out=tmp_path / "failed", profile="2:8", quiet=True)
    train(toy(), out=tmp_path / "failed", profile="2:3", quiet=True)
    assert events(tmp_path / "failed", "profile")[0]["steps"] == "2:3"


def test_the_best_checkpoint_is_kept(toy, tmp_path):
    experiment = toy(
        steps=10,
        optimizer=Optimizer(learning_rate=0.05, schedule="constant"),
        evaluation=Evaluation(every=2, batches=1),
        checkpoint=Checkpointing(every=1, keep=1, minutes=None),
    )
    run = train(experiment, out=tmp_path / "run", quiet=True)
    losses = {row["step"]: row["loss"] for row in run.evaluations}
    best = min(losses, key=losses.__getitem__)
    assert Checkpoints(run.dir / "checkpoints", write=False).best() == best
    assert set(steps_saved(run.dir)) == {best, 10}


@pytest.mark.slow
def test_minutes_save_too(toy, tmp_path):
    experiment = toy(checkpoint=Checkpointing(every=0, minutes=0.0, keep=99))
    train(experiment, out=tmp_path / "run", quiet=True)
    assert steps_saved(tmp_path / "run") == list(range(1, 13))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": Decoder(vocab=200, context=16, layers=1, embed=8, heads=2)},
            "tokenizer has 256 tokens, but model.vocab is 200",
        ),
        (
            {"model": Decoder(vocab=256, context=8, layers=1, embed=8, heads=2)},
            "data.context is 16, but model.context is 8",
        ),
        ({"batch": 5}, "batch 5"),
        ({"plan": Plan(mesh=MeshSpec(data=64))}, "takes 64 devices, but there are 8"),
        ({"plan": Plan(mesh=MeshSpec(tensor=4))}, "heads: 2 cannot be split evenly over tensor:4"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(toy(**changes), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_settings_of_train_itself(toy, tmp_path):
    for wrong, message in (({"log_every": 0}, "log_every"), ({"steps": 0}, "steps")):
        with pytest.raises(UserError, match=message):
            train(toy(), out=tmp_path / "run", **wrong)


def test_a_file_in_the_place_of_the_directory(toy, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path / 'run'} is a file, expected a folder"):
        train(toy(), out=tmp_path / "run", quiet=True)


def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(toy, tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        while steps_saved(tmp_path / "run") != [5]:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    stop_after(monkeypatch, 8, fill)
    try:
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl"):
            train(toy(), out=tmp_path / "run", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert steps_saved(tmp_path / "run") == [5]
    assert read_metrics(tmp_path / "run", "train").column("step").tolist() == list(range(1, 8))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_run_goes_on(toy, whole, capsys):
    before = exact(whole)
    folder = whole / "checkpoints" / "00000012"
    file = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    train(toy(steps=13), out=whole)
    assert "checkpoint of step 12 is damaged and skipped" in capsys.readouterr().out
    assert "12" in events(whole, "resume")[0]["damaged"]
    assert exact(whole)[:10] == before[:10]
    assert Run.open(whole).step == 13


def test_runs_outside_the_main_thread(toy, tmp_path):
    """There no handler of signals can be set."""
    found = []
    thread = threading.Thread(target=lambda: found.append(train(toy(), steps=2, out=tmp_path / "run", quiet=True)))
    thread.start()
    thread.join()
    assert found[0].step == 2


@pytest.mark.slow
def test_steps_in_flight_change_nothing(toy, tmp_path, monkeypatch):
    """On accelerators a step is dispatched before the last one has been looked at. One device has no collectives."""
    from jaxscale.training.loop import _Training

    experiment = toy(plan=Plan(mesh=MeshSpec()), evaluation=Evaluation(every=4, batches=2))
    train(experiment, out=tmp_path / "waits", quiet=True)
    prepare = _Training._prepare

    def in_flight(self):
        prepare(self)
        self.is_cpu = False

    monkeypatch.setattr(_Training, "_prepare", in_flight)
    with monkeypatch.context() as patch:
        stop_after(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted, match="after step 8, and saved"):
            train(experiment, out=tmp_path / "run", quiet=True)
    assert len(exact(tmp_path / "run")) == 8
    train(experiment, out=tmp_path / "run", quiet=True)
    assert exact(tmp_path / "run") == exact(tmp_path / "waits")
    held_out = [read_metrics(tmp_path / name, "eval").column("loss").tolist() for name in ("run", "waits")]
    assert held_out[0] == held_out[1]
    same_checkpoint(tmp_path / "run", tmp_path / "waits", 12)


def test_an_asynchronous_pipeline_that_fills_is_no_reason_for_a_warning(toy, tmp_path):
    model = dataclasses.replace(toy().model, layers=2)
    run = train(toy(model=model, steps=3, plan=Plan(mesh="data:1", pipeline="pipedream:2")), out=tmp_path, quiet=True)
    norms = [row["grad_norm"] for row in read_metrics(run.dir, "train")]
    assert norms[0] == 0 < norms[-1]  # a warning would be an error
