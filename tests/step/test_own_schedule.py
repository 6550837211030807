"""A schedule that is a function: the same numbers as the named schedule that it equals, under every kind of plan."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.optim.optimizer import Optimizer
from tests.step.residual import Residual, Vectors, random_batch
from tests.step.test_optimizer_groups import make, trained

STEPS = 20
NAMED = Optimizer(
    "adamw", 0.01, 0.001, schedule="cosine", groups={"mlp/down": Optimizer("sgd", 0.2, 0.02, schedule="linear")}
)


def cosine(update):
    return optax.cosine_decay_schedule(0.01, STEPS, alpha=0.1)(update)


def own(optimizer=NAMED):
    """The optimizer with functions of its own that return the same learning rates."""
    group = Optimizer("sgd", schedule=lambda update: optax.linear_schedule(0.2, 0.02, STEPS)(update))
    rest = dataclasses.replace(optimizer, learning_rate=1e-3, final_learning_rate=None, schedule=cosine)
    return dataclasses.replace(rest, groups={"mlp/down": group} if optimizer.groups else {})


WHOLE = dataclasses.replace(NAMED, groups={})


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (NAMED, {"mesh": "1"}),
        pytest.param(NAMED, {"mesh": "fsdp:2", "zero": 3, "microbatches": 2}, marks=pytest.mark.variant),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (NAMED, {"pipeline": "1f1b:2x4"}),
                (WHOLE, {"pipeline": "pipedream:2"}),
                (NAMED, {"pipeline": "2bw:2x4"}),
                (NAMED, {"mesh": "fsdp:2", "zero": 1, "optimizer_state": "streamed"}),
                (NAMED, {"mesh": "1", "optimizer_state": "host"}),
                (NAMED, {"mesh": "replica:2", "reduce": "int8"}),
                (WHOLE, {"mesh": "replica:2", "diloco": "every=2"}),
                (dataclasses.replace(WHOLE, name="one_bit_adam", freeze=2.0), {"mesh": "replica:2"}),
                (dataclasses.replace(WHOLE, name="muon"), {"mesh": "fsdp:2", "zero": 2}),
            ]
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.name,
)
def test_a_function_trains_as_the_named_schedule_that_it_equals(optimizer, plan):
    batch = random_batch(8)
    (losses, metrics), (own_losses, own_metrics) = (
        trained(make(rule, Residual(), Vectors(), **plan), batch=batch)[1:] for rule in (optimizer, own(optimizer))
    )
    np.testing.assert_array_equal(own_losses, losses)
    rates = {name: float(rate) for name, rate in metrics.items() if name.startswith("learning_rate")}
    assert {name: float(own_metrics[name]) for name in rates} == rates
    if plan.get("pipeline") not in ("pipedream:2", "2bw:2x4"):  # whose first update comes after the first step
        assert rates["learning_rate"] == pytest.approx(float(cosine(2)))


def test_the_run_names_the_function_and_no_rate_that_nobody_set():
    text = "\n".join(make(own(), mesh="1").describe())
    assert "adamw, learning rate of the function cosine" in text
    assert "group mlp/down: sgd, learning rate of the function <lambda>" in text
    assert "learning rate 0.001" not in text


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: jnp.ones((1,)), r"returned Array\(\[1\.\].* at step 0"),
        (lambda step: jnp.where(step == 7, jnp.nan, 1e-3), "returned nan at step 7"),
        (lambda step: 1e-3 * (15 - step), "returned -0.004 at step 19"),
        (lambda step: 1e-3 - 2e-3 * (step == 11), "returned -0.001 at step 11"),
        (lambda step: np.array("fast"), "returned array"),
        (lambda step: jnp.complex64(1e-3), "at step 0, expected a number of 0 or more"),
        (lambda step: step < 5, "returned Array"),
        (lambda step: True, "returned True at step 0"),
    ],
    ids=["a shape", "NaN later", "below 0 at the end", "below 0 later", "text", "complex", "a mask", "bool"],
)
def test_what_is_no_learning_rate_is_refused_before_the_step_is_traced(schedule, message):
    with pytest.raises(UserError, match=message):
        make(Optimizer(schedule=schedule), mesh="1")
    with pytest.raises(UserError, match=message):
        make(Optimizer(groups={"mlp/down": Optimizer(schedule=schedule)}), mesh="1")


def test_a_function_may_return_any_number():
    for rate in (1, 1e-3, jnp.float16(1e-3), np.float64(1e-3), jnp.int32(1)):
        Optimizer(schedule=lambda step, rate=rate: rate).try_own(STEPS)
    assert Optimizer(schedule=lambda step: jnp.bfloat16(0.5)).schedule_fn(STEPS)(3).dtype == jnp.float32


def test_a_function_is_not_scaled_for_a_large_batch():
    from jaxscale.optim.large_batch import scaled

    with pytest.raises(UserError, match="schedule: got a function, expected a learning rate to scale"):
        scaled(own(), 4)
