"""The curve that is drawn is the schedule that is trained with."""

import numpy as np
import optax
import pytest

from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rate_curve import rate_curve


@pytest.mark.parametrize("steps", [1, 7, 1000])
@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(),
        Optimizer(warmup=3),
        Optimizer(warmup=9, schedule="linear", final_learning_rate=0.0),
        Optimizer(schedule="constant", warmup=20),
        Optimizer("schedule_free", warmup=2),
        Optimizer(custom=lambda rate: optax.sgd(rate), final_learning_rate=2e-3),
    ],
    ids=str,
)
def test_a_curve_has_the_rates_of_the_schedule(optimizer, steps):
    updates, rates = rate_curve(optimizer, steps)
    assert updates[0] == 0
    assert updates[-1] == steps - 1
    assert len(updates) <= 243
    assert (np.diff(updates) > 0).all()
    shown = updates[:: max(1, len(updates) // 12)]
    expected = [optimizer.learning_rate_at(int(update), steps) for update in shown]
    np.testing.assert_allclose(rates[np.isin(updates, shown)], expected, rtol=1e-5, atol=1e-10)


def test_a_function_of_the_users_own_is_not_called():
    def schedule(update):
        raise AssertionError

    assert rate_curve(Optimizer(schedule=schedule), 10) is None
