"""A schedule and a rule of the user's own: what is refused, what is a warning, and that a right one passes."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.optim import Optimizer
from jaxscale.optim.own_rule import try_rule, try_schedule, with_update_checks

GRADIENTS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}


def test_a_right_rule_is_the_same_rule():
    rule = optax.adamw(1e-2)
    checked_rule = with_update_checks(rule, None)
    state, own_state = rule.init(GRADIENTS), checked_rule.init(GRADIENTS)
    for _ in range(2):
        updates, state = rule.update(GRADIENTS, state, GRADIENTS)
        own_updates, own_state = checked_rule.update(GRADIENTS, own_state, GRADIENTS)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, (updates, state), (own_updates, own_state)))


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda u, s, p: u, "its update returned a dict, expected the pair"),
        (lambda u, s, p: (u["a"], s), "updates of another structure than gradients"),
        (lambda u, s, p: ({**u, "a": jnp.ones(4)}, s), r"updates of shape \(4,\) at \['a'\], but gradients \(3,\)"),
        (lambda u, s, p: (u, {"n": s}), "a state of another structure"),
        (lambda u, s, p: (u, s * 0.5), "a state of float32 at its top, but the state before int32"),
    ],
)
def test_what_an_update_returns_is_compared_with_what_it_was_given(update, message):
    rule = with_update_checks(optax.GradientTransformation(lambda params: jnp.int32(0), update), len)
    with pytest.raises(UserError, match=message):
        rule.update(GRADIENTS, rule.init(GRADIENTS), GRADIENTS)


def test_a_rule_is_tried_for_its_rate_and_its_sign():
    rate = Optimizer(warmup=2).schedule_fn(4)
    for right in (optax.adamw, optax.sgd, optax.adafactor, optax.lamb, optax.lion):
        try_rule(right, rate)
    try_rule(lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(), rate)
    try_rule(lambda rate: optax.masked(optax.adam(rate), {"a": True, "b": False}), rate)  # needs names: not tried
    with pytest.raises(UserError, match=r"the second update for gradients of 0.5 is nan.* at step 1"):
        try_rule(lambda rate: optax.sgd(lambda step: jnp.where(step == 1, jnp.nan, 0.1)), rate)
    with pytest.warns(UserWarning, match="its updates go up the gradient"):
        try_rule(lambda rate: optax.scale_by_adam(), rate)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: "1e-3", "returned '1e-3' at step 0"),
        (lambda step: None, "returned None at step 0"),
        (lambda step: jnp.ones(2), "returned Array"),
        (lambda step: 1.0 / step, "returned inf at step 0"),
        (lambda step: 0.5 - step, "returned -0.5 at step 1"),
        (lambda step: 1j, "returned 1j at step 0"),
    ],
)
def test_a_schedule_returns_a_rate(schedule, message):
    with pytest.raises(UserError, match=message):
        try_schedule(schedule, 4)
    with pytest.raises(UserError, match=message):
        Optimizer(schedule=schedule).try_own(4)


def test_a_schedule_of_ones_own_is_the_learning_rate_of_every_rule():
    optimizer = Optimizer("sgd", schedule=lambda step: 1e-2 / (1 + step), weight_decay=0.0, clip=None)
    optimizer.try_own(4)
    assert [round(optimizer.learning_rate_at(step, 4), 6) for step in range(3)] == [0.01, 0.005, 0.003333]
    rule = optimizer.rule(4, {})
    state = rule.init({"w": jnp.ones(())})
    for step in range(3):
        updates, state = rule.update({"w": jnp.ones(())}, state, {"w": jnp.ones(())})
        assert updates["w"] == pytest.approx(-1e-2 / (1 + step))
    with pytest.raises(UserError, match=r"optimizer.warmup: got 3 together with a schedule of your own"):
        Optimizer(schedule=lambda step: 1e-2, warmup=3)
    with pytest.raises(UserError, match=r"optimizer.schedule: got a function, but schedule_free takes only constant"):
        Optimizer("schedule_free", schedule=lambda step: 1e-2)
    with pytest.raises(UserError, match=r"expected one that takes 1 argument"):
        Optimizer(schedule=lambda: 1e-2)
    with pytest.raises(
        UserError, match=r"test_own_rule.py:\d+: optimizer.schedule: returned 0 at the steps 0, 1, 2, 3, so"
    ):
        Optimizer(schedule=lambda step: 0.0 * step).try_own(4)


def test_a_rule_that_does_not_use_the_rate_that_is_set_is_a_warning():
    with pytest.warns(
        UserWarning, match=r"test_own_rule.py:\d+: .*, so optimizer.learning_rate has no effect: pass it on"
    ):
        Optimizer(custom=lambda rate: optax.adam(1e-3), learning_rate=0.5).try_own(4)
    Optimizer(custom=lambda rate: optax.adam(1e-3)).try_own(4)
    Optimizer(custom=lambda rate: optax.adam(rate), learning_rate=0.5).try_own(4)
