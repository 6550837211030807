"""Losses that couple the rows of a batch: refused where a batch is cut, and evaluated on whole batches.

Every loss is refused by default; one, the contrastive, is trained.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import Experiment, Optimizer, build
from jaxscale.data import Arrays
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel
from jaxscale.training.evaluate import held_out_means
from tests.plans import plan_of
from tests.tiers import variants

ROWS = 8


class TwoTowers(nnx.Module):
    """A tower for each side; `norm` and `rate` add batch statistics and dropout."""

    def __init__(self, rngs, norm=False, rate=0.0, width=64):
        self.left, self.right = nnx.Linear(3, width, rngs=rngs), nnx.Linear(5, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x, y):
        left, right = self.left(x), self.right(y)
        left = left if self.norm is None else self.norm(left)
        return left if self.dropout is None else self.dropout(left), right


def contrastive(module, batch):
    left, right = module(batch["x"], batch["y"])
    return -jnp.diag(jax.nn.log_softmax(left @ right.T))


def ranking(module, batch):
    left, right = module(batch["x"], batch["y"])
    scores = (left * right).sum(1)
    return jax.nn.softplus(scores[None, :] - scores[:, None]).mean(1)


def standardized(module, batch):
    x = batch["x"]
    left, right = module((x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1e-5), batch["y"])
    return ((left - right) ** 2).mean(1)


def weighted_by_rank(module, batch):
    left, right = module(batch["x"], batch["y"])
    losses = ((left - right) ** 2).mean(1)
    return losses, (losses > jnp.median(losses, keepdims=True)).astype(jnp.float32)


def distance(module, batch):
    left, right = module(batch["x"], batch["y"])
    return ((left - right) ** 2).mean(1)


COUPLED = (contrastive, ranking, standardized, weighted_by_rank)


def arrays(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, 3)).astype("float32"), "y": rng.normal(size=(rows, 5)).astype("float32")}


def step_of(score, mesh="1", over=None, data=None, norm=False, rate=0.0, rule="adamw", **fields):
    model = ForeignModel(lambda rngs: TwoTowers(rngs, norm, rate), score, over=over)
    experiment = Experiment("pairs", model, data, optimizer=Optimizer(rule, learning_rate=1e-2), steps=4, batch=ROWS)
    return build(experiment, plan_of(mesh=mesh, **fields))


CUTS = {
    "microbatches": {"microbatches": 4},
    "a codec": {"mesh": "replica:2", "reduce": "int8"},
    "diloco": {"mesh": "replica:2", "diloco": "every=2"},
}


@pytest.mark.parametrize(
    ("score", "cut"), [*((score, "microbatches") for score in COUPLED), (contrastive, "a codec"), (ranking, "diloco")]
)
def test_a_coupled_loss_is_refused_before_the_first_step_where_a_batch_is_cut(score, cut):
    step = step_of(score, **CUTS[cut])
    state, batch = step.init(), step.place(arrays())
    with pytest.raises(UserError, match=r"the loss of this model couples the rows of a batch \(its second difference"):
        step(state, batch)
    if cut != "a codec":
        with pytest.raises(UserError, match=r"a loss over the whole batch .*the loss of parts of a batch is another"):
            step_of(score, over="batch", **CUTS[cut])


def figures(score, **fields):
    """Losses, gradient norms and the weights after two steps."""
    step = step_of(score, rule="sgd", **fields)
    state, rows = step.init(), []
    for seed in range(2):
        state, metrics = step(state, step.place(arrays(seed=seed) | {"weights": np.arange(1.0, ROWS + 1, dtype="f4")}))
        rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(rows), jax.device_get(nnx.to_pure_dict(nnx.state(step.module(state), nnx.Param)))


class Tempered(TwoTowers):
    """A parameter that the score reads beside the module's call."""

    def __init__(self, rngs, norm=False, rate=0.0):
        super().__init__(rngs, norm, rate)
        self.temperature = nnx.Param(jnp.ones((1, 1)))


def tempered(module, batch):
    left, right = module(batch["x"], batch["y"])
    return -jnp.diag(jax.nn.log_softmax(left @ right.T / module.temperature[...]))


def noisy(module, batch, key):
    """The noise that the module gets is also in the score, and couples the rows."""
    noise = jax.random.normal(key, batch["x"].shape)
    left, right = module(batch["x"] + noise, batch["y"])
    return -jnp.diag(jax.nn.log_softmax(left @ right.T + noise @ noise.T))


@pytest.mark.parametrize("score", variants([*COUPLED, tempered, noisy], 1))
def test_the_replicas_of_a_codec_have_the_loss_of_the_whole_batch(score, monkeypatch):
    monkeypatch.setitem(globals(), "TwoTowers", Tempered if score is tempered else TwoTowers)
    plain, plain_weights = figures(score)
    exact, exact_weights = figures(score, over="batch", mesh="replica:4", reduce="int8,start=100")
    np.testing.assert_allclose(exact, plain, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), exact_weights, plain_weights)
    rounded, _ = figures(score, over="batch", mesh="replica:2", reduce="int8")
    np.testing.assert_allclose(rounded[0, 0], plain[0, 0], rtol=1e-5)
    np.testing.assert_allclose(rounded, plain, rtol=2e-3)


@pytest.mark.slow
def test_random_plans_with_exact_codecs_have_the_loss_of_the_whole_batch():
    def trained(score, **fields):
        model = ForeignModel(lambda rngs: TwoTowers(rngs, width=1024), score, over="batch")
        rule = Optimizer("sgd", learning_rate=1e-3, momentum=0.9)
        step = build(Experiment("pairs", model, None, optimizer=rule, steps=4, batch=ROWS), plan_of(**fields))
        state, rows = step.init(), []
        for seed in range(2):
            state, metrics = step(state, step.place(arrays(seed=seed)))
            rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return rows

    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    for draw in range(12):
        score = rng.choice([*COUPLED, noisy])
        codec = rng.choice(["int8", "int4", "qsgd:8", "topk:0.1", "dgc:0.05", "powersgd:2", "gradzip:2"])
        fields = {
            "mesh": rng.choice(["replica:2", "replica:4", "replica:2,data:2", "replica:2,fsdp:2"]),
            "reduce": f"{codec},start=100",
            "memory": rng.choice(["none", "full", "dots"]),
        }
        if "fsdp" in fields["mesh"]:
            fields["zero"] = rng.choice([1, 2, 3])
        if rng.random() < 0.4:
            fields["optimizer_state"] = rng.choice(["host", "streamed"])
        figures = trained(score, **fields)
        np.testing.assert_allclose(
            figures, trained(score, mesh="1"), rtol=3e-5, err_msg=str((seed, draw, score.__name__, fields))
        )


def test_a_module_that_couples_rows_itself_is_refused_under_a_codec():
    class Similarity(TwoTowers):
        def __call__(self, x, y):
            left, right = super().__call__(x, y)
            return jax.nn.log_softmax(left @ right.T)

    model = ForeignModel(lambda rngs: Similarity(rngs), lambda module, b: -module(b["x"], b["y"])[:, 0], over="batch")
    experiment = Experiment("pairs", model, None, optimizer=Optimizer(learning_rate=1e-2), steps=4, batch=ROWS)
    step = build(experiment, plan_of(mesh="replica:2", reduce="int8"))
    with pytest.raises(UserError, match=r"reduce int8.*the module itself couples the rows of a batch"):
        step(step.init(), step.place(arrays()))


@pytest.mark.parametrize(
    "fields", variants([{"mesh": "fsdp:4", "zero": 3, "memory": "full"}, {}, {"mesh": "data:4"}], 1)
)
def test_a_whole_batch_has_the_contrastive_loss_of_plain_code(fields):
    step = step_of(contrastive, **fields)
    state, batch = step.init(), arrays()
    module = step.module(state)
    plain = float(contrastive(module, batch).mean())
    _, metrics = step(state, step.place(batch))
    np.testing.assert_allclose(metrics["loss"], plain, rtol=1e-5)


@pytest.mark.parametrize(
    ("cut", "options"),
    variants(
        [
            *((cut, {}) for cut in CUTS),
            ("microbatches", {"norm": True}),
            ("microbatches", {"rate": 0.5}),
            ("microbatches", {"over": "rows", "score": contrastive}),
        ],
        len(CUTS),
    ),
)
def test_sums_over_rows_and_batch_statistics_are_trained(cut, options):
    step = step_of(**{"score": distance, **options}, **CUTS[cut])
    _, metrics = step(step.init(), step.place(arrays()))
    assert np.isfinite(float(metrics["loss"]))


@dataclasses.dataclass(frozen=True)
class OwnDecoder(Decoder):
    """A model of the user's own, so that its loss is measured."""


def test_low_bit_products_whose_scales_rows_share_do_not_couple_them():
    model = OwnDecoder(vocab=64, context=16, layers=1, embed=32, heads=2, mlp=64, init_std=0.5)
    experiment = Experiment("fp8", model, None, Optimizer(), steps=2, batch=8)
    step = build(experiment, plan_of(mesh="1", microbatches=2, matmul="fp8"))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17)).astype("int32")
    _, metrics = step(step.init(), step.place({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}))
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(("mesh", "expected_targets"), [("1", 11), ("data:2", 8)])
def test_a_held_out_batch_that_is_filled_up_is_scored_by_its_rows_alone(mesh, expected_targets):
    data = Arrays(arrays(44), held_out=0.25)
    step = step_of(contrastive, mesh=mesh, data=data)
    state, opened = step.init(), data.open(ROWS, 0)
    means = held_out_means(step, opened, state, one_at_a_time=True)
    module, losses = step.module(state), []
    for batch in opened.evaluation():
        rows = batch["weights"] > 0
        if rows.sum() == ROWS or mesh == "1":
            losses += contrastive(module, {name: batch[name][rows] for name in ("x", "y")}).tolist()
    assert means["targets"] == expected_targets == len(losses)
    np.testing.assert_allclose(means["loss"], np.mean(losses), rtol=1e-5)


def test_over_is_checked():
    with pytest.raises(UserError, match="over: got 'row', expected rows, batch or None"):
        ForeignModel(lambda rngs: TwoTowers(rngs), contrastive, over="row")
