"""One parameter that a foreign model reaches by two paths: the sum of two gradients, and one array of the state."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.errors import UserError

TOKENS = np.random.default_rng(0).integers(0, 16, (8, 5)).astype(np.int32)
BATCH = {"tokens": TOKENS, "targets": (TOKENS + 1) % 16}


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.middle = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, tokens):
        return self.head(jax.nn.gelu(self.middle(self.embed(tokens))))


class Block(nnx.Module):
    def __init__(self, linear):
        self.linear = linear

    def __call__(self, x):
        return x + jax.nn.gelu(self.linear(x))


class Repeated(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        linear = nnx.Linear(16, 16, rngs=rngs)
        self.layers = nnx.List([Block(linear), Block(linear)])
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def step_of(family, plan):
    model = jx.models.ForeignModel(lambda rngs: family(rngs), jx.models.language_model())
    sgd = jx.Optimizer("sgd", learning_rate=0.1, clip=None, weight_decay=0.0, schedule="constant")
    return jx.build(jx.Experiment("shared", model, None, steps=3, batch=8, optimizer=sgd, plan=plan))


def plain_loss_and_norm(module):
    """Loss and gradient norm of Flax itself, in which the two paths lead to one parameter."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params):
        logits = nnx.merge(graphdef, params, rest, copy=True)(BATCH["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["targets"]).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), float(optax.tree.norm(gradients))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        (Tied, jx.Plan(mesh="fsdp:4", zero=3, microbatches=2)),
        pytest.param(Tied, jx.Plan(mesh="1", memory="full"), marks=pytest.mark.slow),
        pytest.param(Repeated, jx.Plan(mesh="fsdp:2", zero=2, memory="full"), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_the_sum_over_both_paths(family, plan):
    step = step_of(family, plan)
    state = step.init()
    expected = plain_loss_and_norm(step.module(state))
    assert sum("embedding" in name or "linear" in name for name in step.to_canonical(state)) in (1, 3)
    next_state, metrics = step(state, step.place(BATCH))
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="the state was donated to an earlier step"):
        step(state, step.place(BATCH))
    module = step.module(next_state)
    if family is Tied:
        np.testing.assert_array_equal(module.head.kernel[...], module.embed.embedding[...])


def test_blocks_that_share_parameters_are_refused_in_a_pipeline():
    step = step_of(Repeated, jx.Plan(mesh="pipe:2", pipeline="1f1b:2x4,stash=input"))
    with pytest.raises(UserError, match="parameters of block layers/1 are also read outside of the block"):
        step(step.init(), step.place(BATCH))
