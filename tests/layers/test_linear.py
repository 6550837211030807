import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.layers.linear import Linear, matmul


def _draw(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_mixed_product_computes_in_the_type_of_x_and_keeps_the_gradient_of_w_unrounded(transposed):
    x, w = _draw(2, 5, 3, dtype=jnp.bfloat16), _draw(4, 3, seed=1) if transposed else _draw(3, 4, seed=1)
    dy = _draw(2, 5, 4, dtype=jnp.bfloat16, seed=2)
    y, pull = jax.vjp(lambda x, w: matmul(x, w, transposed=transposed), x, w)
    dx, dw = pull(dy)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert dw.dtype == jnp.float32
    wide = np.asarray(w.astype(jnp.bfloat16), np.float64)
    wide = wide.T if transposed else wide
    x64, dy64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), x64 @ wide, rtol=1e-2, atol=2e-2)
    np.testing.assert_allclose(np.asarray(dx, np.float64), dy64 @ wide.T, rtol=1e-2, atol=2e-2)
    expected = np.einsum("bti,bto->io", x64, dy64)
    # far below bfloat16's 4e-3: products of bfloat16 are exact in float32, so only float32 sums round
    np.testing.assert_allclose(dw, expected.T if transposed else expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (64, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_of_the_weight_transposes_the_narrower_activation_alone(inputs, outputs, transposed):
    x = _draw(4, 16, inputs)
    w = _draw(outputs, inputs, seed=1) if transposed else _draw(inputs, outputs, seed=1)

    def gradient(product):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(product(x, w))))

    ours = gradient(lambda x, w: matmul(x, w, transposed=transposed))
    plain = gradient(lambda x, w: x @ (w.T if transposed else w))
    np.testing.assert_allclose(ours(w), plain(w), rtol=1e-5, atol=1e-5)
    products = [eqn for eqn in jax.make_jaxpr(ours)(w).eqns if eqn.primitive.name == "dot_general"]
    assert products[-1].invars[0].aval.shape[-1] == 32
    compiled = [jax.jit(f).lower(w).compile().cost_analysis()["flops"] for f in (ours, plain)]
    assert compiled[0] <= compiled[1]


def test_the_narrow_gradient_is_multiplied_first_and_then_transposed():
    """XLA:CPU would fold the transposition into the product, whose operands its library then cannot multiply."""
    x, w, dy = _draw(48, 64), _draw(64, 32, seed=1), _draw(48, 32, seed=2)
    compiled = jax.jit(lambda x, w, dy: jax.vjp(lambda w: matmul(x, w), w)[1](dy)[0]).lower(x, w, dy).compile()
    assert re.findall(r"= (f32\[[0-9,]*\])\S* dot\(", compiled.as_text()) == ["f32[32,64]"]
    np.testing.assert_allclose(compiled(x, w, dy), x.T @ dy, rtol=1e-5, atol=1e-5)


def test_float32_result_of_narrow_operands_is_the_accumulator():
    x, w = _draw(2, 64, dtype=jnp.bfloat16), _draw(64, 8, dtype=jnp.bfloat16, seed=1)
    y = matmul(x, w, result=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-5)
    assert jax.grad(lambda w: matmul(x, w, result=jnp.float32).sum())(w).dtype == jnp.bfloat16


def test_linear_axes_bias_and_its_gradient():
    module = Linear(3, 4, axes=("embed", "heads"), bias=True, rngs=nnx.Rngs(0))
    assert module.weight.out_sharding == ("embed", "heads")
    assert module.bias.out_sharding == ("heads",)
    module.bias[...] = jnp.arange(4.0)
    x = _draw(1000, 3, dtype=jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(module(x), np.float64),
        np.asarray(x, np.float64) @ np.asarray(module.weight[...], np.float64) + np.arange(4.0),
        rtol=2e-2,
        atol=5e-2,
    )
    gradient = jax.grad(lambda m: m(x).astype(jnp.float32).sum())(module)
    # bfloat16 cannot count to 1000 by ones
    np.testing.assert_array_equal(gradient.bias[...], np.full(4, 1000.0))
    assert Linear(3, 4, rngs=nnx.Rngs(0)).bias is None
