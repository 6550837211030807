from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.optim.leaves import leaves_of
from jaxscale.optim.optimizer import Name, Optimizer
from jaxscale.optim.rules import RULES

PARAMS = {"w": jnp.ones((4, 4)), "norm": jnp.ones((4,))}
MASK = {"w": True, "norm": False}
LEAVES = leaves_of(PARAMS)
GRADS = jax.tree.map(lambda p: 0.1 * p, PARAMS)


def test_the_schedule_warms_up_to_the_peak_and_ends_at_the_final_rate():
    o = Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=100)
    rates = [o.learning_rate_at(n, 2000) for n in (0, 50, 100, 1050, 2000)]
    expected = [1e-3 / 101, 1e-3 * 51 / 101, 1e-3, (1e-3 + 1e-4) / 2, 1e-4]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_other_schedules(schedule):
    o = Optimizer(learning_rate=1.0, final_learning_rate=0.5, schedule=schedule)
    assert o.learning_rate_at(50, 100) == pytest.approx(0.75 if schedule == "linear" else 1.0)


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        (
            Optimizer(weight_decay=0.1, schedule="constant", clip=None),
            optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1, mask=MASK),
        ),
        (Optimizer(decay="all", schedule="constant", clip=None), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1)),
        (
            Optimizer(name="lion", schedule="constant", clip=None),
            optax.lion(1e-3, 0.9, 0.95, weight_decay=0.1, mask=MASK),
        ),
        (Optimizer(name="sgd", weight_decay=0, schedule="constant", clip=None), optax.sgd(1e-3)),
        (
            Optimizer(name="sgd", weight_decay=0, momentum=0.9, schedule="constant", clip=0.1),
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-3, 0.9)),
        ),
        (Optimizer(custom=optax.adam, schedule="constant", clip=None), optax.adam(1e-3)),
        (
            Optimizer(name="adafactor", schedule="constant", weight_decay=0, clip=None),
            optax.adafactor(1e-3),
        ),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_updates_equal_optax(value, reference):
    ours = value.build(10, LEAVES)
    state, state_ref = ours.init(PARAMS), reference.init(PARAMS)
    for _ in range(2):
        updates, state = ours.update(GRADS, state, PARAMS)
        expected, state_ref = reference.update(GRADS, state_ref, PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


@pytest.mark.parametrize("name", ["adamw", "adopt", "sgd", "lion", "adafactor", "muon"])
def test_weight_decay_takes_its_share_of_the_learning_rate_off_and_no_more(name):
    rate, decay = 1e-2, 0.5
    decayed, plain = (
        Optimizer(
            name=name,
            learning_rate=rate,
            weight_decay=d,
            momentum=0.9 if name == "sgd" else None,
            schedule="constant",
            clip=None,
        )
        for d in (decay, 0.0)
    )
    found = []
    for value in (decayed, plain):
        rule = value.build(10, LEAVES)
        state = rule.init(PARAMS)
        for _ in range(2):  # the second update sees what the first left in moments and momentum
            updates, state = rule.update(GRADS, state, PARAMS)
        found.append(updates)
    np.testing.assert_allclose(found[0]["w"] - found[1]["w"], -rate * decay * PARAMS["w"], rtol=1e-4)
    np.testing.assert_array_equal(found[0]["norm"], found[1]["norm"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"learning_rate": 0.0}, "expected a number above 0"),
        ({"b2": 1.0}, "from 0 up to, not including, 1"),
        ({"warmup": -1}, "expected 0 or more"),
        ({"clip": -1.0}, "expected a number above 0"),
        (
            {"name": "lars", "b1": 0.9},
            "optimizer.b1: got 0.9, but lars has no such option: leave it out, or set one of momentum",
        ),
        ({"momentum": 0.9}, "optimizer.momentum: got 0.9, but adamw has no such option"),
        ({"name": "muno"}, "did you mean 'muon'"),
        ({"name": "schedule_free", "schedule": "cosine"}, "schedule_free takes only constant"),
        ({"name": "muon", "scale": "kellar"}, "did you mean 'keller'"),
        ({"name": "galore", "rank": 0}, "expected a number above 0"),
    ],
)
def test_bad_constants_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        Optimizer(**fields)


def test_every_rule_has_a_row_and_options_that_are_fields():
    assert set(get_args(Name)) == set(RULES)
    table = {line.split("|")[1].strip(): line for line in str(Optimizer.__doc__).splitlines() if "    | " in line}
    for name, rule in RULES.items():
        assert Optimizer(name=name).options() == dict(rule.defaults)
        for option, value in rule.defaults.items():
            told = f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}"
            alike = "those of adamw" in table[name] and RULES["adamw"].defaults.get(option) == value
            assert told in table[name] or alike, (name, option)


def test_options_that_are_set_reach_the_rule():
    assert Optimizer(name="lars", trust=0.01).options() == {"momentum": 0.9, "trust": 0.01, "weight_decay": 1e-4}
    assert Optimizer(name="sgd", momentum=0.0).options()["momentum"] == 0.0


def test_schedule_free_has_a_constant_rate_and_others_fall():
    assert Optimizer(name="schedule_free").learning_rate_at(90, 100) == pytest.approx(1e-3)
    assert Optimizer().learning_rate_at(100, 100) == pytest.approx(1e-4)


def test_a_transformation_in_place_of_its_function_names_the_way_out():
    with pytest.raises(UserError, match=r"optimizer\.custom: got an optax transformation, .* lambda rate: optax\.adam"):
        Optimizer(custom=optax.adam(1e-3))
    with pytest.raises(
        UserError,
        match=r"optimizer\.custom: got a function with the parameters \(\), .* takes 1 argument, such",
    ):
        Optimizer(custom=lambda: optax.adam(1e-3))
    with pytest.raises(UserError, match=r"optimizer\.custom returned a NoneType, expected an optax transformation"):
        Optimizer(custom=print).build(4, {})
