"""Networks with none of our layers, and what tests of them ask: batches, gradients, a step of descent."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxscale.blocks import Context

nnx.use_eager_sharding(False)


class Calls(nnx.Variable):
    """A variable type of the user's own."""


class Block(nnx.Module):
    def __init__(self, width, rate, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x, scale, flag):
        assert flag == "static"
        self.calls[...] += 1
        return x + scale * self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0, depth=3, width=8):
        self.stem = nnx.Linear(4, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rate, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, jnp.float32(0.5).astype(x.dtype), flag="static")
        return self.head(x)


class LinenNet(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            x = linen.Dense(8)(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = linen.Dropout(self.rate, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(5)(x)


def data(rows=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.normal(size=(rows, 4)).astype(np.float32),
        "labels": rng.integers(0, 5, rows).astype(np.int32),
    }


def rngs():
    return nnx.Rngs(params=0, dropout=1)


def pure(model):
    """(params, rest, f) with f(params, rest, batch, key) -> (mean loss, rest after), as a train step uses a model."""
    graphdef, params, rest = nnx.split(model.build(rngs()), nnx.Param, ...)

    def f(params, rest, batch, key):
        module = nnx.merge(graphdef, params, rest, copy=True)
        loss = model.loss(module, batch, Context(key=key, examples=jnp.arange(len(batch["labels"]))))
        return loss.total / loss.weight, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest), f


def sgd_step(f):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, rest, batch, key):
        (loss, rest), grads = jax.value_and_grad(f, has_aux=True)(params, rest, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest, loss

    return step


def assert_close(a, b, tolerance):
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


def numbers(tree):
    """Without rng keys, which numpy cannot compare."""
    return {k: numbers(v) if isinstance(v, dict) else v for k, v in tree.items() if k != "rngs"}
