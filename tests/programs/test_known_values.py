"""Integers that are known when a program is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.programs.known_values import known_values, selecting_input_indices

TABLE = np.arange(24, dtype=np.int32).reshape(2, 3, 4)

FUNCTIONS = {
    "a column by index": lambda i: jax.lax.dynamic_index_in_dim(jnp.asarray(TABLE), i, 2, keepdims=False)[1],
    "an index beyond the end": lambda i: jax.lax.dynamic_index_in_dim(jnp.asarray(TABLE), i + 9, 2, keepdims=False),
    "an index from the end": lambda i: jnp.asarray(TABLE)[1, i - 3],
    "a call": lambda i: jax.jit(lambda i: jnp.where(i == 2, 7, -i) % 5)(i),
    "arithmetic": lambda i: jnp.clip(jnp.maximum(3 * i - 1, 2), 0, 4) + jnp.minimum(i, 1) + jnp.broadcast_to(i, (2, 2)),
    "truth values": lambda i: jnp.logical_or(i > 1, ~(i <= 5)) & (i != 3),
    "a slice with steps": lambda i: i + jnp.asarray(TABLE)[:, ::2, 1:3].reshape(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("index", [0, 2])
def test_as_jax_computes_it(name, index):
    fn, index = FUNCTIONS[name], jnp.int32(index)
    jaxpr = jax.make_jaxpr(fn)(index)
    values = known_values(jaxpr, [np.asarray(index)], {})
    value, expected = values[jaxpr.jaxpr.outvars[0]], fn(index)
    np.testing.assert_array_equal(value, expected)
    assert value.dtype == expected.dtype


def test_what_depends_on_an_unknown_or_on_numbers_is_unknown():
    jaxpr = jax.make_jaxpr(lambda i, j, x: (i + j, x * i))(1, 2, 0.5)
    assert not set(jaxpr.jaxpr.outvars) & set(known_values(jaxpr, [np.asarray(1), None, None], {}))


def test_selectors_are_found_through_scans_and_calls():
    def fn(x, code, rows):
        def step(x, row):
            return jax.lax.cond(row[0] == code, jnp.sin, lambda x: x, x), row[1] * x

        return jax.jit(lambda: jax.lax.scan(step, x, rows))()

    assert selecting_input_indices(jax.make_jaxpr(fn)(1.0, 2, jnp.ones((3, 2), jnp.int32))) == {1, 2}
