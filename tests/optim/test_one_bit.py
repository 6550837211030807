"""1-bit Adam and LAMB: Adam and LAMB up to the freeze step, a written-out reference behind it, layers one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import quantize_state
from jaxscale.lowbit.split_weights import split_weights
from jaxscale.optim.large_batch import lamb
from jaxscale.optim.leaves import leaf_of, leaves_of
from jaxscale.optim.one_bit import Messages, clip_mean_gradients, one_bit_adam, one_bit_lamb
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.replica_updates import over_replicas
from jaxscale.replicas import OneBit

N, FREEZE, STEPS = 4, 3, 7
B1, B2, EPS, RATE, DECAY = 0.9, 0.95, 1e-8, 0.05, 0.1
RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"w": (20, 24), "b": (5,)}.items()}
GRADIENTS = [
    {name: RNG.normal(size=(N, *p.shape)).astype(np.float32) for name, p in PARAMS.items()} for _ in range(STEPS)
]
for gradient in GRADIENTS:
    gradient["w"][:, 7] = 0  # such as a token that never comes
ADAM = functools.partial(one_bit_adam, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


def trained(rule, messages, params=PARAMS, gradients=GRADIENTS, leaves=None):
    """Parameters and states after each step; the latter with a first dim for the replicas."""
    whole = over_replicas(rule, messages, OneBit(), "r", N, leaves=leaves)

    @functools.partial(jax.vmap, in_axes=(0, 0, 0), axis_name="r")
    def step(gradient, state, params):
        updates, state = whole.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (N, *p.shape)), params)
    state, found = jax.vmap(whole.init, axis_name="r")(params), []
    for gradient in gradients:
        params, state = step(gradient, state, params)
        found.append(jax.tree.map(np.asarray, (params, state)))
    return found


@pytest.fixture(scope="module")
def adam():
    return trained(ADAM(RATE, FREEZE), Messages(B1, FREEZE))


def test_the_warm_up_is_adam_of_the_exact_mean_and_replicas_stay_alike(adam):
    rule = optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)
    params: Any = PARAMS
    state, update = rule.init(PARAMS), jax.jit(rule.update)
    for gradient, (found, _) in zip(GRADIENTS[:FREEZE], adam, strict=False):
        updates, state = update(jax.tree.map(lambda g: g.mean(0), gradient), state, params)
        params = optax.apply_updates(params, updates)
        for name, p in params.items():
            np.testing.assert_allclose(found[name][0], p, rtol=1e-5, atol=1e-6)
    for found, _ in adam:
        for p in found.values():
            np.testing.assert_array_equal(p, np.broadcast_to(p[:1], p.shape))


def test_behind_it_momenta_go_in_a_bit_and_nothing_is_lost(adam):
    """The paper's algorithm in numpy: chunks with a server each, residuals of workers and servers."""
    size = PARAMS["w"].size // N
    m, v, w = np.zeros((20, 24)), np.zeros((20, 24)), PARAMS["w"].astype(np.float64)
    owed, server = np.zeros((N, 20, 24)), np.zeros((N, size))
    given, means = np.zeros((20, 24)), np.zeros((20, 24))

    def coded(x):
        return np.where(x >= 0, 1.0, -1.0) * np.sqrt(np.mean(x**2, -1, keepdims=True))

    for t, gradient in enumerate(GRADIENTS, 1):
        g = gradient["w"].astype(np.float64)
        if t <= FREEZE:
            m = B1 * m + (1 - B1) * g.mean(0)
            v = B2 * v + (1 - B2) * g.mean(0) ** 2
        else:
            sent = B1 * m + (1 - B1) * g
            given += sent.sum(0)
            said = coded((sent + owed).reshape(N, N, size))  # worker, chunk
            owed = sent + owed - said.reshape(owed.shape)
            told = said.mean(0) + server
            answer = coded(told)
            server = told - answer
            means += answer.reshape(20, 24)
            m = np.where(v > 0, answer.reshape(20, 24), 0)
        # nothing is lost of what was sent
        np.testing.assert_allclose(owed.sum(0) + N * server.reshape(20, 24) + N * means, given, atol=1e-12)
        root = np.sqrt(v / (1 - B2 ** min(t, FREEZE)))
        w = w - RATE * (np.where(v > 0, m / (1 - B1**t) / (root + EPS), 0) + DECAY * w)
        np.testing.assert_allclose(adam[t - 1][0]["w"][0], w, rtol=1e-3, atol=1e-4)
    state = adam[-1][1]
    np.testing.assert_allclose(state.codec_states[1]["residual"], owed, atol=1e-5)
    np.testing.assert_allclose(state.codec_states[1]["server"], server, atol=1e-5)
    inner = state.rule[0]
    np.testing.assert_array_equal(inner.nu["w"], adam[FREEZE - 1][1].rule[0].nu["w"])
    # what never had a gradient decays and does no more, and small leaves have exact momenta
    np.testing.assert_allclose(adam[-1][0]["w"][0, 7], PARAMS["w"][7] * (1 - RATE * DECAY) ** STEPS, rtol=1e-5)
    exact = np.zeros(5)
    for gradient in GRADIENTS:
        exact = B1 * exact + (1 - B1) * gradient["b"].mean(0)
    np.testing.assert_allclose(inner.mu["b"][0], exact, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_bad_gradient_of_one_replica_enters_no_residual(adam):
    bad = jax.tree.map(np.copy, GRADIENTS[FREEZE])
    bad["b"][2, 0] = np.inf
    found = trained(ADAM(RATE, FREEZE), Messages(B1, FREEZE), gradients=[*GRADIENTS[:FREEZE], GRADIENTS[FREEZE], bad])
    jax.tree.map(np.testing.assert_array_equal, found[-2][1].codec_states, found[-1][1].codec_states)
    assert np.isnan(found[-1][0]["w"]).any()  # which a guard sees


def layered():
    """Two layers of 20 x 24 in one array, and apart."""
    names = {"w": ("layers", "embed", "mlp"), "b": ("layers", "norm")}
    params = {n: np.stack([PARAMS[n], 3 * PARAMS[n] + 1]) for n in PARAMS}
    leaves = {n: leaf_of(n, names[n], p.shape) for n, p in params.items()}
    gradients = [{n: np.stack([g[n], 0.1 * g[n] + 0.01], 1) for n in g} for g in GRADIENTS]
    apart = [{f"{n}{i}": g[n][:, i] for n in g for i in range(2)} for g in gradients]
    alone = {f"{n}{i}": params[n][i] for n in params for i in range(2)}
    return params, leaves, gradients, alone, apart


@pytest.mark.parametrize("name", [pytest.param("one_bit_adam", marks=pytest.mark.slow), "one_bit_lamb"])
def test_stacked_layers_move_as_they_do_apart(name):
    params, leaves, gradients, alone, apart = layered()
    optimizer, messages = Optimizer(name=name, learning_rate=RATE, freeze=FREEZE, clip=None), Messages(B1, FREEZE)
    found = trained(optimizer.rule(STEPS, leaves), messages, params, gradients, leaves)
    of_each = leaves_of(alone)
    expected = trained(optimizer.rule(STEPS, of_each), messages, alone, apart, of_each)
    for name in params:
        for i in range(2):
            np.testing.assert_allclose(found[-1][0][name][0, i], expected[-1][0][f"{name}{i}"][0], rtol=2e-5, atol=2e-6)


def test_lamb_warms_up_as_lamb_and_then_keeps_its_ratios():
    mask = {"w": True, "b": False}
    found = trained(one_bit_lamb(RATE, FREEZE, weight_decay=DECAY, mask=mask), Messages(B1, FREEZE))
    rule = lamb(RATE, weight_decay=DECAY, mask=mask)
    params: Any = PARAMS
    state, update = rule.init(PARAMS), jax.jit(rule.update)
    ratios = []
    for gradient, (after, _) in zip(GRADIENTS[:FREEZE], found, strict=False):
        updates, state = update(jax.tree.map(lambda g: g.mean(0), gradient), state, params)
        before, params = params, optax.apply_updates(params, updates)
        ratios.append(np.linalg.norm(updates["w"]) / RATE / np.linalg.norm(direction(state, before)))
        for name, p in params.items():
            np.testing.assert_allclose(after[name][0], p, rtol=1e-5, atol=1e-6)
    mean = 0.0
    for ratio in ratios:
        mean = 0.9 * mean + 0.1 * ratio
    last, factors = found[FREEZE - 1][1].rule[0], []
    np.testing.assert_allclose(last.ratio["w"][0, 0, 0], mean, rtol=1e-5)
    for (before, _), (after, state) in zip(found[FREEZE - 1 :], found[FREEZE:], strict=False):
        inner = jax.tree.map(lambda x: x[0], state.rule[0])
        factors.append(float(inner.factor["w"][0, 0]))
        np.testing.assert_allclose(inner.ratio["w"][0, 0], mean, rtol=1e-5)
        t = int(inner.count)
        root = np.sqrt(inner.nu["w"] / (1 - 0.999**FREEZE))
        u = np.where(inner.nu["w"] > 0, inner.mu["w"] / (1 - B1**t) / (root + 1e-6), 0) + DECAY * before["w"][0]
        expected = -RATE * mean / (1 - 0.9**FREEZE) * factors[-1] * u
        np.testing.assert_allclose(after["w"][0] - before["w"][0], expected, rtol=2e-3, atol=1e-5)
    steps = np.array([1.0, *factors])
    assert (np.abs(steps[1:] / steps[:-1] - 1) < 0.1 + 1e-6).all()
    assert steps.max() <= 4
    assert steps.min() >= 0.5
    assert steps.std() > 0


def direction(state, params):
    """LAMB's update of w without ratio and rate."""
    adam = state[0]
    m = adam.mu["w"] / (1 - B1 ** int(adam.count))
    v = adam.nu["w"] / (1 - 0.999 ** int(adam.count))
    return m / (np.sqrt(v) + 1e-6) + DECAY * params["w"]


def test_means_of_gradients_are_clipped_and_momenta_are_not():
    messages = Messages(B1, freeze=1, clip=0.5)
    rule = clip_mean_gradients(ADAM(RATE, 1), messages)
    gradient = jax.tree.map(lambda g: jnp.asarray(g[0]), GRADIENTS[0])
    state: Any = rule.init(PARAMS)
    sent = messages(gradient, state)
    assert not sent.is_momentum
    jax.tree.map(np.testing.assert_array_equal, sent.message, gradient)
    state = rule.update(gradient, state, PARAMS)[1]
    norm = float(optax.tree.norm(gradient))
    np.testing.assert_allclose(state[1][0].mu["w"], (1 - B1) * gradient["w"] * 0.5 / norm, rtol=1e-5)
    sent = messages(gradient, state)
    assert sent.is_momentum
    np.testing.assert_allclose(sent.norm, norm, rtol=1e-6)
    expected = B1 * state[1][0].mu["b"] + (1 - B1) * gradient["b"] * 0.5 / norm
    np.testing.assert_allclose(sent.message["b"], expected, rtol=1e-5)
    after: Any = rule.update(jax.tree.map(lambda m: 100 * m, sent.message), state, PARAMS)[1]
    np.testing.assert_allclose(after[1][0].mu["b"], 100 * sent.message["b"], rtol=1e-6)


@pytest.mark.slow
def test_messages_of_wrapped_states():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    rule = split_weights(quantize_state(one_bit_adam(RATE, 1), "int8"))
    gradient = {"w": jnp.full((64, 64), 0.5)}
    _, state = rule.update(gradient, rule.init(params), params)
    sent = Messages(B1, 1)(gradient, state)
    np.testing.assert_allclose(sent.message["w"], (B1 * 0.1 + 0.1) * 0.5 * np.ones((64, 64)), rtol=1e-2)


def test_a_freeze_step_is_a_share_or_a_number():
    assert Optimizer(name="one_bit_adam").messages(400) == Messages(0.9, 100, 1.0)
    assert Optimizer(name="one_bit_lamb", freeze=30, clip=None).messages(400) == Messages(0.9, 30)
    assert Optimizer().messages(400) is None
    state = Optimizer(name="one_bit_lamb").build(400, leaves_of(PARAMS)).init(PARAMS)
    assert state[1][0].factor["w"].shape == (1, 1)
    with pytest.raises(UserError, match="expected a whole number of updates or a share"):
        Optimizer(name="one_bit_adam", freeze=1.5)
    with pytest.raises(UserError, match="adamw has no such option"):
        Optimizer(freeze=3.0)
    with pytest.raises(UserError, match="because the first update estimates the variance"):
        one_bit_adam(0.1, 0)
