"""Each recipe against plain numpy; what is rounded and what is not, in a decoder's program; gradients over meshes."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.blocks import Context, wrapping
from jaxscale.lowbit.products import FP4_EVEN, FP4_ODD, INT4, RECIPES, product, radix_4
from jaxscale.models.decoder import Decoder
from tests.tiers import variants

DECODER = Decoder(vocab=32, context=8, layers=3, embed=16, heads=2, mlp=32)


def _nearest(values, x):
    """The values nearest to each x, ties to the greater magnitude."""
    distance = np.abs(np.abs(x)[..., None] - values)
    last = distance.shape[-1] - 1 - np.argmin(distance[..., ::-1], axis=-1)
    return np.where(x < 0, -values[last], values[last])


@pytest.mark.parametrize("top", [64.0, 32.0])
def test_radix_4_is_the_nearest_power_of_four_to_the_bit(top):
    values = np.array([0.0, *(top / 4.0**k for k in reversed(range(7)))])
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-14, 9, 4000)) * rng.choice([-1.0, 1.0], 4000)
    middle = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(np.float32(m), np.float32(side)) for m in middle for side in (0, 1000)]
    x = np.concatenate([x, middle, -middle, values, near]).astype(np.float32)
    found = np.asarray(radix_4(jnp.asarray(x), top))
    np.testing.assert_array_equal(found, _nearest(values, x.astype(np.float64)).astype(np.float32))
    # what carries them is exact
    np.testing.assert_array_equal(found, found.astype(ml_dtypes.float8_e5m2).astype(np.float32))


def _rounded(x, grid, summed):
    """What a grid makes of x, in numpy."""
    dims = {"int8": summed}.get(grid.dtype)  # whole numbers have a scale for each channel
    scale = np.maximum(np.abs(x).max(dims, keepdims=True), 2.0**-100) / np.float32(grid.reach or grid.top)
    if grid.reach:
        scale = np.exp2(np.ceil(np.log2(scale)))
    codes = x / scale
    if grid in (FP4_EVEN, FP4_ODD):
        codes = _nearest(np.array([0.0, *(grid.top / 4.0**k for k in reversed(range(7)))]), codes)
    elif grid.dtype == "int8":
        codes = np.round(codes)
    else:
        codes = np.clip(codes, -grid.top, grid.top).astype(getattr(ml_dtypes, grid.dtype))
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize("name", RECIPES)
def test_three_products_of_a_layer_are_those_of_its_recipe(name):
    recipe, rng = RECIPES[name], np.random.default_rng(1)
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 5, 16), (16, 12), (2, 5, 12)))

    @jax.jit
    def three(x, w, dy):
        y, pull = jax.vjp(lambda x, w: product(x, w, name), x, w)
        return y, *pull(dy)

    y, dx, dw = three(x, w, dy)

    forward = _rounded(x, recipe.operands, (2,)) @ _rounded(w, recipe.operands, (0,))
    np.testing.assert_allclose(y, forward, rtol=1e-4, atol=1e-5)
    onward = _rounded(dy, recipe.onward, (2,)) @ _rounded(w, recipe.operands, (1,)).T
    np.testing.assert_allclose(dx, onward, rtol=1e-4, atol=1e-5)
    x_, dy_ = _rounded(x, recipe.operands, (0, 1)), _rounded(dy, recipe.inward, (0, 1))
    np.testing.assert_allclose(dw, np.einsum("bti,bto->io", x_, dy_), rtol=1e-4, atol=1e-5)
    # and near what they stand for
    bound = {"fp8": 0.08, "int8": 0.02, "int4": 0.5}[name]
    for found, exact in ((y, x @ w), (dx, dy @ w.T), (dw, np.einsum("bti,bto->io", x, dy))):
        assert 0 < np.linalg.norm(found - exact) < bound * np.linalg.norm(exact)


def test_codes_of_four_bits_and_two_phases():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    codes, _ = INT4.encode(x, (1,))
    assert set(np.unique(codes).tolist()) == set(range(-7, 8))
    powers = []
    for grid in (FP4_EVEN, FP4_ODD):
        codes, scale = grid.encode(x, (0, 1))
        assert scale.shape == (1, 1)
        values = np.unique(np.abs(codes.astype(jnp.float32) * scale))
        assert 5 <= len(values) <= 8
        powers.append({int(np.log2(value)) for value in values if value})
    even, odd = powers
    assert not even & odd
    assert {power % 2 for power in even} != {power % 2 for power in odd}
    int4 = RECIPES["int4"]
    assert (int4.onward, int4.inward) == (FP4_EVEN, FP4_ODD)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(name):
    w = np.ones((4, 4), np.float32)

    @jax.jit
    def product_and_gradient(x, w, dy):
        y, pull = jax.vjp(lambda w: product(x, w, name), w)
        return y, pull(dy)[0]

    def result(x, dy):
        y, dw = product_and_gradient(x, w, dy)
        return np.asarray(y, np.float32), np.asarray(dw, np.float32)

    ones = np.ones((2, 4), np.float32)
    for x in (np.zeros((2, 4), np.float32), np.full((2, 4), 2.0**-120, np.float32)):
        assert not result(x, ones)[0].any()
    for bad in (np.nan, np.inf):
        spoiled = ones.copy()
        spoiled[0, 0] = bad
        y, dw = result(ones, spoiled)
        assert np.isfinite(y).all()
        assert not np.isfinite(dw).all()
        assert not np.isfinite(result(spoiled, ones)[0]).all()


def _products(fn, *args):
    """How often each pair of types is multiplied."""
    found = collections.Counter()

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found[tuple(sorted(v.aval.dtype.name for v in eqn.invars))] += times
            inside = times * eqn.params.get("length", 1)
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner, inside)

    walk(jax.make_jaxpr(fn)(*args).jaxpr, 1)
    return found


@functools.cache
def _of_decoder(matmul, remat):
    """The products of a decoder's gradients."""
    graphdef, params = nnx.split(DECODER.build(nnx.Rngs(0)))
    batch = {key: jnp.ones((2, 8), jnp.int32) for key in ("tokens", "targets")}

    def loss(params):
        return DECODER.loss(nnx.merge(graphdef, params), batch, Context(dtype="bfloat16", matmul=matmul)).total

    with wrapping(lambda block, rolled: jax.checkpoint(block) if remat else block):
        return _products(jax.grad(loss), params)


@pytest.mark.parametrize(
    ("name", "remat"), variants([("fp8", False), ("int4", True), ("int8", False), ("int4", False)], default=2)
)
def test_layers_alone_are_rounded_forward_and_backward_in_a_scan_over_layers(name, remat):
    low, expected = _of_decoder(name, remat), collections.Counter(_of_decoder(None, remat))
    # q, k, v, out, gate, up, down; of the result of the last nothing but the next block is made: it does not run again
    for role, count in {"forward": 7 + 6 * remat, "onward": 7, "inward": 7}.items():
        types = sorted(RECIPES[name].dtypes_of(role))
        expected[tuple(types if len(types) == 2 else types * 2)] += count * DECODER.layers
        expected["bfloat16", "bfloat16"] -= count * DECODER.layers
    assert low == expected
    assert low["bfloat16", "bfloat16"] > 0  # attention's scores and the head


def test_gradients_have_the_types_of_what_they_are_of():
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 4))

    @jax.jit
    def gradients(x, w):
        y, pull = jax.vjp(lambda x, w: product(x, w, "int8"), x, w)
        return y, *pull(y)

    y, dx, dw = jax.eval_shape(gradients, x, w)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_scales_and_products_over_a_mesh_are_those_of_one_device():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, ((4, 8), (8, 6), (4, 6)), strict=True))

    @jax.jit
    def all_products(x, w, dy):
        pulls = [jax.vjp(lambda x, w, name=name: product(x, w, name), x, w) for name in RECIPES]
        return [(y, *pull(dy)) for y, pull in pulls]

    placed = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("data", "tensor"))) for a in (x, w, dy)]
    for one, other in zip(*map(jax.tree.leaves, (all_products(x, w, dy), all_products(*placed))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
