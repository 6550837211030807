"""Annotations are checked in all tests: of arguments, of dtypes, and of dims that a call must agree on."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxscale.layers.linear import add_bias

X = jnp.ones((2, 3))


def test_what_fits_passes():
    assert add_bias(X, jnp.ones(3)).shape == (2, 3)


@pytest.mark.parametrize("wrong", [3, jnp.ones(2), jnp.ones(3, int)])
def test_what_does_not_is_found(wrong):
    with pytest.raises(TypeCheckError):
        add_bias(X, wrong)
