"""Weights in bfloat16 with a correction, or rounded stochastically: what they keep that bfloat16 alone would lose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import is_quantized, quantize_state
from jaxscale.lowbit.rounding import key_of, stochastic_bfloat16, stochastic_weights
from jaxscale.lowbit.split_weights import join, join_params, split, split_params, split_weights


def wide() -> np.ndarray:
    draw = np.random.default_rng(0)
    x = (draw.normal(size=20000) * np.exp(8 * draw.normal(size=20000))).astype(np.float32)
    return x[np.abs(x) > 1e-30]


def test_weight_and_correction_give_the_float32_number() -> None:
    x = wide()
    weight, correction = jax.jit(split)(x)
    np.testing.assert_array_equal(weight, x.astype(jnp.bfloat16))
    found = np.asarray(jax.jit(join)(weight, correction))
    assert np.max(np.abs(found - x) / np.abs(x)) <= 2.0**-8 / 255 * 1.001  # 1.54e-5
    assert np.max(np.abs(np.asarray(weight, np.float32) - x) / np.abs(x)) > 3.8e-3
    again = jax.jit(split)(found)
    np.testing.assert_array_equal(again[0], weight)
    np.testing.assert_array_equal(again[1], correction)
    held = split(jnp.array([0.0, -0.0, 1.0, jnp.nan]))
    assert held[1].tolist() == [0, 0, 0, 0]


def test_updates_too_small_for_bfloat16_add_up_and_the_new_weights_are_the_rounded_ones() -> None:
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32), "norm": jnp.ones(64)}
    weights, corrections = split_params({"w": params["w"]})
    weights |= {"norm": params["norm"]}
    rule = split_weights(quantize_state(optax.adamw(1e-4), "int8"))
    state = rule.init(weights)
    assert isinstance(state.correction["norm"], optax.MaskedNode)
    assert is_quantized(state.inner[0].mu["w"])
    state = state._replace(correction={**state.correction, **corrections})

    plain = quantize_state(optax.adamw(1e-4), "int8")
    plain_state, whole = plain.init(params), params
    plainly = jax.jit(plain.update)
    step = jax.jit(rule.update)
    for i in range(20):
        gradients = {"w": (1 + 0.1 * i) * jnp.cos(jnp.arange(4096.0)).reshape(64, 64), "norm": jnp.ones(64)}
        updates, state = step(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        assert weights["w"].dtype == jnp.bfloat16
        updates, plain_state = plainly(gradients, plain_state, whole)
        whole = optax.apply_updates(whole, updates)
    found = join_params(weights, state)
    moved = np.abs(np.asarray(whole["w"] - params["w"])).mean()
    assert np.abs(np.asarray(found["w"] - whole["w"])).mean() < 0.05 * moved
    np.testing.assert_array_equal(weights["w"], jax.jit(split)(found["w"])[0])
    np.testing.assert_allclose(weights["norm"], whole["norm"], rtol=1e-6)
    # the control: added to bfloat16, such a step moves next to no weight
    first = params["w"].astype(jnp.bfloat16)
    assert (optax.apply_updates(first, jnp.full((64, 64), 1e-4)) == first).mean() > 0.9
    assert (weights["w"] == first).mean() < 0.8


def test_an_update_is_the_difference_of_rounded_weights() -> None:
    weights = {"w": jnp.full((2, 2), 100.0, jnp.bfloat16)}
    rule = split_weights(optax.sgd(1.0))
    updates, state = rule.update({"w": jnp.full((2, 2), 0.2)}, rule.init(weights), weights)
    assert updates["w"].dtype == jnp.float32
    assert not updates["w"].any(), "half a unit is 0.25: the weight stays, and the correction has it"
    np.testing.assert_allclose(join_params(weights, state)["w"], 99.8, rtol=2e-5)
    updates, state = rule.update({"w": jnp.full((2, 2), 0.2)}, state, weights)
    assert float(updates["w"][0, 0]) == -0.5


def test_split_weights_says_what_it_needs() -> None:
    with pytest.raises(UserError, match="no parameter is bfloat16"):
        split_weights(optax.sgd(0.1)).init({"w": jnp.ones(3)})
    rule = split_weights(optax.sgd(0.1))
    weights = {"w": jnp.ones(3, jnp.bfloat16)}
    with pytest.raises(UserError, match="got no params"):
        rule.update(weights, rule.init(weights))
    tree = optax.tree.map_params(
        rule, lambda *_: "p", rule.init(weights), weights, transform_non_params=lambda _: "n", is_leaf=is_quantized
    )
    assert tree.correction == {"w": "p"}


def test_stochastic_rounding_keeps_the_mean_and_what_bfloat16_holds() -> None:
    key = jax.random.key(0)
    x = jnp.float32(1.0) + jnp.arange(1, 9, dtype=jnp.float32) * 2.0**-11
    drawn = jax.vmap(lambda k: stochastic_bfloat16(-x, k))(jax.random.split(key, 4096)).astype(jnp.float32)
    assert (np.abs(np.asarray(drawn.mean(0) + x)) <= 5 * 0.5 * 2.0**-7 / 64).all()
    held = jnp.array([1.0, -2.5, 0.0, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(stochastic_bfloat16(held, key).astype(jnp.float32), held)


def test_stochastic_weights_move_on_average_and_repeat() -> None:
    weights = {"a": jnp.ones(4096, jnp.bfloat16), "b": jnp.ones(4096, jnp.bfloat16), "norm": jnp.ones(4)}
    rule = stochastic_weights(optax.sgd(2.0**-11))
    ones = jax.tree.map(jnp.ones_like, weights)

    def run(order: list[str]) -> dict[str, jax.Array]:
        found = {name: weights[name] for name in order}
        state = rule.init(found)
        for _ in range(4):
            updates, state = jax.jit(rule.update)({name: ones[name] for name in order}, state, found)
            found = optax.apply_updates(found, updates)
        return found

    found = run(["a", "b", "norm"])
    assert abs(float(found["a"].astype(jnp.float32).mean()) - (1 - 4 * 2.0**-11)) < 3e-4
    assert not np.array_equal(found["a"], found["b"]), "each leaf has its own draw"
    np.testing.assert_array_equal(run(["b"])["b"], found["b"])
    assert key_of(0, 1, "a") != key_of(0, 2, "a")
    assert key_of(0, 1, "a") != key_of(0, 1, "b")
    assert key_of(0, 1, "a") != key_of(1, 1, "a")
    to_the_nearest = (jnp.ones(1) - 2.0**-11).astype(jnp.bfloat16)
    assert float(to_the_nearest[0]) == 1.0, "the control: to the nearest it would never move"
