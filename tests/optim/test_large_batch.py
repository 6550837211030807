import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.optim.large_batch import Phase, lamb, lars, ramp_up, scaled
from jaxscale.optim.optimizer import Optimizer

PARAMS = {"w": jnp.array([[3.0, 4.0], [0.0, 0.0]]), "bias": jnp.array([2.0, 0.0])}
GRADIENTS = {"w": jnp.array([[0.0, 1.0], [1.0, 0.0]]), "bias": jnp.array([0.5, 0.5])}
MASK = {"w": True, "bias": False}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lars(0.5, momentum=0.9, trust=0.1, weight_decay=0.01, mask=MASK),
            optax.lars(0.5, 0.01, MASK, trust_coefficient=0.1, trust_ratio_mask=MASK, momentum=0.9),
        ),
        (lamb(0.5, weight_decay=0.01, mask=MASK), optax.lamb(0.5, weight_decay=0.01, mask=MASK)),
    ],
    ids=["lars", "lamb"],
)
def test_matrices_that_are_not_stacked_move_as_optax_moves_them(ours, theirs):

    @jax.jit
    def run():
        found = []
        for rule in (ours, theirs):
            state = rule.init(PARAMS)
            for _ in range(2):
                updates, state = rule.update(GRADIENTS, state, PARAMS)
            found.append(updates["w"])
        return found

    np.testing.assert_allclose(*run(), rtol=1e-6)


def test_gains_and_biases_are_not_scaled_by_norms():
    rule = lars(0.5, trust=0.1, weight_decay=0.0)
    found, _ = rule.update(GRADIENTS, rule.init(PARAMS), PARAMS)
    np.testing.assert_allclose(found["bias"], -0.05 * GRADIENTS["bias"], rtol=1e-6)
    found, _ = (rule := lamb(0.5)).update(GRADIENTS, rule.init(PARAMS), PARAMS)
    adam = optax.adamw(0.5, 0.9, 0.999, 1e-6, weight_decay=0.01)
    expected, _ = adam.update(GRADIENTS, adam.init(PARAMS), PARAMS)
    np.testing.assert_allclose(found["bias"], expected["bias"], rtol=1e-6)
    assert float(jnp.linalg.norm(found["w"])) == pytest.approx(0.5 * 5)


def test_a_rate_goes_with_the_batch():
    tuned = Optimizer(learning_rate=0.1, final_learning_rate=0.01, warmup=3)
    assert scaled(tuned, 4).learning_rate == pytest.approx(0.4)
    root = scaled(tuned, 4, "sqrt", warmup=9)
    assert (root.learning_rate, root.final_learning_rate, root.warmup) == pytest.approx((0.2, 0.02, 9))
    assert scaled(scaled(tuned, 8), 1 / 8) == tuned


def test_a_growing_batch_takes_every_row_once():
    phases = ramp_up(100_000, 32, 1024, over=30_000)
    assert [phase.batch for phase in phases] == [32, 64, 128, 256, 512, 1024]
    rows = [phase.steps * phase.batch for phase in phases]
    assert sum(rows) == pytest.approx(100_000, abs=1024)
    assert all(6_000 - phase.batch < count <= 6_000 for phase, count in zip(phases[:-1], rows, strict=False))
    assert ramp_up(1000, 10, 10, over=0) == (Phase(100, 10),)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scaled(Optimizer(), 2, "squre"), "unknown scaling rule 'squre': expected one of linear, sqrt"),
        (
            lambda: scaled(Optimizer(), 0),
            "ratio: got 0, expected a number above 0: the new batch size divided by the old",
        ),
        (lambda: ramp_up(100, 8, 24, over=10), "expected end to be start times a power of 2"),
        (
            lambda: ramp_up(100, 8, 16, over=100),
            "got over=100 of 100 rows, expected 0 or more, and fewer than all rows",
        ),
        (
            lambda: ramp_up(100, 0, 16, over=10),
            "got rows=100, start=0 and factor=2, expected rows and start of at least 1",
        ),
    ],
)
def test_mistakes(call, says):
    with pytest.raises(UserError, match=says):
        call()


def test_the_norm_is_of_each_layer():
    """Two alike layers, one of them ten times as large: alike updates, in proportion."""
    from jaxscale.optim.leaves import leaf_of

    one = jax.random.normal(jax.random.key(0), (1, 4, 4))
    params = {"w": jnp.concatenate([one, 10 * one])}
    gradients = {"w": jnp.concatenate([one, one])}
    leaves = {"w": leaf_of("w", ("layers", "embed", "mlp"), (2, 4, 4))}
    for rule in (lars(1.0, weight_decay=0.0, leaves=leaves), lamb(1.0, weight_decay=0.0, leaves=leaves)):
        updates, _ = rule.update(gradients, rule.init(params), params)
        np.testing.assert_allclose(updates["w"][1], 10 * updates["w"][0], rtol=1e-5)
