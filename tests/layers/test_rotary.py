import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.layers.rotary import Rotary


def _turn(x, position, frequencies):
    """Rotation by multiplication of complex numbers."""
    half = len(frequencies)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def test_rotation_is_complex_multiplication():
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    positions = jnp.array([[0, 1, 2], [5, 70, 900]])
    frequencies = 10000.0 ** -(np.arange(4) / 4)
    y = Rotary(8).apply(x, positions)
    for index in np.ndindex(2, 3, 2):
        expected = _turn(np.asarray(x[index], np.float64), int(positions[index[:2]]), frequencies)
        np.testing.assert_allclose(y[index], expected, rtol=1e-4, atol=2e-4)


def test_scores_depend_on_the_distance_alone():
    q, k = (jax.random.normal(jax.random.key(seed), (1, 1, 1, 16)) for seed in (0, 1))
    rotary = Rotary(16, base=500.0)

    def score(q_position, k_position):
        return jnp.vdot(rotary.apply(q, jnp.array([[q_position]])), rotary.apply(k, jnp.array([[k_position]])))

    np.testing.assert_allclose(score(3, 1), score(103, 101), rtol=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_scaled_frequencies_stretch_positions():
    x = jax.random.normal(jax.random.key(0), (1, 2, 1, 4))
    stretched = Rotary(4, scaling=lambda frequencies: frequencies / 4).apply(x, jnp.array([[4, 40]]))
    np.testing.assert_allclose(stretched, Rotary(4).apply(x, jnp.array([[1, 10]])), rtol=1e-5, atol=1e-6)


def test_narrow_inputs_are_turned_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 4)).astype(jnp.bfloat16)
    positions = jnp.array([[30001]])
    expected = Rotary(4).apply(x.astype(jnp.float32), positions).astype(jnp.bfloat16)
    np.testing.assert_array_equal(Rotary(4).apply(x, positions), expected)


@pytest.mark.parametrize("fields", [{"head_dim": 7}, {"head_dim": 8, "base": -1.0}])
def test_refused(fields):
    with pytest.raises(UserError, match="expected"):
        Rotary(**fields)
