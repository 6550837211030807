"""AdamW with 8-bit moments by one kernel: what it computes is what the rule itself does, where it takes part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.lowbit.quantize import is_quantized
from jaxscale.lowbit.quantized import quantize_state
from jaxscale.offload.updates import update_on_device
from jaxscale.optim import fused as module
from jaxscale.optim.fused import AdamW, fused_advance

PARAMS = {
    "up": jax.random.normal(jax.random.key(0), (2, 128, 32)),
    "head": jax.random.normal(jax.random.key(1), (64, 64)),
    "norm": jnp.ones(8),
}
MASK = {"up": True, "head": True, "norm": False}
NUMBERS = AdamW(lambda count: 1e-2 / (1 + count), 0.9, 0.95, 1e-8, 0.1, MASK)


def gradients(step):
    keys = dict(zip(PARAMS, jax.random.split(jax.random.key(step), len(PARAMS)), strict=True))
    return {name: jax.random.normal(keys[name], p.shape) for name, p in PARAMS.items()}


@pytest.mark.parametrize(("states", "clip", "mesh"), [("int8", 1.0, True), ("dynamic8", None, False)])
def test_steps_are_the_rules(states, clip, mesh, monkeypatch):
    """Three steps, one of them bad, with every quantized leaf handed to the kernel's reference."""
    monkeypatch.setattr(module, "has_kernel", lambda shape, block, platform, map: True)
    places = None
    if mesh:
        made = Mesh(np.array(jax.devices()[:2]), ("x",))
        places = jax.tree.map(lambda p: NamedSharding(made, PartitionSpec(*[None] * (p.ndim - 1), "x")), PARAMS)
    rule = quantize_state(
        optax.adamw(NUMBERS.rate, 0.9, 0.95, weight_decay=0.1, mask=MASK), states, local=places, platform="cpu"
    )
    whole = rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule)
    ways = [update_on_device(whole), fused_advance(rule, NUMBERS, platform="cpu", state_shardings=places, clip=clip)]

    @functools.partial(jax.jit, static_argnums=0)
    def run(way, params, state, grads, good):
        return ways[way](grads, state, params, optax.tree.norm(grads), good)

    found = []
    for way in range(2):
        params, state = PARAMS, whole.init(PARAMS)
        kept = []
        for step, good in enumerate((True, False, True)):
            grads = gradients(step)
            params, state = run(way, params, state, grads, jnp.array(good))
            kept.append(jax.tree.leaves((params, state)))
        found.append((params, state))
        assert jax.tree.structure(state) == jax.tree.structure(whole.init(PARAMS))
        for one, other in zip(kept[0], kept[1], strict=True):
            np.testing.assert_array_equal(one, other, err_msg="a bad step leaves every bit")
    (want, want_state), (got, got_state) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    for a, b in zip(*(jax.tree.leaves(one, is_leaf=is_quantized) for one in (got_state, want_state)), strict=True):
        if is_quantized(a):
            assert (a.map, a.block) == (b.map, b.block)
            off = np.abs(np.asarray(a.codes, int) - np.asarray(b.codes, int))
            assert off.max() <= 1
            assert (off > 0).mean() < 0.01
            np.testing.assert_allclose(a.scale, b.scale, rtol=1e-5)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def test_on_a_cpu_every_leaf_goes_through_the_rule(monkeypatch):
    """There no kernel runs, and `adam8` is not asked."""

    def never(*args, **options):
        raise AssertionError

    monkeypatch.setattr(module, "adam8", never)
    rule = quantize_state(optax.adamw(NUMBERS.rate, 0.9, 0.95, weight_decay=0.1, mask=MASK), platform="cpu")
    advance = fused_advance(rule, NUMBERS, platform="cpu")
    state = rule.init(PARAMS)
    after, _ = jax.eval_shape(advance, gradients(0), state, PARAMS, jnp.ones(()), jnp.array(True))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, PARAMS)
