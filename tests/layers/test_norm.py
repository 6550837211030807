import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.layers.norm import LayerNorm, RMSNorm


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm_is_its_formula(plus_one):
    x = 10 * jax.random.normal(jax.random.key(0), (2, 3, 8))
    norm = RMSNorm(8, eps=1e-3, plus_one=plus_one, rngs=nnx.Rngs(0))
    gain = jnp.linspace(-1, 1, 8)
    norm.weight[...] = gain
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-3) * (np.asarray(gain, np.float64) + plus_one)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5, atol=1e-6)
    assert norm.weight.out_sharding == ("norm",)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_is_its_formula(bias):
    x = 5 + jax.random.normal(jax.random.key(0), (2, 3, 8))
    norm = LayerNorm(8, eps=1e-3, bias=bias, rngs=nnx.Rngs(0))
    norm.weight[...] = jnp.linspace(-1, 1, 8)
    if bias:
        norm.bias[...] = jnp.linspace(2, 3, 8)
    x64 = np.asarray(x, np.float64)
    expected = (x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + 1e-3) * np.linspace(-1, 1, 8)
    np.testing.assert_allclose(norm(x), expected + (np.linspace(2, 3, 8) if bias else 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_are_float32_and_the_result_has_the_type_of_x(kind):
    x = jax.random.normal(jax.random.key(0), (4, 4096)).astype(jnp.bfloat16)
    norm = kind(4096, rngs=nnx.Rngs(0))
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), norm(x.astype(jnp.float32)).astype(jnp.bfloat16))
