"""Convolutions by minimal filtering, against XLA's own and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.compiler.collectives import collectives
from jaxscale.layers import conv
from jaxscale.layers.conv import convolve
from jaxscale.layers.cpu_convolutions import winograd
from jaxscale.programs.flop import count_flop
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from tests.tiers import variants

SAME = ((1, 1), (1, 1))
CASES = {  # images, height, width, channels in and out, padding
    "even": (6, 8, 4, 3, 5, SAME),
    "odd": (5, 7, 5, 4, 2, SAME),
    "no padding": (4, 5, 8, 2, 3, ((0, 0), (0, 0))),
    "unequal padding": (2, 5, 6, 3, 4, ((0, 2), (2, 1))),
    "negative padding": (2, 6, 7, 2, 2, ((-1, 2), (1, -1))),
    "one pixel": (3, 1, 1, 2, 2, SAME),
}


def by_sums(x, w, pads):
    return jax.lax.conv_general_dilated(x, w, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def by_tiles(x, w, dy, pads):
    """Return the convolution and both of its gradients."""
    return (
        winograd.convolve(x, w, pads),
        winograd.input_gradient(dy, w, x.shape[1:3], pads),
        winograd.kernel_gradient(x, dy, pads),
    )


def small_integers(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in shapes]


def arrays(images, height, width, channels_in, channels_out, pads):
    """Return (x, w, dy), whose products and sums are exact in float32."""
    output = (height + sum(pads[0]) - 2, width + sum(pads[1]) - 2)
    return small_integers(
        (images, height, width, channels_in), (3, 3, channels_in, channels_out), (images, *output, channels_out)
    )


@pytest.mark.parametrize("name", variants(CASES, default=3))
@pytest.mark.parametrize("tiles_per_chunk", [1, 16, 512])
def test_tiles_give_exactly_the_sums_for_small_integers(name, tiles_per_chunk, monkeypatch):
    monkeypatch.setattr(winograd, "TILES_PER_CHUNK", tiles_per_chunk)
    pads = CASES[name][-1]
    x, w, dy = arrays(*CASES[name])
    y, transpose = jax.vjp(lambda x, w: by_sums(x, w, pads), x, w)
    results = jax.jit(lambda *arrays: by_tiles(*arrays, pads))(x, w, dy)
    for result, expected in zip(results, (y, *transpose(dy)), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_products_have_four_ninths_of_the_flop():
    x, w, dy = arrays(2, 8, 8, 3, 5, SAME)
    flop_by_sums = 2 * dy.size * 9 * 3
    for function in (
        lambda: winograd.convolve(x, w, SAME),
        lambda: winograd.input_gradient(dy, w, (8, 8), SAME),
        lambda: winograd.kernel_gradient(x, dy, SAME),
    ):
        assert 36 * count_flop(function).total == 16 * flop_by_sums


def test_errors_are_within_ten_roundings_of_a_random_sum():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 16, 16, 64)), rng.normal(size=(3, 3, 64, 64)) / 24
    patches = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2))
    expected = np.einsum("bpqcij,ijco->bpqo", patches, w)  # of variance 1
    y = winograd.convolve(jnp.float32(x), jnp.float32(w), SAME)
    root_mean_square = np.sqrt(np.mean((np.float64(y) - expected) ** 2))
    assert root_mean_square < 10 * np.finfo(np.float32).eps


@pytest.mark.parametrize(
    ("axes", "kinds"), [("data:8", {"all-reduce"}), ("data:2,tensor:4", {"all-reduce", "all-gather"})]
)
def test_a_mesh_splits_tiles_and_gathers_no_images_of_others(axes, kinds, monkeypatch):
    monkeypatch.setattr(winograd, "TILES_PER_CHUNK", 4)
    for name in ("FILTERED", "FILTERED_KERNEL"):
        monkeypatch.setattr(conv, name, dataclasses.replace(getattr(conv, name), least_channels=1))
    x, w, dy = arrays(16, 4, 4, 2, 4, SAME)

    def result_and_gradients(x, w, dy):
        y, transpose = jax.vjp(convolve, x, w)
        return y, *transpose(dy)

    expected = result_and_gradients(x, w, dy)
    mesh = MeshSpec.parse(axes).build()
    channels_axis = "tensor" if mesh.shape["tensor"] > 1 else None
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    by_both = NamedSharding(mesh, PartitionSpec("data", None, None, channels_axis))
    kernel = NamedSharding(mesh, PartitionSpec(None, None, None, channels_axis))
    with layout(mesh, AxisRules()):
        program = jax.jit(
            lambda *arrays: result_and_gradients(*arrays),
            in_shardings=(by_batch, kernel, by_both),
            out_shardings=(by_both, by_batch, kernel),
        )
        compiled = program.lower(x, w, dy).compile()
    rows = collectives(str(compiled.as_text()), mesh)
    assert {row.kind for row in rows} == kinds
    assert all("data" not in row.axes for row in rows if row.kind == "all-gather")
    for result, exact in zip(compiled(x, w, dy), expected, strict=True):
        np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize(
    ("size", "channels_in", "channels_out", "stride", "dtype", "product_count"),
    [
        (4, 32, 32, 1, "float32", 8 + 1),  # 4 for y and for dx, and patches for dw
        (4, 128, 128, 1, "float32", 12),
        (65, 128, 128, 1, "float32", 8),  # too large for products of dw
        (129, 128, 128, 1, "float32", 0),
        (4, 31, 128, 1, "float32", 2),  # patches for both gradients
        (4, 128, 128, 2, "float32", 2),
        (4, 128, 128, 1, "bfloat16", 0),
    ],
)
def test_tiles_are_for_many_channels_in_float32(size, channels_in, channels_out, stride, dtype, product_count):
    shapes = ((2, size, size, channels_in), (3, 3, channels_in, channels_out))
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def loss(x, w):
        return convolve(x, w, stride=stride).sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
    assert str(program).count("dot_general[") == product_count
