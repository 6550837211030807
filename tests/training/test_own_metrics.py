"""Metrics of a user's own: means over held-out rows by plain code, in the log, callbacks, summary and report."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.errors import UserError
from jaxscale.report.summary import summary
from jaxscale.training.evaluate import evaluate

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(x))[:, 0]


def score(module, batch):
    return (module(batch["x"]) - batch["y"]) ** 2


def error(module, batch):
    return jnp.abs(module(batch["x"]) - batch["y"])


def bias_where_positive(module, batch):
    difference = module(batch["x"]) - batch["y"]
    return difference, (batch["y"] > 0).astype(jnp.float32)


def experiment(**fields):
    data = jx.data.Arrays({"x": X, "y": X.sum(1)}, held_out=0.35)
    model = jx.models.ForeignModel(Net, score)
    return jx.Experiment(name="own", model=model, data=data, steps=4, batch=8, **fields)


@pytest.mark.parametrize("plan", [jx.Plan(mesh="1"), jx.Plan(mesh="data:2", microbatches=2)], ids=["one", "two"])
def test_a_metric_is_the_weighted_mean_over_the_held_out_rows(plan, tmp_path):
    events = []
    run = jx.train(
        experiment(evaluation=jx.Evaluation(every=2)),
        plan,
        out=tmp_path / "run",
        quiet=True,
        metrics={"mae": error, "bias": bias_where_positive},
        callbacks=[events.append, jx.EarlyStopping("mae", patience=9)],
    )
    module = run.module
    module.eval()
    rows = [row for batch in experiment().data.open(8, 0).evaluation() for row in zip(*batch.values(), strict=True)]
    x, y, weights = (np.array(column) for column in zip(*rows, strict=True))
    x, y = x[weights > 0], y[weights > 0]
    assert len(x) == 21
    difference = np.asarray(module(x)) - y
    row = run.evaluations[-1]
    np.testing.assert_allclose(row["mae"], np.abs(difference).mean(), rtol=1e-5)
    np.testing.assert_allclose(row["bias"], difference[y > 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(row["loss"], (difference**2).mean(), rtol=1e-5)
    evaluations = [event for event in events if event.kind == "evaluation"]
    assert [event.step for event in evaluations] == [2, 4]
    assert evaluations[-1].values["mae"] == row["mae"]
    text = summary(run.dir)
    assert "held-out mae" in text
    assert "nats" not in text
    page = (run.dir / "report.html").read_text()
    assert "Held-out mae" in page
    assert "nats" not in page


def test_a_finished_run_is_evaluated_with_metrics_from_an_experiment_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("images.npz", x=np.random.default_rng(0).random((40, 2, 2)), y=np.arange(40) % 3)
    own = jx.Experiment(
        "vit",
        jx.models.ResNet(classes=3, stages=(1,), width=8, channels=1),
        jx.data.Images("images.npz"),
        steps=2,
        batch=8,
    )
    run = jx.train(own, jx.Plan(mesh="1"), out="run", quiet=True)

    def confidence(module, batch):
        return nnx.softmax(module(batch["images"])).max(-1)

    found = evaluate(run.dir, metrics={"confidence": confidence})
    assert 1 / 3 <= found["confidence"] <= 1
    assert "held-out accuracy" in summary(run.dir)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": error}, "metrics: got the name 'loss', expected one that is not among step, kind"),
        ({"mae": 3}, "metrics: mae is a int, expected a function of module and batch"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, message, tmp_path):
    with pytest.raises(UserError, match=message):
        jx.train(experiment(), out=tmp_path / "run", metrics=metrics)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            lambda module, batch: error(module, batch).mean(),
            r"returned float32\[\] for a batch of 8 rows; .* of shape \(8",
        ),
        (lambda module, batch: None, "returned NoneType for a batch of 8 rows; .*: return them"),
        (lambda module, batch: {"a": error(module, batch)}, "several metrics are several entries of metrics"),
        (
            lambda module, batch: (error(module, batch).sum(), 8),
            r"returned float32\[\] for .* a pair \(numbers, weights\)",
        ),
        (lambda module, batch: (error(module, batch), batch["x"]), r"numbers \(8,\) and weights \(8, 3\)"),
    ],
    ids=["mean", "none", "dict", "sum and count", "weights"],
)
def test_a_metric_is_traced_before_the_first_step(metric, message, tmp_path):
    line = metric.__code__.co_firstlineno
    with pytest.raises(UserError, match=rf"test_own_metrics.py:{line}: metrics: mae .*{message}"):
        jx.train(experiment(), jx.Plan(mesh="1"), out=tmp_path / "run", quiet=True, metrics={"mae": metric})
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_metric_has_its_name_and_line_and_one_that_is_never_computed_is_refused(tmp_path):
    def misnamed(module, batch):
        return batch["z"]

    with pytest.raises(KeyError) as caught:
        jx.train(experiment(), jx.Plan(mesh="1"), out=tmp_path / "run", quiet=True, metrics={"mae": misnamed})
    assert caught.value.__notes__[-2] == "in the metric 'mae', which is traced before the first step"
    assert caught.value.__notes__[-1].startswith("in your code: ")
    nothing = dataclasses.replace(experiment(), data={"x": X, "y": X.sum(1)})
    nothing = dataclasses.replace(nothing, data=dataclasses.replace(nothing.data, held_out=0.0))
    with pytest.raises(UserError, match="metrics: got mae, but nothing is held out, so that no evaluation takes place"):
        jx.train(nothing, jx.Plan(mesh="1"), out=tmp_path / "run", quiet=True, metrics={"mae": error})
