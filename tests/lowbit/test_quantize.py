"""Block-wise arrays in a few bits: codes and scales against bitsandbytes, maps against their tables."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxscale.errors import UserError
from jaxscale.lowbit.codebooks import MAPS, encode_by_table
from jaxscale.lowbit.quantize import (
    LEAST_SCALE,
    Quantized,
    block_of,
    compute_codes,
    compute_scales,
    decode,
    encode,
    zeros,
)
from tests.tiers import variants

GOLDEN = Path(__file__).parent.parent / "golden/quantize/bitsandbytes.safetensors"
SOME = ("soft8", "sqrt8", "dynamic8", "linear4_unsigned", "e4m3")
"""Maps of each kind, for which everything runs by default; that a map gives the nearest number runs for all."""
encoded = jax.jit(encode, static_argnums=(1, 2))
decoded = jax.jit(decode)


def heavy_tailed(shape: tuple[int, ...], signed: bool) -> np.ndarray:
    draw = np.random.default_rng(1)
    x = (draw.normal(size=shape) * np.exp(2 * draw.normal(size=shape))).astype(np.float32)
    return x if signed else np.square(x)


@pytest.mark.parametrize(("name", "map"), [("signed", "dynamic8"), ("unsigned", "dynamic8_unsigned")])
def test_the_dynamic_map_its_codes_and_its_scales_are_those_of_bitsandbytes(name: str, map: str) -> None:
    golden = load_file(GOLDEN)
    np.testing.assert_array_equal(MAPS[map].table, golden[f"{name}/map"])
    x = golden["x"] if name == "signed" else np.square(golden["x"])
    q = encoded(x, map, 256)
    np.testing.assert_array_equal(q.codes, golden[f"{name}/codes"])
    np.testing.assert_array_equal(q.scale, golden[f"{name}/scales"])
    # the decoder is arithmetic: within two roundings of the table
    expected = golden[f"{name}/map"][np.asarray(q.codes)].reshape(-1, 256, x.shape[1])
    expected = (expected * golden[f"{name}/scales"][:, None]).reshape(x.shape)
    np.testing.assert_allclose(decoded(q), expected, rtol=4e-7)


def test_the_four_bit_maps_are_those_of_the_paper() -> None:
    np.testing.assert_array_equal(MAPS["dynamic4"].table, load_file(GOLDEN)["signed4/map"])
    np.testing.assert_array_equal(MAPS["linear4_unsigned"].table, np.arange(1, 17, dtype=np.float32) / 16)
    assert 0 not in MAPS["linear4_unsigned"].table  # Li et al. 2023: with a zero Adam's updates explode
    assert 0 not in MAPS["sqrt8"].table


@pytest.mark.parametrize("name", MAPS)
def test_a_map_encodes_to_the_nearest_of_its_table(name: str) -> None:
    m = MAPS[name]
    y = np.concatenate([np.linspace(-1, 1, 4001), 10.0 ** np.linspace(-7, 0, 2000)]).astype(np.float32)
    y = y if m.is_signed else np.abs(y)
    table, found = m.table, np.asarray(jax.jit(lambda y: m.decode(m.encode(y)))(y))
    unused = {"soft8": 1, "linear4": 1, "linear8": 1, "e4m3": 3, "sqrt_e4m3": 129}
    assert table.size == 2**m.bits - unused.get(name, 0)
    assert np.isclose(found[:, None], table, rtol=2e-6, atol=0).any(1).all(), "a code that the table has not"
    # nearest in the scale that the map companded to, so to the value within half a step of the table there
    root = {"sqrt8": np.sqrt, "sqrt_e4m3": np.sqrt, "soft8": lambda t: 2 * t / (1 + np.abs(t))}.get(name, lambda t: t)
    nearest = np.abs(root(y)[:, None] - root(table)).min(1)
    np.testing.assert_allclose(np.abs(root(y) - root(found)), nearest, atol=4e-7)
    if root(np.float32(0.25)) == np.float32(0.25):
        differ = np.asarray(encode_by_table(jnp.asarray(y), m)) != np.abs(found[:, None] - table).argmin(1)
        assert differ.sum() <= 25, "only where two values are equally near"


@pytest.mark.parametrize("name", variants(MAPS, default=SOME))
def test_the_error_of_a_block_is_a_share_of_its_largest_number_and_zeros_stay(name: str) -> None:
    m = MAPS[name]
    x = heavy_tailed((2, 64, 6), m.is_signed)
    x[:, :, 0] = 0
    q = encoded(x, name, 32)
    assert (q.shape, q.ndim, q.size, q.dtype) == ((2, 64, 6), 3, 768, jnp.float32)
    assert (q.codes.dtype, q.scale.shape, q.scale.dtype) == (m.dtype, (2, 2, 6), jnp.float32)
    largest = np.abs(x).reshape(2, 2, 32, 6).max(2)
    np.testing.assert_array_equal(q.scale, largest)
    np.testing.assert_array_equal(compute_scales(jnp.asarray(x), name, 32, by_rows=True), largest)
    widest = np.diff(m.table).max()
    error = np.abs(np.asarray(decoded(q)) - x).reshape(2, 2, 32, 6)
    assert (error <= widest * (1 + 1e-5) * largest[:, :, None]).all()
    assert not np.asarray(decoded(q))[:, :, 0].any()
    blank = zeros((2, 64, 6), name, 32)
    assert not np.asarray(decoded(blank)).any()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), blank) == jax.tree.map(lambda a: (a.shape, a.dtype), q)


@pytest.mark.parametrize("name", variants(sorted(set(MAPS) - {"dynamic8", "dynamic4"}), default={*SOME} - {"dynamic8"}))
def test_what_was_decoded_encodes_to_the_same(name: str) -> None:
    # the signed dynamic maps have no -1: a block whose largest number is negative shrinks, as in bitsandbytes
    q = encoded(heavy_tailed((512, 8), MAPS[name].is_signed), name, 256)
    again = encoded(decoded(q), name, 256)
    for before, after in zip(jax.tree.leaves(q), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(before, np.float32), np.asarray(after, np.float32))


@pytest.mark.parametrize("name", variants(MAPS, default=SOME))
def test_neither_nan_nor_infinity_nor_what_is_flushed_to_zero_enters_a_scale(name: str) -> None:
    x = np.full((4, 5), 0.5, np.float32)
    x[1] = [np.nan, np.inf, -np.inf, 0.5, 0.5]
    x[:, 3] = 1e-39  # a denormal
    x[:, 4] = 3e38
    q = encoded(x, name, 4)
    np.testing.assert_array_equal(np.asarray(q.scale[0, :3]), [0.5] * 3)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda x: encode(x, name, 4, by_rows=True))(x), q)
    found = np.asarray(decoded(q))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[[0, 2, 3], :3], 0.5, rtol=2e-6)
    assert (np.abs(found[1, :3]) <= 0.5 * MAPS[name].table[0 if not MAPS[name].is_signed else -1]).all()
    assert (np.abs(found[:, 3]) <= LEAST_SCALE).all()
    np.testing.assert_allclose(found[:, 4], 1 / LEAST_SCALE, rtol=2e-6)


@pytest.mark.parametrize("name", variants(["soft8", "linear4_unsigned", "sqrt8", "dynamic8", "dynamic4"], default=2))
def test_stochastic_rounding_gives_the_number_on_average(name: str) -> None:
    m = MAPS[name]
    x = np.linspace(-1 if m.is_signed else float(m.table[0]), 1, 64, dtype=np.float32).reshape(32, 2)
    x = np.maximum(x, m.table[0])  # below the lowest value of a map there is nothing to round to
    draws = 2048

    @jax.jit
    def mean(x: jax.Array, scale: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            return decode(Quantized(compute_codes(x, scale, name, 32, key), scale, name, 32))

        return jnp.mean(jax.vmap(one)(jax.random.split(jax.random.key(0), draws)), 0)

    x[0] = 1
    found = np.asarray(mean(x, compute_scales(jnp.asarray(x), name, 32)))
    above = np.searchsorted(m.table, x).clip(1, m.table.size - 1)
    step = m.table[above] - m.table[above - 1]
    assert (np.abs(found - x) <= 5 * 0.5 * step / np.sqrt(draws) + 1e-6).all()
    nearest = np.asarray(decode(encode(jnp.asarray(x), name, 32)))
    assert (np.abs(nearest - x) > 5 * 0.5 * step / np.sqrt(draws) + 1e-6).any(), "nearest rounding passes too"


def test_blocks_divide_what_a_device_has() -> None:
    assert [block_of(rows, 256) for rows in (4096, 256, 896, 96, 8, 1)] == [256, 256, 224, 96, 8, 1]
    assert block_of(2 * 1009, 256) == 2018  # no divisor worth having: the whole column
    with pytest.raises(UserError, match=r"the 10 rows of shape .* cannot be split evenly into blocks of"):
        encode(jnp.ones((10, 4)), "soft8", 4)
    with pytest.raises(UserError, match=r"shape \(8,\) can't be quantized"):
        zeros((8,), "soft8", 4)
    with pytest.raises(UserError, match=r"unknown map 'soft'.*did you mean 'soft8'"):
        encode(jnp.ones((8, 4)), "soft", 4)
    with pytest.raises(UserError, match="can't round stochastically"):
        encode(jnp.ones((8, 4)), "e4m3", 4, jax.random.key(0))
