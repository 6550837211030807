"""The average of weights: the recurrence of plain code, under every layout, in evaluation, checkpoints and export.

By default: under ZeRO 3, and of split weights.
"""

import functools

import jax
import numpy as np
import pytest

import jaxscale as jx
from jaxscale import Experiment, Optimizer, build
from jaxscale.blocks import Context
from jaxscale.checkpoint.export import export
from jaxscale.errors import UserError
from jaxscale.models import Decoder
from jaxscale.models.huggingface import load
from jaxscale.training.evaluate import evaluate
from jaxscale.trees import named_leaves
from tests.plans import plan_of
from tests.tiers import variants

MODEL = Decoder(vocab=16, context=8, layers=2, embed=16, heads=2, tied=False)
STEPS, DECAY = 5, 0.2


def batches():
    tokens = np.random.default_rng(0).integers(0, 16, (STEPS, 8, 9)).astype(np.int32)
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]


def step_of(mesh="1", ema=DECAY, train=None, **fields):
    optimizer = Optimizer(learning_rate=1e-2, ema=ema, train=train)
    return build(Experiment("ema", MODEL, None, optimizer, steps=STEPS, batch=8), plan_of(mesh=mesh, **fields))


@functools.cache
def step_on_one_device():
    return step_of()


def names_of(tree):
    return {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(tree).items()}


@pytest.fixture(scope="module")
def expected():
    """Average and last weights by plain code, from the weights of a run without an average."""
    step = step_of(ema=None)
    state = step.init()
    average = names_of(state.params)
    for number, batch in enumerate(batches(), 1):
        state, _ = step(state, step.place(batch))
        decay = min(DECAY, (1 + number) / (10 + number))
        average = {name: decay * average[name] + (1 - decay) * leaf for name, leaf in names_of(state.params).items()}
    return average, names_of(state.params)


PLANS = {
    "one device": {},
    "ZeRO 3": {"mesh": "fsdp:4", "zero": 3},
    "ZeRO 1, microbatches": {"mesh": "fsdp:2", "zero": 1, "microbatches": 2},
    "a pipeline": {"pipeline": "1f1b:2x4"},
    "split weights": {"precision": "bfloat16", "master": "split"},
}


@pytest.mark.parametrize("name", variants(PLANS, default=["ZeRO 3", "split weights"]))
def test_the_average_is_that_of_plain_code_and_is_evaluated(name, expected):
    average, weights = expected
    step = step_of(**PLANS[name])
    state = step.init()
    own = names_of(state.params)
    for number, batch in enumerate(batches(), 1):
        state, _ = step(state, step.place(batch))
        decay = min(DECAY, (1 + number) / (10 + number))
        own = {path: decay * own[path] + (1 - decay) * leaf for path, leaf in names_of(state.params).items()}
    for path, leaf in names_of(state.extra["ema"]).items():
        np.testing.assert_allclose(leaf, own[path], rtol=1e-5, atol=1e-6)
    arrays = step.to_canonical(state)
    whole = step_on_one_device()
    moved = {key: jax.device_put(arrays[key], leaf.sharding) for key, leaf in whole.canonical_abstract().items()}
    found = whole.from_canonical(moved)
    if "split" not in name:
        for path, leaf in names_of(found.extra["ema"]).items():
            np.testing.assert_allclose(leaf, average[path], rtol=2e-4, atol=2e-5)
        for path, leaf in names_of(found.params).items():
            np.testing.assert_allclose(leaf, weights[path], rtol=2e-4, atol=2e-5)
    batch = jax.tree.map(jax.numpy.asarray, batches()[0])
    loss = step.evaluate(state, step.place(batches()[0]))

    @jax.jit
    def total(average, rest):
        return MODEL.loss(whole.pure_model.module(average, rest), batch, Context()).total

    expected_total = total(found.extra["ema"], found.rest)
    np.testing.assert_allclose(loss.total, expected_total, rtol=0.02 if "split" in name else 1e-4)
    assert "average of weights with decay 0.2" in "\n".join(step.describe())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the quick brown fox\n" * 60)
    return folder


def trained(folder, name, stop=None):
    experiment = jx.Experiment(
        name="ema",
        model=Decoder(vocab=32, context=8, layers=1, embed=16, heads=2),
        data=jx.data.Text(folder / "text.txt", tokenizer="char", context=8),
        optimizer=Optimizer(learning_rate=1e-2, ema=0.9),
        steps=6,
        batch=8,
    )
    callbacks = [lambda event: event.kind == "step" and event.step == stop]
    return jx.train(experiment, jx.Plan(mesh="1"), out=folder / name, quiet=True, callbacks=callbacks)


@pytest.fixture(scope="module")
def whole(folder):
    return trained(folder, "whole")


@pytest.mark.variant  # by default: the average is a part of the canonical state, which every run continues from
def test_a_run_is_continued_with_its_average(folder, whole):
    trained(folder, "cut", stop=3)
    continued = trained(folder, "cut")
    assert continued.step == 6
    assert continued.held_out_loss == whole.held_out_loss


def test_a_run_is_evaluated_and_exported_by_its_average(tmp_path, whole):
    assert evaluate(whole.dir)["loss"] == pytest.approx(whole.held_out_loss, rel=1e-6)
    _, params = load(export(whole.dir, tmp_path / "folder"))
    average = names_of(whole.state.extra["ema"])
    np.testing.assert_allclose(params["embedding"]["weight"][...], average["embedding/weight"][:32], rtol=1e-6)
    assert (average["embedding/weight"] != names_of(whole.state.params)["embedding/weight"]).any()


@pytest.mark.parametrize(
    ("ema", "fields", "message"),
    [
        (1.0, {}, "optimizer.ema: got 1.0, expected a number from 0 up to, not including, 1"),
        (0.9, {"pipeline": "2bw:2x4"}, r"optimizer\.ema 0\.9 with pipeline 2bw:2x4: a stage updates in the middle"),
        (0.9, {"mesh": "replica:2", "diloco": "every=2"}, "each replica has weights of its own"),
        (0.9, {"weights": "host"}, "the average lies on the device"),
        (0.9, {"optimizer_state": "streamed"}, "the average lies on the device"),
    ],
)
def test_what_has_no_average_is_refused(ema, fields, message):
    with pytest.raises(UserError, match=message):
        step_of(ema=ema, **fields)


def test_adapters_have_an_average_of_their_own():
    step = step_of(train="attention")
    state, _ = step(step.init(), step.place(batches()[0]))
    assert named_leaves(state.extra["ema"]).keys() == named_leaves(state.params).keys()
