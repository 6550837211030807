"""The ResNet against a plain Flax one, against known sizes, and under remat, weights and bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.resnet import ResNet

TINY = ResNet(classes=5, channels=2, stages=(1, 1), width=4, stem="small")


def batch_for(config=TINY, rows=4, size=8, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(rows, size, size, config.channels)).astype(np.float32)
    return {"images": jnp.asarray(images), "labels": rng.integers(0, config.classes, rows).astype(np.int32)}


@functools.cache
def parts_of(config):
    @nnx.jit
    def build():
        module = config.build(nnx.Rngs(0))
        params = nnx.state(module, nnx.Param)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        nnx.update(module, jax.tree.unflatten(structure, moved))
        return module

    return nnx.split(build())


def module_of(config=TINY):
    """Every parameter moved off its initial value, so that each matters."""
    return nnx.merge(*parts_of(config), copy=True)


class Reference(linen.Module):
    """Written from the paper with Flax's layers."""

    config: ResNet

    @linen.compact
    def __call__(self, x, train):
        c = self.config
        norm = functools.partial(linen.BatchNorm, use_running_average=not train, momentum=c.momentum, epsilon=1e-5)
        conv = functools.partial(linen.Conv, use_bias=False)

        def step(x, width, window, stride=1):
            pad = [(window // 2, window // 2)] * 2
            return norm()(conv(width, (window, window), (stride, stride), padding=pad)(x))

        imagenet = c.stem == "imagenet"
        x = linen.relu(step(x, c.width, 7 if imagenet else 3, 2 if imagenet else 1))
        if imagenet:
            x = linen.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])
        for stage, count in enumerate(c.stages):
            for index in range(count):
                stride, width = 2 if stage and not index else 1, c.width * 2**stage
                if c.bottleneck:
                    y = linen.relu(step(x, width, 1))
                    y = linen.relu(step(y, width, 3, stride))
                    y = step(y, 4 * width, 1)
                else:
                    y = step(linen.relu(step(x, width, 3, stride)), width, 3)
                x = linen.relu(y + (x if x.shape == y.shape else step(x, y.shape[-1], 1, stride)))
        return linen.Dense(c.classes)(x.mean((1, 2)))


def as_reference(module):
    """The module's parameters and statistics under the reference's names, which count in order of the calls."""
    pairs = [module.stem]
    for block in module.blocks.layers:
        pairs += [*block.branch] + ([] if block.shortcut is None else [block.shortcut])
    params, stats = {}, {}
    for index, pair in enumerate(pairs):
        params[f"Conv_{index}"] = {"kernel": pair.conv.weight[...]}
        params[f"BatchNorm_{index}"] = {"scale": pair.norm.weight[...], "bias": pair.norm.bias[...]}
        stats[f"BatchNorm_{index}"] = {"mean": pair.norm.mean[...], "var": pair.norm.var[...]}
    params["Dense_0"] = {"kernel": module.head.weight[...], "bias": module.head.bias[...]}
    return {"params": params, "batch_stats": stats}


@pytest.mark.parametrize(
    "config",
    [
        ResNet(classes=5, channels=2, stages=(1, 2), width=4, stem="small"),
        pytest.param(
            ResNet(classes=5, channels=2, stages=(1, 1), width=4, stem="imagenet", bottleneck=True),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plain_flax_network_gives_the_same_logits_statistics_and_evaluation(config):
    module, images = module_of(config), batch_for(config, size=16)["images"]
    reference, variables = Reference(config), as_reference(module)
    expected, after = jax.jit(lambda v, x: reference.apply(v, x, True, mutable=["batch_stats"]))(variables, images)
    logits = nnx.jit(lambda module, x: module(x, context=Context(key=jax.random.key(0))))(module, images)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    found = as_reference(module)
    assert jax.tree.structure(found["batch_stats"]) == jax.tree.structure(after["batch_stats"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found["batch_stats"], after["batch_stats"])
    expected = jax.jit(lambda v, x: reference.apply(v, x, False))(variables | after, images)
    np.testing.assert_allclose(nnx.jit(lambda module, x: module(x))(module, images), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (ResNet(), 11_689_512),  # torchvision's resnet18 and resnet50
        (ResNet(stages=(3, 4, 6, 3), bottleneck=True), 25_557_032),
    ],
)
def test_the_known_networks_have_their_known_number_of_parameters(config, parameters):
    module = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))) == parameters


def test_blocks_start_as_the_identity_and_the_first_loss_is_a_uniform_guess():
    config = ResNet(classes=5, channels=2, stages=(2,), width=4, stem="small")
    module, batch = config.build(nnx.Rngs(0)), batch_for(config)
    x = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, 8, 8, 4)))
    np.testing.assert_allclose(module.blocks(x, context=Context(key=jax.random.key(0))), x, atol=1e-6)
    loss = config.loss(module, batch, Context())
    np.testing.assert_allclose(loss.total / loss.weight, np.log(5), rtol=1e-6)


def pure(config, module):
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def f(params, batch, context):
        copy = nnx.merge(graphdef, params, rest, copy=True)
        return config.loss(copy, batch, context).total, nnx.to_pure_dict(nnx.state(copy, nnx.BatchStat))

    return params, f


@pytest.mark.variant  # by default: those of a chain with statistics, in `tests/memory/test_chain_apply.py`
def test_remat_of_each_block_keeps_gradients_and_statistics():
    params, f = pure(TINY, module_of())
    batch, context = batch_for(), Context(key=jax.random.key(0))
    (loss, stats), grads = jax.jit(lambda p: jax.value_and_grad(f, has_aux=True)(p, batch, context))(params)
    with blocks.wrapping(lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)):
        treated = jax.jit(lambda p: jax.value_and_grad(f, has_aux=True)(p, batch, context))(params)
        jaxpr = jax.make_jaxpr(lambda p: f(p, batch, context))(params)
    assert sum("checkpoint" in eqn.primitive.name or "remat" in eqn.primitive.name for eqn in jaxpr.eqns) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ((loss, stats), grads), treated)


def test_bfloat16_stays_near_and_gives_float32_gradients_and_statistics():
    params, f = pure(TINY, module_of())
    batch, key = batch_for(rows=16), jax.random.key(0)
    exact, _ = jax.jit(f)(params, batch, Context(key=key))
    narrow = Context(key=key, dtype="bfloat16")
    (loss, stats), grads = jax.jit(lambda p: jax.value_and_grad(f, has_aux=True)(p, batch, narrow))(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((stats, grads))} == {"float32"}
    np.testing.assert_allclose(loss, exact, rtol=0.03)


def test_weights_smoothing_and_accuracy():
    config = ResNet(classes=5, channels=2, stages=(1,), width=4, stem="small", smoothing=0.2)
    module, batch = module_of(config), batch_for(config)
    weights = np.array([1, 0, 2, 1], np.float32)
    log_p = np.asarray(jax.nn.log_softmax(module(batch["images"])))
    target = 0.8 * np.eye(5)[batch["labels"]] + 0.04
    loss = config.loss(module, batch | {"weights": weights}, Context())
    np.testing.assert_allclose(loss.total, -((target * log_p).sum(1) * weights).sum(), rtol=1e-5)
    right, weight = config.accuracy(module, batch | {"weights": weights}, Context())
    assert float(loss.weight) == float(weight) == 4
    assert float(right) == ((log_p.argmax(1) == batch["labels"]) * weights).sum()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": ()}, "stages: got ()"),
        ({"stages": (2, 0)}, r"stages\[1\]: got 0"),
        ({"stem": "imagnet"}, "did you mean 'imagenet'"),
        ({"width": 0}, "width: got 0"),
        ({"momentum": 1.0}, "momentum: got 1.0"),
    ],
)
def test_fields_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        ResNet(**{**vars(TINY), **fields})


def test_images_with_other_channels_are_refused():
    with pytest.raises(UserError, match=r"expected \(B, height, width, 2\)"):
        module_of()(jnp.ones((1, 8, 8, 3)))
