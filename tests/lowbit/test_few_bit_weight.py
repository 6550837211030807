"""Weights in few bits: codes against the code book, bytes, and a product that keeps codes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import norm

from jaxscale.errors import UserError
from jaxscale.lowbit.codebooks import MAPS, NF4_VALUES
from jaxscale.lowbit.few_bit_weight import FORMATS, FewBitWeight, few_bit_format
from jaxscale.lowbit.quantize import decode, encode

LAYERS, IN, OUT, BLOCK = 2, 128, 24, 32
weights = pytest.fixture(lambda: jax.random.normal(jax.random.key(0), (LAYERS, IN, OUT)) * 0.02)


def test_the_values_of_nf4_are_quantiles_of_the_normal_distribution():
    # QLoRA, section 3: equal shares of each half, with a 0; the outermost at the mean of 1 - 1/32 and 1 - 1/30
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1]), norm.ppf(np.linspace(1 - outermost, 0.5, 8)[:-1])
    quantiles = np.sort([*above, *below, 0.0]) / above.max()
    np.testing.assert_allclose(NF4_VALUES, quantiles, atol=1e-6)
    np.testing.assert_array_equal(MAPS["nf4"].table, np.float32(NF4_VALUES))


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_at_most_half_a_step_of_the_code_book_times_the_largest_of_a_block(name, weights):
    form = FORMATS[name]
    codes, scale = jax.jit(form.encode, static_argnums=1)(weights, BLOCK)
    blocks = np.asarray(weights).reshape(LAYERS, IN // BLOCK, BLOCK, OUT)
    np.testing.assert_array_equal(scale, np.abs(blocks).max(2))
    decoded_blocks = np.asarray(jax.jit(form.decode)(codes, scale)).reshape(blocks.shape)
    table = form.code_map.table
    # half of the step in which the number lies
    above = np.searchsorted(table, blocks / scale[:, :, None]).clip(1, len(table) - 1)
    half_step = (table[above] - table[above - 1]) / 2
    bound = half_step * np.asarray(scale)[:, :, None]
    error = np.abs(decoded_blocks - blocks)
    assert (error <= bound * (1 + 1e-4) + 1e-8).all()
    assert (error > bound / 2).mean() > 0.3, "the bound is tight"


@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_decode_as_those_that_take_an_element_each(name, weights):
    form = FORMATS[name]
    encode_packed, decode_packed = jax.jit(form.encode, static_argnums=1), jax.jit(form.decode)
    codes, scale = encode_packed(weights, BLOCK)
    plainly = jax.jit(lambda weights: decode(encode(weights, form.map, BLOCK)))(weights)
    np.testing.assert_array_equal(decode_packed(codes, scale), plainly)
    again = encode_packed(decode_packed(codes, scale), BLOCK)
    np.testing.assert_array_equal(again[0], codes)
    assert codes.dtype.itemsize == 1
    assert codes.size * (8 if name == "int8" else 16) == weights.size * 8
    # a block lies along a dim of its own, so that a slice of blocks and outputs is the slice of the weight
    some_codes, some_scale = codes[:, 1:3, :, 4:8], scale[:, 1:3, 4:8]
    np.testing.assert_array_equal(
        decode_packed(some_codes, some_scale), decode_packed(codes, scale)[:, BLOCK : 3 * BLOCK, 4:8]
    )


def test_blocks_are_the_largest_divisor_that_fills_whole_bytes():
    nf4, int8 = FORMATS["nf4"], FORMATS["int8"]
    assert [nf4.block_of(rows, 64) for rows in (4096, 96, 100, 16, 8)] == [64, 48, 50, 16, 8]
    assert [int8.block_of(rows, 64) for rows in (99, 63)] == [33, 63]
    assert [nf4.block_of(rows, 64) for rows in (99, 63, 6, 2 * 1009)] == [None] * 4
    with pytest.raises(UserError, match=r"base: unknown format 'nf5': expected one of int4, int8, nf4; did you mean"):
        few_bit_format("nf5", "base")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_its_gradient_are_those_of_the_dequantized_weight(dtype, weights):
    few_bits = FewBitWeight(weights[0], "nf4", BLOCK, ("embed", "mlp"))
    assert (few_bits.shape, few_bits.block, few_bits.dtype) == ((IN, OUT), BLOCK, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (3, 5, IN), dtype)

    def loss(x, multiply):
        return jnp.sum(jnp.sin(multiply(x)).astype(jnp.float32))

    dense = few_bits[...].astype(dtype)
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    ours, expected = (step(x, fn) for fn in (few_bits.multiply, lambda x: x @ dense))
    assert ours[1].dtype == dtype
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5 if dtype == "float32" else 2e-2, atol=1e-5
        )


def test_a_scan_over_layers_keeps_neither_dequantized_weights_nor_constants(weights):
    """What a backward pass over many layers takes is what one over few layers takes, but for the layers' inputs."""

    def temporary_bytes(layer_count):
        nnx.use_eager_sharding(False)
        stack = nnx.eval_shape(lambda: FewBitWeight(jnp.zeros((layer_count, 256, 256)), "nf4", 64, (None,) * 3))
        graphdef, state = nnx.split(stack)

        def loss(x, state):
            def layer(x, weight):
                return jnp.sin(nnx.merge(graphdef, weight).multiply(x)), None

            return jax.lax.scan(layer, x, state)[0].sum()

        lowered = jax.jit(jax.grad(loss)).lower(jnp.zeros((4, 256)), state)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(4), temporary_bytes(36)
    assert many - few <= 32 * (4 * 256 * 4) + 4096, "32 more inputs of layers, and no weight of 32,768 bytes or more"
