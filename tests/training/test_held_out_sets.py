"""Held-out sets of a run: figures against plain code, the best checkpoint, continuation, and all that shows them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.checkpoint.restore import restore_parameters
from jaxscale.cli.main import main
from jaxscale.errors import UserError
from jaxscale.records.record import RunRecord
from jaxscale.report.summary import summary
from jaxscale.training.evaluate import evaluate

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
NEWS, CODE = X[:21], X[21:30]


def arrays(x, factor=1.0):
    return {"x": x, "y": factor * x.sum(1)}


def experiment(**changes):
    fields = {
        "name": "own",
        "model": jx.models.ForeignModel(lambda rngs: nnx.Linear(3, 1, rngs=rngs), score),
        "data": jx.data.Arrays(arrays(X), held_out=0.25),
        "optimizer": jx.Optimizer("sgd", learning_rate=0.1, warmup=0, clip=None, weight_decay=0.0),
        "steps": 6,
        "batch": 8,
        "held_out": {"news": arrays(NEWS), "code": arrays(CODE, -1.0)},
        "evaluation": jx.Evaluation(every=2, best="code/loss"),
        "checkpoint": jx.Checkpointing(every=2, minutes=None, keep=1),
        "plan": jx.Plan(mesh="1"),
    }
    return jx.Experiment(**{**fields, **changes})


def score(module, batch):
    return (module(batch["x"])[:, 0] - batch["y"]) ** 2


def mae(module, batch):
    return jnp.abs(module(batch["x"])[:, 0] - batch["y"])


def expected(module, x, factor=1.0):
    difference = np.asarray(module(x))[:, 0] - factor * x.sum(1)
    return (difference**2).mean(), np.abs(difference).mean()


@pytest.mark.parametrize("mesh", ["1", "data:4"])
def test_the_figures_of_a_set_are_means_over_its_rows_and_show_everywhere(mesh, tmp_path, capsys):
    events = []
    stop = jx.EarlyStopping("eval/code/loss", patience=1)
    plan = jx.Plan(mesh=mesh, microbatches=2)
    settings = {"metrics": {"mae": mae}, "callbacks": [events.append, stop]}
    run = jx.train(experiment(), plan, out=tmp_path / "run", **settings)
    rows = run.evaluations
    assert [row["step"] for row in rows] == [2, 4], "the loss of code, whose targets are opposite, rises"
    for name, x in (("news", NEWS), ("code", CODE)):
        assert rows[-1][f"{name}/targets"] == len(x)
    assert rows[-1]["code/loss"] > rows[0]["code/loss"] > rows[0]["news/loss"]
    evaluations = [event.values for event in events if event.kind == "evaluation"]
    assert evaluations[-1]["news/mae"] == rows[-1]["news/mae"]
    assert f"news/loss {rows[0]['news/loss']:.4f}, news/mae" in capsys.readouterr().out
    # the best checkpoint is that of the loss of code, and outlives the stop, though one checkpoint is kept
    best = restore_parameters(run.dir, best=True, experiment=experiment())
    assert best.description.step == 2
    module = best.step.module(best.state)
    for name, x, factor in (("news", NEWS, 1.0), ("code", CODE, -1.0)):
        found = [rows[0][f"{name}/loss"], rows[0][f"{name}/mae"]]
        np.testing.assert_allclose(found, expected(module, x, factor), rtol=1e-5)
    text, page = summary(run.dir), (run.dir / "report.html").read_text()
    assert "held-out code/loss" in text.splitlines()[1]
    assert "held-out news/loss" in text
    assert "targets" not in text.replace("target tokens", "")
    assert all(part in page for part in ("Best held-out code/loss", "Held-out mae", '"label":"news"'))
    assert RunRecord.read(run.dir).best == (2, rows[0]["code/loss"])
    events_file = next((run.dir / "tensorboard").iterdir()).read_bytes()
    assert b"eval/news/loss" in events_file


def test_a_continued_run_is_exact_and_may_have_other_sets(tmp_path):
    by_name = dataclasses.replace(experiment(), evaluation=jx.Evaluation(every=2))
    whole = jx.train(by_name, out=tmp_path / "whole", quiet=True)
    jx.train(by_name, out=tmp_path / "cut", quiet=True, callbacks=[lambda e: e.kind == "step" and e.step == 2])
    continued = jx.train(by_name, out=tmp_path / "cut", quiet=True)
    rows, cut_rows = (
        [{k: v for k, v in row.items() if k != "time"} for row in run.evaluations] for run in (whole, continued)
    )
    assert rows == cut_rows
    # another measure of the best: what was lowest by the earlier one does not count
    wider = dataclasses.replace(
        by_name, steps=8, held_out={"code": arrays(CODE, -1.0)}, evaluation=jx.Evaluation(every=2, best="code/loss")
    )
    run = jx.train(wider, out=tmp_path / "cut", quiet=True)
    assert sorted(run.evaluations[-1]) == ["code/loss", "code/targets", "kind", "loss", "step", "targets", "time"]
    best = restore_parameters(run.dir, best=True, experiment=wider).description
    assert best.step == 8
    assert best.measure.startswith("code ")
    assert best.best == run.evaluations[-1]["code/loss"] > run.evaluations[-1]["loss"]


def test_the_first_set_stands_for_a_held_out_part_that_the_data_lacks(tmp_path):
    own = experiment(
        data=jx.data.Arrays(arrays(X), held_out=0.0), evaluation=jx.Evaluation(every=0), steps=2, plan=jx.Plan(mesh="1")
    )
    run = jx.train(own, out=tmp_path / "run", quiet=True)
    (row,) = run.evaluations
    assert row["loss"] == row["news/loss"] != row["code/loss"]
    assert run.held_out_loss == row["loss"]
    assert restore_parameters(run.dir, best=True, experiment=own).description.measure.startswith("news ")


def test_a_finished_run_is_evaluated_on_other_files(toy, whole, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other.txt"
    other.write_text("the mat sat on the hat. " * 9)
    found = evaluate(whole, data=other)
    assert found["targets"] == 9 * 24 - 1
    as_set = jx.train(toy(held_out={"other": other}, steps=13), out=whole, quiet=True)
    assert evaluate(whole, data=other)["loss"] == pytest.approx(as_set.evaluations[-1]["other/loss"], rel=2e-2)
    assert evaluate(whole)["other/targets"] == 9 * 24 - 1
    capsys.readouterr()
    assert main(["evaluate", str(whole), "--data", str(other)]) == 0
    assert "targets    215" in capsys.readouterr().out
    assert main(["evaluate", str(whole), "--data", str(tmp_path / "othr.txt")]) == 2
    assert "data: no such file: " in (error := capsys.readouterr().err)
    assert "did you mean 'other.txt'" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation": jx.Evaluation(best="nws/loss")},
            "evaluation.best: got 'nws/loss', expected loss or news/loss",
        ),
        ({"held_out": {"news": {"z": X}}}, r"held_out\.news: x is missing, expected float32\[8, 3\]; y is missing"),
        ({"data": jx.data.Arrays(arrays(X), held_out=1.0)}, r"data\.held_out: got 1, which leaves nothing to train on"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused_before_the_first_step(changes, message, tmp_path):
    fields = {"evaluation": jx.Evaluation(), **changes}
    with pytest.raises(UserError, match=message):
        jx.train(experiment(**fields), out=tmp_path / "run", quiet=True)


def test_a_metric_cannot_have_the_name_of_a_figure_of_a_set(tmp_path):
    with pytest.raises(UserError, match="metrics: got the name 'news/loss', expected one without '/'"):
        jx.train(experiment(), out=tmp_path / "run", metrics={"news/loss": mae})


@pytest.mark.variant  # by default: sets on one device and on four; a pipeline's evaluation in `tests/system`
def test_a_pipeline_evaluates_sets_too(toy, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("the mat sat on the hat. " * 9)
    model = dataclasses.replace(toy().model, layers=2)
    losses = []
    for plan in (jx.Plan(mesh="1"), jx.Plan(mesh="pipe:2", pipeline="1f1b:2x2")):
        own = toy(model=model, held_out={"other": other}, steps=2, plan=plan, evaluation=jx.Evaluation(every=0))
        losses.append(jx.train(own, out=tmp_path / str(len(losses)), quiet=True).evaluations[-1]["other/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
