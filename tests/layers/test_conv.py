"""Against loops over positions, float64 NumPy, Flax's own batch norm, and eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.conv import BatchNorm, Conv, convolve, max_pool
from jaxscale.layers.stack import Chain
from tests.tiers import variants

CASES = [  # size, window, stride, padding
    (6, 3, 1, "SAME"),
    (6, 3, 2, "SAME"),
    (7, 3, 2, "SAME"),
    (7, 3, 2, 1),
    (8, 7, 2, 3),
    (9, 2, 3, "VALID"),
    (8, 4, 4, "VALID"),
    (5, 3, 2, ((0, 2), (1, 0))),
]
KINDS = [(6, 3, 2, "SAME"), (8, 7, 2, 3), (9, 2, 3, "VALID"), (5, 3, 2, ((0, 2), (1, 0)))]
"""Each kind of padding, which runs by default."""


def windows(x, window, stride, padding, fill=0.0):
    """Every window of the padded images: (B, P, Q, window, window, C), by definition."""
    size = x.shape[1]
    if padding == "SAME":
        out = -(-size // stride)
        total = max((out - 1) * stride + window - size, 0)
        pads = ((total // 2, total - total // 2),) * 2
    elif padding == "VALID":
        pads = ((0, 0),) * 2
    else:
        pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding
    x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    p, q = ((n - window) // stride + 1 for n in x.shape[1:3])
    return np.stack(
        [
            np.stack([x[:, i * stride : i * stride + window, j * stride : j * stride + window] for j in range(q)], 1)
            for i in range(p)
        ],
        1,
    )


@pytest.mark.parametrize(("size", "window", "stride", "padding"), variants(CASES, default=KINDS))
def test_convolution_and_both_of_its_gradients_are_the_definitions(size, window, stride, padding):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, size, size, 3)), rng.normal(size=(window, window, 3, 4))
    patches = windows(x, window, stride, padding)
    expected = np.einsum("bpqijc,ijco->bpqo", patches, w)
    x32, w32 = jnp.float32(x), jnp.float32(w)
    dy = rng.normal(size=expected.shape)
    expected_dw = np.einsum("bpqijc,bpqo->ijco", patches, dy)

    @jax.jit
    def result_and_gradients(x, w, dy):
        y, pull_back = jax.vjp(lambda x, w: convolve(x, w, stride=stride, padding=padding), x, w)
        return y, *pull_back(dy)

    y, dx, dw = result_and_gradients(x32, w32, jnp.float32(dy))
    np.testing.assert_allclose(y, expected, atol=1e-4)
    np.testing.assert_allclose(dw, expected_dw, atol=1e-4)
    # bfloat16 activations with a float32 kernel: the gradients keep the types of what they are of
    x16, dy16 = x32.astype(jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16)
    y16, transpose = jax.vjp(lambda x, w: convolve(x, w, stride=stride, padding=padding), x16, w32)
    dx16, dw32 = transpose(dy16)
    assert (y16.dtype, dx16.dtype, dw32.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    rounded = np.einsum(
        "bpqijc,bpqo->ijco", windows(np.float64(x16), window, stride, padding), np.float64(dy16.astype(jnp.float32))
    )
    np.testing.assert_allclose(dw32, rounded, atol=1e-4)  # accumulated, and returned, in float32
    np.testing.assert_allclose(np.float32(dx16), dx, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(("size", "window", "stride", "padding"), variants(CASES, default=KINDS))
def test_max_pool_is_the_largest_of_each_window(size, window, stride, padding):
    x = np.random.default_rng(1).normal(size=(2, size, size, 3)).astype(np.float32) - 5
    expected = windows(x, window, stride, padding, fill=-np.inf).max((3, 4))
    np.testing.assert_array_equal(max_pool(jnp.asarray(x), window=window, stride=stride, padding=padding), expected)
    grad = jax.jit(jax.grad(lambda x: max_pool(x, window=window, stride=stride, padding=padding).sum()))(jnp.asarray(x))
    assert float(grad.sum()) == expected.size


def test_conv_has_a_bias_a_named_kernel_and_he_variance():
    conv = Conv(64, 128, window=3, bias=True, rngs=nnx.Rngs(0))
    conv.bias[...] += 2.0
    x = jnp.ones((1, 4, 4, 64))
    np.testing.assert_allclose(conv(x) - convolve(x, conv.weight[...]), 2.0, atol=1e-5)
    assert conv.weight.get_metadata()["out_sharding"] == (None, None, None, "channels")
    assert conv.bias.get_metadata()["out_sharding"] == ("channels",)
    np.testing.assert_allclose(np.var(conv.weight[...]), 2 / (9 * 128), rtol=0.02)


def training():
    return Context(key=jax.random.key(0))


def test_batch_norm_equals_flax_in_training_and_evaluation():
    ours = BatchNorm(6, momentum=0.8, eps=1e-3)
    flax = nnx.BatchNorm(6, momentum=0.8, epsilon=1e-3, use_fast_variance=False, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for norm, scale in ((ours, ours.weight), (flax, flax.scale)):
        scale[...] = jnp.linspace(0.5, 2, 6)
        norm.bias[...] = jnp.linspace(-1, 1, 6)
    for _ in range(3):
        x = jnp.asarray(rng.normal(3.0, 2.0, size=(4, 5, 5, 6)), jnp.float32)
        np.testing.assert_allclose(ours(x, context=training()), flax(x), atol=1e-5)
    np.testing.assert_allclose(ours.mean[...], flax.mean[...], rtol=1e-5)
    np.testing.assert_allclose(ours.var[...], flax.var[...], rtol=1e-5)
    flax.eval()
    before = np.array(ours.mean[...])
    np.testing.assert_allclose(ours(x), flax(x), atol=1e-5)
    np.testing.assert_array_equal(before, ours.mean[...])


def test_batch_norm_gradient_goes_through_the_statistics():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    norm = BatchNorm(3)
    graphdef, state = nnx.split(norm)

    def f(x):
        return (nnx.merge(graphdef, state, copy=True)(x, context=training()) ** 3).sum()

    def by_hand(x):
        centred = x - x.mean(0, keepdims=True)
        return ((centred / jnp.sqrt((centred**2).mean(0, keepdims=True) + 1e-5)) ** 3).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), jax.jit(jax.grad(by_hand))(x), atol=1e-4)


def test_batch_norm_in_bfloat16_keeps_statistics_in_float32():
    x = (jnp.arange(4096.0).reshape(-1, 1) / 4096 + 100).astype(jnp.bfloat16)
    norm = BatchNorm(1, momentum=0.0)
    assert norm(x, context=training()).dtype == jnp.bfloat16
    np.testing.assert_allclose(norm.mean[...], np.float64(x).mean(), rtol=1e-6)
    np.testing.assert_allclose(norm.var[...], np.float64(x).var(), rtol=1e-3)


def test_statistics_are_of_all_rows_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4, 4, 3)), jnp.float32)
    graphdef, state = nnx.split(BatchNorm(3))

    @jax.jit
    def f(state, x):
        norm = nnx.merge(graphdef, state, copy=True)
        return norm(x, context=training()), nnx.state(norm)

    y, after = f(state, x)
    y8, after8 = f(state, jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data"))))
    np.testing.assert_allclose(y, y8, atol=1e-5)
    np.testing.assert_allclose(after["mean"][...], after8["mean"][...], atol=1e-6)


def test_running_statistics_leave_a_chain():
    class Block(nnx.Module):
        def __init__(self):
            self.norm = BatchNorm(3, momentum=0.0)

        def __call__(self, x, *, context):
            return self.norm(x, context=context) + 1.0

    chain = Chain([Block(), Block()])
    chain(jnp.full((4, 2, 2, 3), 5.0), context=training())
    np.testing.assert_allclose(chain.layers[0].norm.mean[...], 5.0)
    np.testing.assert_allclose(chain.layers[1].norm.mean[...], 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Conv(1, 1, window=0, rngs=nnx.Rngs(0)),
        lambda: Conv(1, 1, padding="FULL", rngs=nnx.Rngs(0))(jnp.ones((1, 3, 3, 1))),
        lambda: BatchNorm(1, momentum=1.0),
    ],
)
def test_what_cannot_be(make):
    with pytest.raises(UserError, match="got"):
        make()
