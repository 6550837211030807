"""What the layers keep for the backward pass, against the least that their products need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.layers.mlp import MLP, gate_with_kept_slope, with_kept_slope
from jaxscale.layers.norm import LayerNorm, RMSNorm
from jaxscale.models.decoder import Decoder
from jaxscale.models.decoder_module import Block
from tests.tiers import variants

ROWS, TOKENS, EMBED, HEADS, KV_HEADS, WIDTH, HIDDEN = 2, 32, 48, 3, 1, 16, 160


def kept(module, x, **settings):
    """The arrays with a row for each token that are kept for the backward pass."""
    graphdef, params = nnx.split(module)

    def residuals(params, x):
        return jax.tree.leaves(jax.vjp(lambda params, x: nnx.merge(graphdef, params)(x, **settings), params, x)[1])

    leaves = jax.eval_shape(residuals, params, x)
    return [leaf for leaf in leaves if leaf.ndim > 2 and leaf.shape[:2] != (EMBED, HIDDEN)]


@pytest.mark.parametrize("dtype", variants(["bfloat16", "float32"], default=1))
@pytest.mark.parametrize(
    ("fields", "hidden_count"),
    [
        ({"mlp_kind": "swiglu"}, 3),
        ({"mlp_kind": "geglu_tanh", "post_norms": True, "norm_plus_one": True}, 3),
        ({"mlp_kind": "gelu_tanh", "norm": "layer", "positions": "learned", "attention_bias": True}, 2),
        ({"mlp_kind": "gelu", "norm": "layer_no_bias", "positions": "none"}, 2),
    ],
    ids=["llama", "gemma", "gpt-2", "exact"],
)
def test_a_block_keeps_the_operands_of_its_products_and_the_inputs_of_its_norms(fields, hidden_count, dtype):
    sizes = {"embed": EMBED, "heads": HEADS, "kv_heads": KV_HEADS, "mlp": HIDDEN}
    decoder = Decoder(vocab=64, context=TOKENS, layers=2, **sizes, **fields)
    block = nnx.eval_shape(lambda: Block(decoder, nnx.Rngs(0)))
    x = jnp.ones((ROWS, TOKENS, EMBED), dtype)
    arrays = kept(block, x, context=Context(dtype=dtype))
    norms = 4 if fields.get("post_norms") else 2
    # inputs of norms, normed inputs of attention and mlp, queries, keys, values, heads' outputs, hidden, probabilities
    numbers = (norms + 2) * EMBED + (2 * HEADS + 2 * KV_HEADS) * WIDTH + hidden_count * HIDDEN + HEADS * TOKENS
    per_row = [array for array in arrays if array.shape[0] == ROWS]
    assert (
        sum(array.size * array.dtype.itemsize for array in per_row)
        == ROWS * TOKENS * numbers * jnp.dtype(dtype).itemsize
    )
    assert {array.dtype for array in per_row} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu_squared"])
def test_an_mlp_keeps_two_hidden_arrays(kind):
    arrays = kept(MLP(EMBED, HIDDEN, kind=kind, rngs=nnx.Rngs(0)), jnp.ones((ROWS, TOKENS, EMBED)))
    assert sum(array.shape[-1] == HIDDEN for array in arrays) == 2


def second_gradient(function, x, *others):
    """The gradient of the squared gradient with respect to `x`."""
    gradient = jax.grad(lambda x: jnp.sum(function(x, *others)))
    return jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x)


@pytest.mark.parametrize("function", variants([jax.nn.silu, jax.nn.gelu, jnp.tanh, jax.nn.relu], default=2))
def test_gradients_with_a_kept_slope_are_those_of_the_function(function):
    gate, up, dy = jax.random.normal(jax.random.key(0), (3, 64))
    for kept_function, plain_function, inputs in (
        (with_kept_slope(function), function, (gate,)),
        (gate_with_kept_slope(function), lambda gate, up: function(gate) * up, (gate, up)),
    ):
        y, pull_back = jax.vjp(kept_function, *inputs)
        expected_y, expected_pull_back = jax.vjp(plain_function, *inputs)
        np.testing.assert_array_equal(y, expected_y)
        for gradient, expected in zip(pull_back(dy), expected_pull_back(dy), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
        second, expected_second = (
            jax.jit(second_gradient, static_argnums=0)(f, *inputs) for f in (kept_function, plain_function)
        )
        np.testing.assert_allclose(second, expected_second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [lambda: RMSNorm(8, plus_one=True), lambda: LayerNorm(8), lambda: LayerNorm(8, bias=False)],
    ids=["rms", "layer", "without a bias"],
)
def test_gradients_of_a_norm_are_those_of_its_formula(make):
    from jaxscale.layers import norm as norms

    x, dy = jax.random.normal(jax.random.key(0), (2, 5, 8))
    graphdef, params = nnx.split(make())

    def gradients():
        gradient = jax.grad(lambda params, x: jnp.vdot(nnx.merge(graphdef, params)(x), dy), (0, 1))
        return jax.jit(gradient)(params, x)

    kept_gradients = gradients()
    formula = norms._norm
    norms._norm = norms._normalize
    try:
        expected = gradients()
    finally:
        norms._norm = formula
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), kept_gradients, expected)
