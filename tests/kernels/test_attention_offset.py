"""Attention of a part of a sequence: `query_offset` says where its queries start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import attention
from pallas_kernels.attention import tpu_sizes
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from tests.kernels import battery

KERNELS = [pytest.param("tpu", marks=pytest.mark.slow)] + [pytest.param("gpu", marks=pytest.mark.slow)] * (
    battery.GPU_INTERPRETER
)
EVERY = {"window": 150, "logit_soft_cap": 5.0}


def _drawn(T=512, S=512, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = ((1, T, 2, 64), (1, S, 1, 64), (1, S, 1, 64))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _weighted(run, q, k, v, weights):
    """The output, and gradients of its weighted sum."""

    def loss(*x):
        out = run(*x)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="causal", marks=pytest.mark.slow), pytest.param(EVERY | {"segments": 3}, id="all")],
)
@pytest.mark.parametrize("implementation", ["reference", pytest.param("chunked", marks=pytest.mark.slow), *KERNELS])
def test_parts_make_up_the_whole(implementation, settings):
    """Outputs and gradients of queries lie side by side; gradients of keys and values are sums over the parts."""
    plain, count = implementation in ("reference", "chunked"), 4
    T = 64 if plain else 512
    q, k, v = _drawn(T, T, jnp.float32 if plain else jnp.bfloat16)
    settings = dict(settings)
    ids = jnp.arange(T)[None] * settings.pop("segments", 0) // T
    how = {"implementation": implementation, "interpret": not plain, **settings}
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    @jax.jit
    def part(offset, q, ids_of_q, weights):
        run = functools.partial(attention, segment_ids=(ids_of_q, ids), query_offset=offset, **how)
        return _weighted(run, q, k, v, weights)

    whole = jax.jit(lambda: _weighted(functools.partial(attention, segment_ids=ids, **how), q, k, v, weights))()
    each = T // count
    cuts = [slice(i * each, (i + 1) * each) for i in range(count)]
    found = [part(jnp.int32(cut.start), q[:, cut], ids[:, cut], weights[:, cut]) for cut in cuts]
    out, dq, dk, dv = zip(*found, strict=True)
    sums = [sum(one.astype(jnp.float32) for one in parts).astype(k.dtype) for parts in (dk, dv)]
    got = (jnp.concatenate(out, 1), jnp.concatenate(dq, 1), *sums)
    battery.close(got, whole, {"bfloat16": 8e-3, "float32": 1e-5}, "parts")


@pytest.mark.parametrize("implementation", ["reference", pytest.param("chunked", marks=pytest.mark.slow)])
def test_parts_under_shard_map(implementation):
    """Whose index of the axis is the offset; gradients of what every device has are summed where it is known."""
    q, k, v = _drawn(32, 32, jnp.float32)
    run = functools.partial(attention, implementation=implementation, window=9)
    place = jax.P(None, "sequence")
    local = jax.shard_map(
        lambda q, k, v: run(q, k, v, query_offset=jax.lax.axis_index("sequence") * q.shape[1]),
        mesh=jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,)),
        in_specs=(place, jax.P(), jax.P()),
        out_specs=place,
    )
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    got, want = (jax.jit(functools.partial(_weighted, one))(q, k, v, weights) for one in (local, run))
    battery.close(got, want, {"float32": 1e-5}, "parts")


def test_a_whole_number_is_an_offset_too():
    q, k, v = _drawn(8, 32, jnp.float32)

    @jax.jit
    def outputs(traced):
        run = functools.partial(attention, q, k, v, implementation="reference")
        at = [run(query_offset=offset) for offset in (traced, 5, np.int64(5), jnp.int32(5))]
        # past the keys all are seen, or none by a window
        return at, run(query_offset=40), run(causal=False), run(query_offset=40, window=9)

    at, past, full, blind = outputs(jnp.int32(5))
    for one in at[1:]:
        np.testing.assert_array_equal(one, at[0])
    np.testing.assert_allclose(past, full, rtol=1e-5, atol=1e-6)
    assert not np.asarray(blind).any()


def test_an_offset_of_0_changes_no_program():
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _drawn())

    def program(where, name, **settings):
        run = functools.partial(attention, platform=where, implementation=name, **settings)
        return str(jax.make_jaxpr(run)(q, k, v))

    for where in (("tpu v5e", "tpu"), ("gpu h200", "gpu")):
        assert program(*where) == program(*where, query_offset=0)
        assert program(*where, causal=False) == program(*where, causal=False, query_offset=7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (-1, "query_offset=-1, expected an integer"),
        (True, "query_offset=True, expected"),
        (1.0, r"query_offset=1.0, expected .* at least 0"),
        (None, "query_offset=None"),
        ("3", "query_offset='3'"),
        (jnp.float32(3), r"query_offset of shape \(\) and dtype float32"),
        (jnp.arange(2), r"query_offset of shape \(2,\) and dtype int32"),
        (jnp.int32(-4), "at least 0"),
        (2**30, "positions below"),
    ],
    ids=str,
)
def test_bad_offsets_are_refused(given, said):
    for function in (attention, functools.partial(attention.explain, platform="tpu v5e")):
        with pytest.raises(ValueError, match=f"attention: .*{said}"):
            function(*_drawn(), query_offset=given)


def test_cudnn_refuses_an_offset_by_name():
    q, k, v = _drawn()
    run = functools.partial(attention, q, k, v, implementation="cudnn", platform="gpu h200")
    for call in (run, jax.jit(run)):
        with pytest.raises(NotImplementedError, match=r"'cudnn' cannot run: cuDNN does not support query_offset"):
            call(query_offset=128)
    said = attention.explain(q, k, v, query_offset=jax.ShapeDtypeStruct((), jnp.int32), platform="gpu h200")
    assert said.chosen == "gpu"
    assert "query_offset" in said.reasons["cudnn"]


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("tile", [(128, 256), (256, 128)])
def test_the_tpus_grid_has_a_step_for_every_tile_that_is_seen(window, tile):
    """Whatever the offset; and only tiles that are seen are visited."""
    T, S = 512, 1024
    sizes = tpu_sizes.Sizes(1, T, S, 1, 1, 64, *tile, False, Options(window=window), True)
    bq, bk = tile
    for start in (0, 1, 127, 128, 300, 512, 1023, 1400):
        seen = np.arange(T)[:, None] + start >= np.arange(S)
        if window is not None:
            seen &= np.arange(T)[:, None] + start - np.arange(S) < window
        tiles = seen.reshape(T // bq, bq, S // bk, bk).any((1, 3))
        for by_key, one in ((False, tiles), (True, tiles.T)):
            visible = sizes.query_tiles if by_key else sizes.key_tiles
            first, end = visible(np.arange(len(one)), start, np)
            assert np.max(end - first) <= sizes.max_visits(by_key)
            at = np.arange(one.shape[1])
            np.testing.assert_array_equal(one, (first[:, None] <= at) & (at < end[:, None]))


def test_tiles_and_estimates_go_by_the_mean_over_the_parts():
    part = Problem(1, 1024, 8192, 1, 1, 128, "bfloat16", False, Options(), True)
    whole = Problem(1, 8192, 8192, 1, 1, 128, "bfloat16", False, Options())
    assert tpu_sizes.choose_tiles(None, part) == tpu_sizes.choose_tiles(None, whole)
    assert 8 * Options().count_pairs(1024, 8192, any_offset=True) == Options().count_pairs(8192, 8192)
    assert Options(window=90).count_pairs(128, 512, any_offset=True) == Options(window=90).count_pairs(512, 512) // 4
