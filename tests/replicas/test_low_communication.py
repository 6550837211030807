"""DiLoCo as a value and as a transformation: a round is the paper's, H = 1 is data parallel, parts take turns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.replicas import Int8
from jaxscale.replicas.low_communication import Diloco, diloco, fragments_of

N, STEPS = 4, 6
RNG = np.random.default_rng(0)
START = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"w": (16, 24), "b": (5,)}.items()}
AIMS = {name: RNG.normal(size=(N, *p.shape)).astype(np.float32) for name, p in START.items()}
CURVES = np.array([1.0, 0.5, 2.0, 1.5], np.float32)


def gradient(params: Any, number: Any) -> Any:
    """Of a quadratic that is each replica's own."""
    return jax.tree.map(lambda p, aim: CURVES[number] * (p - aim[number]), params, AIMS)


def trained(rule: Any) -> Any:
    """Parameters of every replica after each step."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="r")
    def step(number: Any, params: Any, state: Any) -> Any:
        grads = jax.tree.map(lambda p, aim: jnp.asarray(CURVES)[number] * (p - jnp.asarray(aim)[number]), params, AIMS)
        moves, state = rule.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (N, *p.shape)), START)
    state, found = jax.jit(jax.vmap(rule.init))(params), []
    for _ in range(STEPS):
        params, state = step(jnp.arange(N), params, state)
        found.append(jax.tree.map(np.asarray, params))
    return found


def together(rule: Any) -> Any:
    """The same of one model and the mean gradient."""
    params, state = START, rule.init(START)
    for _ in range(STEPS):
        grads = [gradient(params, number) for number in range(N)]
        moves, state = rule.update(jax.tree.map(lambda *g: sum(g) / N, *grads), state, params)
        params = optax.apply_updates(params, moves)
    return params


def test_meeting_after_every_step_of_plain_sgd_is_data_parallel_training_and_of_adamw_is_not() -> None:
    for rule, alike in ((optax.sgd(0.1), True), (optax.adamw(0.1), False)):
        found = trained(diloco(rule, optax.sgd(1.0), every=1, axis="r"))[-1]
        expected = together(rule)
        for name, p in expected.items():
            away = np.abs(found[name] - np.asarray(p)).max()
            assert (away < 1e-6) if alike else (away > 1e-3), (alike, name, away)


def test_a_round_is_the_papers() -> None:
    inner, every = optax.adamw(0.05), 3
    found = trained(diloco(inner, every=every, axis="r"))
    shared, momentum = START, jax.tree.map(np.zeros_like, START)
    value = Diloco(every)
    states = [inner.init(START) for _ in range(N)]
    update = jax.jit(inner.update)
    for turn in range(STEPS // every):
        own = [shared] * N
        last = (turn + 1) * every - 1
        for step in range(every):
            for i in range(N):
                moves, states[i] = update(gradient(own[i], i), states[i], own[i])
                own[i] = optax.apply_updates(own[i], moves)
                if step < every - 1:
                    np.testing.assert_allclose(found[turn * every + step]["w"][i], own[i]["w"], rtol=1e-5, atol=1e-6)
        way = jax.tree.map(lambda theta, *w: theta - sum(w) / N, shared, *own)
        momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, way)
        shared = jax.tree.map(lambda theta, d, m: theta - 0.7 * (d + 0.9 * m), shared, way, momentum)
        by_value = value.outer_step(shared["w"], momentum["w"], way["w"])[1]
        np.testing.assert_allclose(by_value, 0.9 * momentum["w"] + way["w"], rtol=1e-6)
        for i in range(N):
            np.testing.assert_allclose(found[last]["w"][i], shared["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_ways_back_in_eight_bits_lead_almost_there() -> None:
    rules = [diloco(optax.sgd(0.1), every=2, axis="r", codec=codec, replicas=N) for codec in (None, Int8())]
    whole, coded = (trained(rule)[-1]["w"] for rule in rules)
    away = np.abs(whole - coded).max()
    assert 0 < away < 0.02 * np.abs(whole - START["w"][None]).max()


def test_parts_meet_by_turns_and_are_about_as_large() -> None:
    value = Diloco(every=5, fragments=2)
    assert [value.due(n) for n in range(1, 11)] == [(), (1,), (), (), (0,), (), (1,), (), (), (0,)]
    assert Diloco(every=1).due(1) == (0,)
    sizes = {f"p{i}": size for i, size in enumerate((100, 60, 50, 10, 5, 1))}
    parts = fragments_of(sizes, 2)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    assert [sum(sizes[n] for n in part) for part in parts] == [115, 111]
    with pytest.raises(UserError, match="got 7, expected at most 6, the model's number of tensors"):
        fragments_of(sizes, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every=0", "got 0, expected 1 step or more"),
        ("every=10,lr=0", "such as the paper's 0.7"),
        ("every=10,momentum=1", "less than 1"),
        ("every=2,fragments=3", "expected 1 to 2"),
        ("evry=2", "did you mean 'every'"),
        ("lr=0.5", "expected every=STEPS"),
        ("every=2,every=3", "each option once"),
        ("every=two", "every"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Diloco.parse(text)


def test_text_and_value() -> None:
    value = Diloco.parse("every=20, lr=0.5, momentum=0, fragments=4")
    assert value == Diloco(20, 0.5, 0.0, 4)
    assert Diloco.parse(str(value)) == value
    with pytest.raises(UserError, match="expected replicas=2 or more"):
        diloco(optax.sgd(0.1), codec=Int8())
