"""Models with none of our layers train under every ZeRO stage as they do on one device, nothing in them changed.

By default under ZeRO 3 with dropout and without, and under ZeRO 2 in bfloat16.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxscale.data.rows import Arrays
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.foreign import ForeignModel, classification, linen_model
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.sharding.partition import axes_of
from jaxscale.step.build import build
from jaxscale.trees import named_leaves
from tests.plans import plan_of

ROWS, STEPS, CLASSES = 16, 4, 5  # no mesh of 4 or 8 divides the classes: the bias of the head stays whole


class Block(nnx.Module):
    def __init__(self, width, rate, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0, width=8):
        self.stem = nnx.Linear(4, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rate, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinenNet(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            x = linen.Dense(8)(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = linen.Dropout(self.rate, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(CLASSES)(x)


def nnx_net(rate=0.0):
    return ForeignModel(functools.partial(Net, rate=rate), classification())


def linen_net(rate=0.0):
    return linen_model(LinenNet(rate), jax.ShapeDtypeStruct((1, 4), "float32"), score=classification())


def sgd_then_adam(rate):
    # a bias in front of a batch norm has no gradient but rounding, which Adam with a small eps would blow up
    adam = optax.adam(1e-2, eps=1e-3)

    def update(grads, state, params):
        count, inner = state
        updates, inner = adam.update(grads, inner, params)
        return jax.tree.map(lambda u, g: jnp.where(count == 0, -0.1 * g, u), updates, grads), (count + 1, inner)

    return optax.GradientTransformation(lambda params: (jnp.zeros((), jnp.int32), adam.init(params)), update)


def an_experiment(model):
    optimizer = Optimizer(custom=sgd_then_adam, clip=None)
    return Experiment(name="foreign", model=model, data=None, optimizer=optimizer, steps=STEPS, batch=ROWS)


def batches():
    rng = np.random.default_rng(0)
    return [
        {
            "images": rng.normal(size=(ROWS, 4)).astype(np.float32),
            "labels": rng.integers(0, CLASSES, ROWS).astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def layout(mesh, **fields):
    return plan_of(mesh=mesh, **fields)


def is_statistic(name):
    return name.startswith("rest/") and name.split("/")[-1] in ("mean", "var")


def trajectory(model, plan):
    """(losses and gradient norms, canonical statistics at the end, the step, its last state)."""
    step = build(an_experiment(model), plan)
    step.compile(batches()[0])
    state, numbers = step.init(), []
    for batch in batches():
        state, metrics = step(state, step.place(batch))
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    statistics = {k: np.asarray(v) for k, v in step.to_canonical(state).items() if is_statistic(k)}
    return np.array(numbers), statistics, step, state


@functools.cache
def plain(make, rate=0.0, microbatches=1):
    return trajectory(make(rate), layout("1", microbatches=microbatches))


def assert_equal(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    chex.assert_trees_all_close(dict(found[1]), dict(expected[1]), rtol=tolerance, atol=tolerance)


def assert_sharded(step, state):
    """Every parameter with a dim that divides is split where the stage says, as the arrays themselves show."""
    zero, count = step.plan.zero, step.mesh.shape["fsdp"]
    adam = state.optimizer[1][0]
    for name, param in named_leaves(state.params).items():
        divides = any(size % count == 0 for size in param.shape)
        for kind, leaf, stage in (
            ("parameter", param, 3),
            ("first moment", named_leaves(adam.mu)[name], 1),
            ("second moment", named_leaves(adam.nu)[name], 1),
        ):
            split = "fsdp" in axes_of(leaf.sharding.spec)
            assert split == (divides and zero >= stage), f"{kind} of {name}"
            part = leaf.addressable_shards[0].data.size
            assert part == leaf.size // (count if split else 1), f"{kind} of {name}"


LAYOUTS = {
    "zero 0": (nnx_net, layout("data:4", zero=0)),
    "zero 1": (nnx_net, layout("fsdp:4", zero=1)),
    "zero 2": (linen_net, layout("fsdp:4", zero=2)),
    "zero 3, remat full": (nnx_net, layout("data:2,fsdp:4", zero=3, memory=MemoryPlan("full"))),
}


TIERS = {"zero 0": pytest.mark.slow, "zero 1": pytest.mark.slow, "zero 2": pytest.mark.variant}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, ())) for name in LAYOUTS])
def test_every_stage_trains_as_one_device_does(name):
    make, plan = LAYOUTS[name]
    expected = plain(make)
    found = trajectory(make(), plan)
    assert_equal(found, expected)
    assert_sharded(*found[2:])
    first = plain(make)[2].init()
    before = {k: np.asarray(v) for k, v in expected[2].to_canonical(first).items() if is_statistic(k)}
    assert len(before) == 4
    assert all(np.abs(found[1][k] - before[k]).max() > 1e-3 for k in before), "a batch statistic was not updated"
    if plan.zero:
        assert any("kept whole" in line and "bias" in line for line in found[2].describe())
        whole = found[2].layout.unsplit_names()
        assert [n for n, p in named_leaves(found[3].params).items() if p.shape == (CLASSES,)] == whole


@pytest.mark.variant  # that microbatches go by their own statistics, `test_coupling.py` trains by default
def test_microbatches_have_statistics_of_their_own():
    """As documented: two microbatches train as one device with two, and not as one device with one."""
    expected = plain(nnx_net, microbatches=2)
    assert_equal(trajectory(nnx_net(), layout("fsdp:4", zero=2, microbatches=2)), expected)
    assert np.abs(expected[0] / plain(nnx_net)[0] - 1).max() > 1e-3


@pytest.mark.variant
def test_dropout_is_reproducible_and_does_not_depend_on_the_mesh():
    expected = plain(nnx_net, 0.3)
    step = expected[2]
    state, losses = step.init(), []
    for batch in batches():
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    assert losses == expected[0][:, 0].tolist()
    assert_equal(trajectory(nnx_net(0.3), layout("fsdp:4", zero=3)), expected)
    assert np.abs(expected[0] / plain(nnx_net)[0] - 1).max() > 1e-2


def test_bfloat16_stays_near_float32():
    numbers, statistics, _, state = trajectory(linen_net(), layout("fsdp:4", zero=2, precision="bfloat16"))
    expected = plain(linen_net)
    np.testing.assert_allclose(numbers, expected[0], rtol=5e-2)
    assert np.abs(numbers / expected[0] - 1).max() > 1e-6, "bfloat16 had no effect"
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.optimizer[1][0].mu))} == {jnp.dtype("float32")}
    assert all("fsdp" in axes_of(p.sharding.spec) for p in jax.tree.leaves(state.params) if p.shape != (CLASSES,))
    for name, value in expected[1].items():
        np.testing.assert_allclose(statistics[name], value, rtol=0.05, atol=0.05, err_msg=name)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.linear(x)))


class DroppingNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Dropping(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.variant  # `test_memory_plans.py` keeps such values beside dropout by default
def test_a_set_of_kept_values_suits_blocks_with_dropout():
    """On a mesh, constants of the random numbers are placed, which the program that the decision is made for lacks."""
    model = ForeignModel(DroppingNet, lambda module, batch: (module(batch["x"]) ** 2).mean(-1))
    batch, losses = {"x": np.ones((ROWS, 8), np.float32)}, []
    data = Arrays({"x": np.ones((2 * ROWS, 8), np.float32)}, held_out=0.0)
    for memory in ("none", "save:1KiB"):
        step = build(Experiment("drop", model, data, batch=ROWS), layout("data:2", memory=MemoryPlan.parse(memory)))
        state = step.init()
        for _ in range(2):
            state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("make", [nnx_net, linen_net])
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            layout("data:2", precision="bfloat16", reduce="float32"),
            "reduce float32 with precision bfloat16: only jaxscale.layers support this",
        ),
        (layout("data:2", loss_chunk=4), "loss_chunk: this model computes its own loss"),
        (layout("data:2", attention="chunked"), "attention chunked: this model has its own layers"),
        (layout("data:2", unroll=2), "unroll 2: this model runs its own layers"),
        (layout("tensor:2"), "is split over tensor"),
        (layout("data:2,tensor:2", sequence_parallel=True), "is split over tensor"),
        (layout("sequence:2"), "is split over sequence"),
    ],
)
def test_what_a_foreign_model_cannot_take_is_refused_by_name(make, plan, says):
    with pytest.raises(UserError, match=says):
        build(an_experiment(make()), plan)


@pytest.mark.parametrize("axis", ["pipe", "expert"])
def test_axes_on_which_nothing_lies_are_refused(axis):
    with pytest.raises(UserError, match=axis):
        build(an_experiment(nnx_net()), layout(f"{axis}:2"))
