"""Parameters that are not trained: no gradient, no state, shards as the others, and the numbers of a plain loop.

By default on one device, under ZeRO 3 and with streamed state.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import Experiment, Optimizer, build
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models import Decoder, ForeignModel, LoRA, classification
from jaxscale.trees import named_leaves
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch
from tests.tiers import variants

ROWS, STEPS = 8, 3
DECODER = Decoder(vocab=16, context=8, layers=4, embed=16, heads=2, tied=False)
ADAPTED = LoRA(Residual(), rank=2, on="mlp/up")


def batches():
    return [random_batch(ROWS, seed) for seed in range(STEPS)]


def step_of(model=ADAPTED, train=None, mesh="1", **fields):
    optimizer = Optimizer(learning_rate=1e-2, train=train, custom=lambda rate: optax.adam(rate), clip=None)
    return build(Experiment("frozen", model, None, optimizer, steps=STEPS, batch=ROWS), plan_of(mesh=mesh, **fields))


def trajectory(step):
    step.compile(batches()[0])
    state, losses = step.init(), []
    for batch in batches():
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


@functools.cache
def alone(train=None):
    """A step on one device, its losses and its last state."""
    step = step_of(train=train)
    return step, *trajectory(step)


def plain(pattern):
    """Losses of a plain loop that differentiates with respect to the parameters whose path has the pattern."""
    module = ADAPTED.build(nnx.Rngs(params=0, dropout=1))
    graphdef, trained, rest = nnx.split(
        module, lambda path, _: any(part in "/".join(map(str, path)) for part in pattern.split("|")), ...
    )
    adam = optax.adam(step_of().experiment.optimizer.schedule_fn(STEPS))
    state, losses = adam.init(trained), []

    @jax.jit
    def gradient(trained, batch):
        def mean(trained):
            loss = ADAPTED.loss(nnx.merge(graphdef, trained, rest), batch, Context())
            return loss.total / loss.weight

        return jax.value_and_grad(mean)(trained)

    for batch in batches():
        loss, grads = gradient(trained, batch)
        updates, state = adam.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        losses.append(float(loss))
    return np.array(losses)


PLANS = {
    "one device": {},
    "microbatches": {"microbatches": 2},
    "ZeRO 3": {"mesh": "fsdp:4", "zero": 3},
    "tensor": {"mesh": "fsdp:2,tensor:2", "zero": 3, "memory": "full"},
    "bfloat16": {"precision": "bfloat16"},
    "a codec": {"mesh": "replica:2", "reduce": "int8"},
    "streamed state": {"optimizer_state": "streamed"},
}


@pytest.mark.parametrize("train", variants([None, "lora|mlp/down"], 1), ids=lambda train: train or "lora")
def test_adapters_train_as_in_a_plain_loop(train):
    np.testing.assert_allclose(alone(train)[1], plain(train or "lora"), rtol=2e-5)


@pytest.mark.parametrize(
    "name", variants([name for name in PLANS if name != "one device"], {"ZeRO 3", "streamed state"})
)
def test_every_plan_trains_adapters_as_one_device_does(name):
    step = step_of(**PLANS[name])
    losses, state = trajectory(step)
    is_rounded = name in ("bfloat16", "a codec")
    np.testing.assert_allclose(losses, alone()[1], rtol=2e-2 if is_rounded else 1e-5)
    before = named_leaves(step.init().rest)
    for path, leaf in named_leaves(state.rest).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(before[path]))
    if "fsdp" in step.plan.mesh.sizes and step.plan.zero == 3:
        kernel = named_leaves(state.rest)["blocks/layers/mlp/up/weight"]
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def test_state_gradients_and_memory_are_those_of_the_adapters():
    step = step_of()
    adapter_count = 2 * (32 + 64) * 2
    assert step.parameters == adapter_count
    memory = step.memory(batches()[0])
    assert memory["parameters"] == 4 * adapter_count
    assert memory["optimizer"] <= 8 * adapter_count + 16
    assert memory["frozen parameters"] == 4 * sum(
        leaf.size for name, leaf in named_leaves(step.init().rest).items() if name in step.pure_model.frozen
    )
    assert step.memory(batches()[0])["model state"] < 200
    gradients = step.gradients_fn(step.init(), step.place(batches()[0]))
    assert {name.split("/")[-2] for name in named_leaves(gradients)} == {"lora"}
    (line,) = [line for line in step.describe() if line.startswith("train lora: ")]
    assert f"train lora: {adapter_count:,} of " in line


def test_a_state_continues_on_another_mesh_and_has_the_names_of_all_parameters():
    step, _, state = alone()
    other = step_of(mesh="fsdp:2", zero=3, precision="bfloat16")
    arrays = step.to_canonical(state)
    assert "params/blocks/layers/1/mlp/up/weight" in arrays
    assert "params/blocks/layers/1/mlp/up/lora/a" in arrays
    moved = {name: jax.device_put(arrays[name], leaf.sharding) for name, leaf in other.canonical_abstract().items()}
    module, expected = other.module(other.from_canonical(moved)), step.module(state)
    np.testing.assert_allclose(
        np.asarray(module.blocks.layers.mlp.up.weight[...], np.float32),
        np.asarray(expected.blocks.layers.mlp.up.weight[...]),
        rtol=1e-2,
    )
    batch = jax.tree.map(jnp.asarray, batches()[0])
    loss = ADAPTED.loss(module, batch, Context(dtype="bfloat16"))
    np.testing.assert_allclose(loss.total, ADAPTED.loss(expected, batch, Context()).total, rtol=1e-2)


def test_merged_weights_are_the_adapters_product():
    step, _, state = alone()
    arrays = step.to_canonical(state)
    params = {name.partition("/")[2].replace("/", "."): value for name, value in arrays.items() if "params/" in name}
    merged = ADAPTED.merged(params)
    assert not any("lora" in name for name in merged)
    name = "blocks.layers.1.mlp.up"
    expected = params[f"{name}.weight"] + 2.0 * params[f"{name}.lora.a"] @ params[f"{name}.lora.b"]
    np.testing.assert_allclose(merged[f"{name}.weight"], expected, rtol=1e-6)
    assert float(jnp.abs(params[f"{name}.lora.b"]).max()) > 0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.adapter = nnx.LoRALinear(8, 3, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.adapter(self.norm(jax.nn.relu(self.body(x))))


@pytest.mark.parametrize(
    ("train", "names"),
    variants(
        [
            ("LoRAParam", ["adapter/lora/lora_a", "adapter/lora/lora_b"]),
            ("lora_b|bias", ["adapter/bias", "adapter/lora/lora_b", "body/bias", "norm/bias"]),
            (None, None),
        ],
        1,
    ),
)
def test_a_foreign_model_trains_what_its_pattern_finds(train, names):
    model = ForeignModel(Net, classification())
    optimizer = Optimizer(learning_rate=0.1, train=train)
    step = build(Experiment("foreign", model, None, optimizer, steps=STEPS, batch=ROWS), plan_of(mesh="fsdp:2", zero=2))
    rng = np.random.default_rng(0)
    batch = {"images": rng.normal(size=(ROWS, 4)).astype(np.float32), "labels": np.arange(ROWS) % 3}
    state = step.init()
    found = sorted(named_leaves(state.params))
    assert names is None or found == names
    before = {
        name: np.asarray(leaf) for name, leaf in named_leaves((state.params, state.rest)).items() if "rngs" not in name
    }
    state, _ = step(state, step.place(batch))
    after = named_leaves((state.params, state.rest))
    changed = {name.partition("/")[2] for name, leaf in before.items() if (np.asarray(after[name]) != leaf).any()}
    statistics = {"norm/mean", "norm/var"}
    assert changed - statistics <= set(found)
    assert statistics <= changed


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("lorra", r"optimizer\.train: 'lorra' is found in no name of a parameter; the parameters are blocks/layers/"),
        ("haed", r"; did you mean 'head'\?$"),
        ("(", r"optimizer\.train: got '\(', expected a regular expression"),
        ("", r"optimizer\.train: got an empty text"),
    ],
)
def test_a_pattern_that_finds_nothing_is_refused(train, message):
    with pytest.raises(UserError, match=message):
        step_of(LoRA(DECODER, rank=2), train=train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank: got 0"),
        ({"alpha": -1.0}, "alpha: got -1.0"),
        ({"on": "("}, "on: got '\\('"),
    ],
)
def test_adapters_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        LoRA(DECODER, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"on": "atention"}, "on: 'atention' is found in no path"), ({"rank": 99}, "rank: got 99, but .* is 16 x 16")],
)
def test_adapters_that_do_not_fit_the_layers_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        LoRA(DECODER, **options).build(nnx.Rngs(0))
