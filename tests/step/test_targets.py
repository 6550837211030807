"""Targets that are no class: -100 is ignored, on every mesh and by every model; others are refused before a step."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from tests.tiers import variants

DECODER = jx.models.Decoder(vocab=16, context=8, layers=1, embed=16, heads=2)
RNG = np.random.default_rng(0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, images):
        return self.head(images)


CLASSIFIER = jx.models.ForeignModel(lambda rngs: Net(rngs), jx.models.classification())
TOKENS = RNG.integers(0, 16, (4, 9), dtype=np.int32)
TEXT = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
IMAGES = {"images": RNG.normal(size=(4, 6)).astype(np.float32), "labels": RNG.integers(0, 5, 4, dtype=np.int32)}


def built(model, **plan):
    experiment = jx.Experiment("targets", model, data=None, steps=1, batch=4)
    plan = jx.Plan(**({"mesh": "1"} | plan))
    return jx.build(experiment, plan, devices=jax.devices()[: plan.mesh.devices])


def with_holes(batch, name, hole):
    """A batch whose last row has no targets, and the first row one less if it has several."""
    targets = batch[name].copy()
    targets[-1] = hole
    targets[0, ...] = np.where(np.arange(targets[0].size) == 2, hole, targets[0]) if targets.ndim > 1 else targets[0]
    return {**batch, name: targets}


@pytest.mark.parametrize(
    "plan",
    variants(
        [
            {},
            {"mesh": "data:2", "microbatches": 2},
            {"mesh": "tensor:2"},
            {"kernels": "loss_chunk=4"},
            {"mesh": "pipe:2", "pipeline": "gpipe:2x2"},
        ],
        2,
    ),
    ids=str,
)
def test_an_ignored_target_is_one_of_weight_0(plan):
    model = jx.models.Decoder(vocab=16, context=8, layers=2, embed=16, heads=2)
    step = built(model, **plan)
    state = step.init()
    ignored = with_holes(TEXT, "targets", -100)
    masked = TEXT | {"weights": (ignored["targets"] != -100).astype(np.float32)}
    losses = [step.evaluate(state, step.place(batch)) for batch in (ignored, masked)]
    assert float(losses[0].weight) == float(losses[1].weight) == 23
    np.testing.assert_allclose(losses[0].total, losses[1].total, rtol=1e-6)
    _, metrics = step(state, step.place(ignored))
    np.testing.assert_allclose(metrics["loss"], losses[1].total / 23, rtol=1e-5)


@pytest.mark.parametrize("model", [CLASSIFIER, jx.models.ResNet(classes=5, stages=(1,), width=4, stem="small")])
def test_an_ignored_label_is_a_row_of_weight_0(model):
    batch = IMAGES if model is CLASSIFIER else {**IMAGES, "images": RNG.normal(size=(4, 8, 8, 3)).astype(np.float32)}
    step = built(model)
    state = step.init()
    ignored = with_holes(batch, "labels", -100)
    masked = batch | {"weights": np.array([1, 1, 1, 0], np.float32)}
    for function in (step.evaluate, step.accuracy):
        (total, weight), (masked_total, masked_weight) = (
            function(state, step.place(rows))[:2] for rows in (ignored, masked)
        )
        assert float(weight) == float(masked_weight) == 3
        np.testing.assert_allclose(total, masked_total, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "batch", "name", "number", "count"),
    [
        (DECODER, TEXT, "targets", 16, 16),
        (DECODER, TEXT, "targets", -1, 16),
        (DECODER, TEXT, "tokens", -100, 16),
        (CLASSIFIER, IMAGES, "labels", 5, 5),
        (CLASSIFIER, IMAGES, "labels", -1, 5),
    ],
)
def test_a_number_that_is_no_class_is_refused(model, batch, name, number, count):
    step = built(model)
    wrong = with_holes(batch, name, number)
    with pytest.raises(jx.UserError, match=f"{name}: got {number}, expected numbers from 0 to {count - 1}"):
        step.place(wrong)
    step.place(batch)
    if name != "tokens":
        weights = (wrong[name] != number).astype(np.float32)
        step.place(wrong | {"weights": weights})  # a target of weight 0 may hold any number


def test_weights_of_negative_sum_are_refused():
    with pytest.raises(jx.UserError, match="weights: got a batch whose weights add up to -4"):
        built(CLASSIFIER).place(IMAGES | {"weights": np.full(4, -1.0, np.float32)})


def test_a_score_of_your_own_may_weigh_its_targets():
    def score(module, batch):
        is_known = batch["labels"] < 3
        logits = module(batch["images"])
        return -jax.nn.log_softmax(logits)[..., 0], is_known

    step = built(jx.models.ForeignModel(lambda rngs: Net(rngs), score))
    plain = built(jx.models.ForeignModel(lambda rngs: Net(rngs), lambda module, batch: score(module, batch)[0]))
    batch = IMAGES | {"labels": np.array([0, 4, 2, 3], np.int32)}
    weighted = step.evaluate(step.init(), step.place(batch))
    masked = plain.evaluate(plain.init(), plain.place(batch | {"weights": np.array([1, 0, 1, 0], np.float32)}))
    assert float(weighted.weight) == float(masked.weight) == 2
    np.testing.assert_allclose(weighted.total, masked.total, rtol=1e-6)


def test_weights_of_another_shape_than_the_losses_are_refused():
    def score(module, batch):
        return module(batch["images"])[:, 0], 1.0

    step = built(jx.models.ForeignModel(lambda rngs: Net(rngs), score))
    with pytest.raises(jx.UserError, match="score returned weights float for losses of shape"):
        step.place(IMAGES)


def test_targets_that_are_no_classes_are_not_read():
    batch = TEXT | {"targets": np.full((4, 8), 99.5, np.float32)}
    assert float(built(DECODER).place(batch)["targets"][0, 0]) == 99.5
