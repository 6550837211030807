"""Callbacks of a run: what they are called with, how they stop it, and what happens if one fails."""

import dataclasses
import inspect
import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.recipe.experiment import Checkpointing, Evaluation

pytestmark = pytest.mark.usefixtures("shared_steps")


def rows_of(folder):
    """The rows of the log of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def frequent(toy):
    return toy(evaluation=Evaluation(every=3, batches=1), checkpoint=Checkpointing(every=6, minutes=None))


def test_a_run_reports_its_events_and_goes_on_without_a_callback_that_fails(toy, tmp_path, capsys):
    events = []

    def failing(event):
        raise ValueError(f"no place for {event.kind}")

    jx.train(frequent(toy), out=tmp_path / "run", callbacks=[failing, events.append])
    assert [event.step for event in events if event.kind == "step"] == list(range(1, 13))
    evaluations = [event for event in events if event.kind == "evaluation"]
    assert [event.step for event in evaluations] == [3, 6, 9, 12]
    logged = [row for row in rows_of(tmp_path / "run") if row["kind"] == "eval"]
    assert [event.values["loss"] for event in evaluations] == [row["loss"] for row in logged]
    assert {event.step for event in events if event.kind == "checkpoint"} >= {6, 12}
    assert {str(event.folder) for event in events} == {str(tmp_path / "run")}
    output = "".join(capsys.readouterr())
    assert output.count("the callback failing failed after step 1 and is not called again: ValueError: no place") == 1
    failures = [row for row in rows_of(tmp_path / "run") if row.get("name") == "callback_failed"]
    assert [(row["step"], row["callback"], row["error"]) for row in failures] == [
        (1, "failing", "ValueError: no place for step")
    ]


def test_a_callback_stops_the_run_which_can_be_continued(toy, whole, tmp_path):
    def fourth_step(event):
        return event.kind == "step" and event.step == 4

    experiment = toy()
    run = jx.train(experiment, out=tmp_path / "run", quiet=True, callbacks=[fourth_step])
    rows = rows_of(tmp_path / "run")
    assert [row["by"] for row in rows if row.get("name") == "stopped"] == ["fourth_step"]
    assert run.state is not None
    assert int(run.state.step) == max(row["step"] for row in rows) < 12
    continued = jx.train(experiment, out=tmp_path / "run", quiet=True)
    phases = [set(row["seconds_by_phase"]) for row in rows_of(tmp_path / "run") if row.get("name") == "hours"]
    assert ["restoring" in names for names in (phases[0], phases[-1])] == [False, True]
    assert ["initializing" in names for names in (phases[0], phases[-1])] == [True, False]
    assert all({"stepping", "logging", "data"} <= names for names in phases if "stepping" in names)
    losses = {row["step"]: row["loss"] for row in rows_of(tmp_path / "run") if row["kind"] == "train"}
    assert losses == {row["step"]: row["loss"] for row in rows_of(whole) if row["kind"] == "train"}
    assert continued.state is not None
    assert int(continued.state.step) == 12


def test_early_stopping_ends_a_run_that_no_longer_improves(toy, tmp_path):
    stop = jx.EarlyStopping(patience=1, least_change=100.0)
    run = jx.train(frequent(toy), out=tmp_path / "run", quiet=True, callbacks=[stop])
    assert run.state is not None
    assert 6 <= int(run.state.step) < 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 0}, "patience: got 0, expected 1 or more"),
        ({"mode": "low"}, "mode: got 'low', expected min or max"),
        ({"metric": "news/accuracy"}, "mode: got min for news/accuracy, which is better if it is higher"),
    ],
)
def test_early_stopping_checks_its_fields(fields, message):
    with pytest.raises(jx.UserError, match=message):
        jx.EarlyStopping(**fields)
    better = jx.EarlyStopping("accuracy", patience=1, mode="max")
    values = [better(jx.Event("evaluation", 1, {"accuracy": accuracy}, "")) for accuracy in (0.5, 0.6, 0.6)]
    assert values == [False, False, True]
    with pytest.raises(jx.UserError, match="got 'accuracy', but an evaluation reports loss"):
        dataclasses.replace(better)(jx.Event("evaluation", 1, {"loss": 1.0}, ""))


def test_what_cannot_be_called_is_refused_before_anything_is_written(toy, tmp_path):
    class Listener:
        def on_step(self, event):
            return None

    train = inspect.unwrap(jx.train)  # as without run-time type checks
    wrong = {
        "callbacks: got 'stop', expected functions of an Event": ["stop"],
        "callbacks: got the class EarlyStopping, expected an instance": [jx.EarlyStopping],
        r"test_callbacks.py:\d+: callbacks: got a Listener, .* instead of on_step, define __call__": [Listener()],
        "callbacks: got <function .*, expected a list of functions of an Event": lambda event: None,
    }
    for message, callbacks in wrong.items():
        with pytest.raises(jx.UserError, match=message):
            train(toy(), out=tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_early_stopping_of_what_is_not_reported_is_refused_before_the_first_step(toy, tmp_path):
    for name, message in {
        "los": "metric: got 'los', but an evaluation reports loss, targets; did you mean 'loss'",
        "news/loss": "metric: got 'news/loss', but an evaluation reports loss, targets",
    }.items():
        with pytest.raises(jx.UserError, match=message):
            jx.train(frequent(toy), out=tmp_path / "run", quiet=True, callbacks=[jx.EarlyStopping(name)])
    experiment = toy()
    nothing = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, held_out=0.0))
    with pytest.raises(jx.UserError, match="callbacks: got EarlyStopping, but nothing is held out"):
        jx.train(nothing, out=tmp_path / "run", quiet=True, callbacks=[jx.EarlyStopping()])
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="cannot stop a run of 12 steps with evaluation.every 0"):
        jx.EarlyStopping().check(["loss"], 0, 12)


def test_the_log_can_be_read_from_outside_while_a_step_is_slow(tmp_path):
    """The third step waits on the host until another process has read the log, which must hold the steps before it."""
    log = tmp_path / "run" / "metrics.jsonl"
    seen = []

    def wait(number):
        if number == 3 and not seen:
            text = subprocess.run(["cat", str(log)], capture_output=True, text=True, check=True).stdout
            seen.append([row["step"] for row in map(json.loads, text.splitlines()) if row["kind"] == "train"])
        return np.float32(0)

    def score(module, batch):
        number = jax.lax.stop_gradient(batch["number"][0])
        idle = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), number)
        return (module(batch["x"])[:, 0] - 1) ** 2 + idle

    batches = [{"x": np.ones((2, 1), np.float32), "number": np.full(2, step, np.int32)} for step in range(1, 6)]
    model = jx.models.ForeignModel(lambda rngs: nnx.Linear(1, 1, rngs=rngs), score)
    own = jx.Experiment("slow", model, batches, steps=5, batch=2, plan=jx.Plan(mesh="1"))
    jx.train(own, out=tmp_path / "run", quiet=True)
    assert seen == [[1, 2]]
