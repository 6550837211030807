"""Weights streamed from the host give the gradients of weights on the device, wherever the gradients go."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Chain, Stack
from jaxscale.memory.apply import treatment_for, wrapper
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.offload.weights import Streamed, with_streamed_weights
from jaxscale.programs.collect import collect
from jaxscale.sharding.memory_space import on_host, to_host
from tests.tiers import variants

LAYERS, WIDTH = 3, 8


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.mlp = MLP(WIDTH, 16, rngs=rngs)

    def __call__(self, x, *, context=Context(), scale):
        return x + scale * self.mlp(x, context=context)


class Cycled(nnx.Module):
    """A stack whose blocks repeat in two cycles of two, and one block more."""

    def __init__(self, rngs):
        self.stack = Stack(Scaled, 5, rngs=rngs)

    def __call__(self, x):
        return self.stack(x, cycle=({"scale": 1.0}, {"scale": 0.5}))


def model(kind):
    rngs = nnx.Rngs(0)
    if kind == "cycles":
        return Cycled(rngs)
    if kind == "stack":
        return Stack(lambda rngs: MLP(WIDTH, 16, rngs=rngs), LAYERS, rngs=rngs)
    return Chain([MLP(WIDTH, hidden, rngs=rngs) for hidden in (16, 24)])


def parts(kind):
    graphdef, params = nnx.split(model(kind), nnx.Param)
    return graphdef, nnx.to_pure_dict(params)


def loss(graphdef, params, x):
    return (nnx.merge(graphdef, params, copy=True)(x) ** 2).mean()


def treatment(memory, kind="stack"):
    if ":" in memory:
        graphdef, params = parts(kind)
        calls = collect(functools.partial(loss, graphdef), params, jnp.ones((2, 4, WIDTH)))
        return treatment_for(decide(MemoryPlan.parse(memory), calls))
    made = wrapper(MemoryPlan.parse(memory))
    return blocks.Treatment(blocks.identity if memory == "none" else made)


# by default each plan once, and each place of the gradients with each form of the model
DEFAULT = [
    ("device", "none", "stack"),
    ("host", "full", "stack"),
    ("host", "save:2KiB", "stack"),
    ("host", "dots", "chain"),
    ("device", "save:1MiB", "chain"),
    ("host", "none", "cycles"),
    ("device", "full", "cycles"),
]
PLANS = ["none", "dots", "full", "save:2KiB", "save:1MiB"]


@pytest.mark.parametrize(
    ("where", "memory", "kind"),
    variants(itertools.product(["device", "host"], PLANS, ["stack", "chain", "cycles"]), default=DEFAULT),
)
def test_gradients_are_those_of_weights_on_the_device(kind, memory, where):
    graphdef, params = parts(kind)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, WIDTH)), jnp.float32)

    @jax.jit
    def expected(params, x):
        with blocks.treating(treatment(memory, kind)):
            return jax.grad(functools.partial(loss, graphdef))(params, x)

    def streamed(params, x):
        held = to_host(params)

        def of(moving):
            given = jax.tree.map(lambda m, h: Streamed(m) if where == "host" else Streamed(h, m), moving, held)
            with blocks.treating(with_streamed_weights(treatment(memory, kind))):
                return loss(graphdef, given, x)

        gradients = jax.grad(of)(held if where == "host" else jax.tree.map(jnp.zeros_like, params))
        assert all(on_host(g) == (where == "host") for g in jax.tree.leaves(gradients))
        return gradients

    found = jax.device_get(jax.jit(streamed)(params, x))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected(params, x))


@pytest.mark.parametrize("memory", ["none", "dots", "full", "save:2KiB", "save:1MiB", "greedy:2KiB"])
def test_no_weight_is_kept_for_the_backward_pass(memory):
    """A scan that kept fetched weights would stack them for all layers: its residuals show none of their shape."""
    graphdef, params = parts("stack")
    x = jnp.ones((2, 4, WIDTH))

    def of(params, x):
        with blocks.treating(with_streamed_weights(treatment(memory))):
            return loss(graphdef, jax.tree.map(Streamed, params), x)

    jaxpr = jax.make_jaxpr(lambda params, x: jax.grad(of)(to_host(params), x))(params, x)
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    forward = next(eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    made = {v.aval.shape for v in forward.outvars}
    assert not made & shapes


@pytest.mark.parametrize(("keep_type", "given"), [(False, jnp.bfloat16), (True, jnp.float32)])
def test_a_weight_is_cast_on_the_device_and_its_gradient_is_float32(keep_type, given):
    w = jnp.full((4,), 1 / 3)
    seen = []

    def of(w):
        x = Streamed(w, dtype="bfloat16", keep_type=keep_type).fetch()
        seen.append(x.dtype)
        return (x.astype(jnp.float32) ** 2).sum()

    gradient = jax.jit(lambda w: jax.grad(of)(to_host(w)))(w)
    assert seen == [given]
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(jax.device_get(gradient), 2 * w.astype(jnp.bfloat16).astype(jnp.float32))
