"""Attention: every implementation is the reference, and the reference is attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import attention
from pallas_kernels.attention import api, chunked, gpu, tpu
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.reference import Options
from tests.kernels import battery


def arrays(case, key):
    keys = jax.random.split(key, 3)
    shapes = ((case.T, case.N), (case.S, case.K), (case.S, case.K))
    made = [
        jax.random.normal(one, (case.B, length, heads, case.H), case.dtype)
        for one, (length, heads) in zip(keys, shapes, strict=True)
    ]
    if not case.segments:
        return tuple(made)

    def ids(length):
        return jnp.minimum(jnp.arange(length) * (case.segments + 1) // length, case.segments)[None].repeat(case.B, 0)

    q_ids = ids(case.T)
    return *made, q_ids, jnp.where(ids(case.S) == case.segments, -1, ids(case.S))


def run(case, implementation, interpret):
    settings = dict(case.options, implementation=implementation, interpret=interpret)
    if implementation == "tpu":
        settings["tiles"] = tpu.Tiles(*(case.tile,) * 6)
    return lambda q, k, v, *ids: attention(q, k, v, segment_ids=ids or None, **settings)


def supports(case, implementation):
    return case.dtype in {"tpu": ("bfloat16", "float32"), "gpu": ("bfloat16", "float16")}[implementation]


WIDER = {"wide": 6e-3, "large_tiles": 6.5e-3}
"""5.6e-3 of dq on both platforms, 6.1e-3 of dk on TPU: scores' gradients are rounded to bfloat16 before products, and
the output before delta, as flash attention does."""
SUBJECT = battery.Subject(CASES, arrays, run, differentiable=(0, 1, 2), supports=supports, wider=WIDER)


@pytest.mark.parametrize(("case", "implementation", "interpret"), battery.parameters(SUBJECT))
def test_battery(case, implementation, interpret, capfd):
    battery.check(SUBJECT, case, implementation, interpret, capfd)


def _drawn(T=256, S=256, N=2, K=1, H=64, B=1, dtype=jnp.bfloat16):
    return arrays(Case("drawn", T, S, N, K, H, B, dtype), jax.random.key(1))


def _value_and_grads(q, k, v, **settings):
    def loss(q, k, v):
        out = attention(q, k, v, **settings)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


def _alike(got, want, tolerance=5e-3):
    battery.close(tuple(got), tuple(want), dict.fromkeys(battery.TOLERANCE, tolerance), "attention")


KERNELS = [pytest.param("tpu", marks=pytest.mark.slow)] + [pytest.param("gpu", marks=pytest.mark.slow)] * (
    battery.GPU_INTERPRETER
)


# The reference against the textbook, and what it does to numbers that are not finite.


def test_the_reference_is_the_textbook():
    q, k, v = _drawn(5, 7, 4, 2, 8, dtype=jnp.float32)
    ids = jnp.array([[0, 0, 1, 1, 2]]), jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    got = attention(q, k, v, window=3, segment_ids=ids, logit_soft_cap=2.0, scale=0.7, implementation="reference")
    q, k, v, *ids = (np.asarray(x) for x in (q, k, v, *ids))
    want = np.zeros(got.shape)
    for t in range(5):
        for n in range(4):
            seen = [u for u in range(7) if 0 <= t - u < 3 and ids[0][0, t] == ids[1][0, u]]
            if seen:
                s = np.array([2 * np.tanh(0.7 * float(q[0, t, n] @ k[0, u, n // 2]) / 2) for u in seen])
                p = np.exp(s - s.max())
                want[0, t, n] = (p / p.sum()) @ np.stack([v[0, u, n // 2] for u in seen])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.asarray(got[0, 4]).any()  # it sees nothing


@pytest.mark.slow
def test_the_references_gradients_are_slopes_and_chunks_are_the_reference():
    settings = {"window": 40, "logit_soft_cap": 2.0, "scale": 0.2}
    q, k, v = _drawn(70, 90, 4, 2, 8, dtype=jnp.float32)
    plain = _value_and_grads(q, k, v, **settings, implementation="reference")
    for which, index in ((0, (0, 30, 1, 2)), (1, (0, 12, 1, 5)), (2, (0, 60, 0, 0))):
        sides = []
        for step in (1e-2, -1e-2):
            moved = [q, k, v]
            moved[which] = moved[which].at[index].add(step)
            out = attention(*moved, **settings, implementation="reference")
            sides.append(float(jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))))
        np.testing.assert_allclose(plain[1 + which][index], (sides[0] - sides[1]) / 2e-2, rtol=2e-2, atol=2e-3)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(chunked, "CHUNK", 16)
        _alike(_value_and_grads(q, k, v, **settings, implementation="chunked"), plain, 1e-5)
        ids = (jnp.arange(70)[None] // 20, jnp.arange(90)[None] // 30)
        more = {"causal": False, "segment_ids": ids}
        whole = _value_and_grads(q, k, v, **more, implementation="reference")
        _alike(_value_and_grads(q, k, v, **more, implementation="chunked"), whole, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "chunked", *KERNELS])
@pytest.mark.parametrize("value", [-np.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.nan, np.inf))])
def test_what_is_not_finite_comes_out_as_nan(implementation, value):
    q, k, v = _drawn(128, 128, 2, 2, 64)
    q = q.at[0, 5, 0, 3].set(value).at[0, 0, 1, 0].set(value)
    got = attention(q, k, v, implementation=implementation, interpret=implementation in ("tpu", "gpu"))
    got = np.asarray(got.astype(jnp.float32))
    hurt = np.isnan(got).all(-1)
    assert hurt[0, 5, 0]
    assert hurt[0, 0, 1]
    assert np.isnan(got).any(-1).sum() == 2


@pytest.mark.parametrize("implementation", ["reference", "chunked", "tpu", *KERNELS[1:]])
def test_scores_that_are_all_infinite_come_out_as_nan(implementation):
    """Causal, the first query sees the first key alone; the exceptions are where a query may see none."""
    q, k, v = _drawn(128, 128, 1, 1, 64)
    k = k.at[0, 0, 0, 0].set(-jnp.inf * jnp.sign(q[0, 0, 0, 0]))
    kernel = implementation in ("tpu", "gpu")
    run = functools.partial(attention, q, k, v, implementation=implementation, interpret=kernel)
    got = np.asarray(run().astype(jnp.float32))[0, :, 0]
    same = np.asarray(jnp.sign(q[0, :, 0, 0]) == jnp.sign(q[0, 0, 0, 0]))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1:][same[1:]]).all()
    assert np.isnan(got[1:][~same[1:]]).all()
    apart = np.asarray(run(segment_ids=jnp.arange(128)[None]).astype(jnp.float32))[0, 0]
    assert (apart == 0).all() if kernel else np.isnan(apart).all()


# Properties, which need no reference.


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "tpu", *(["gpu"] if battery.GPU_INTERPRETER else [])])
def test_properties(implementation):
    settings = {"implementation": implementation, "interpret": implementation != "reference"}
    q, k, v = _drawn(256, 256, 2, 1, 64, 2)
    run = functools.partial(_value_and_grads, **settings)
    value = jax.jit(functools.partial(attention, **settings), static_argnames=("window", "logit_soft_cap"))
    base = run(q, k, v)
    exactly = np.testing.assert_array_equal
    later = [x.at[:, 200:].set(jnp.flip(x[:, 200:])) for x in (k, v)]
    exactly(value(q, *later)[:, :200], base[0][:, :200])  # the future is not seen
    exactly(value(*(x[::-1] for x in (q, k, v))), base[0][::-1])  # rows know nothing of each other
    exactly(value(q, k, v, window=256), base[0])
    _alike([value(q, k, v, logit_soft_cap=1e4)], base[:1])
    np.testing.assert_allclose(value(q, k, jnp.ones_like(v)).astype(jnp.float32), 1, rtol=5e-3)
    out, dq, dk, dv = run(q, *(jnp.repeat(x, 2, 2) for x in (k, v)))
    _alike((out, dq), base[:2])  # grouped heads are repeated ones
    _alike(
        [x.reshape(2, 256, 1, 2, 64).astype(jnp.float32).sum(3) for x in (dk, dv)],
        [x.astype(jnp.float32) for x in base[2:]],
        1e-2,
    )
    ids = jnp.repeat(jnp.array([[1, 2]] * 2), 128, 1)
    apart = [value(*(x[:, part] for x in (q, k, v))) for part in (slice(128), slice(128, 256))]
    _alike([value(q, k, v, segment_ids=ids)], [jnp.concatenate(apart, 1)])
    hidden = run(q, k, v, segment_ids=(ids, ids + 1))  # queries of 1 see nothing, keys of 3 are not seen
    for x, part in zip(hidden, (slice(128), slice(128), slice(128, 256), slice(128, 256)), strict=True):
        assert not np.asarray(x[:, part].astype(jnp.float32)).any()


@pytest.mark.slow
def test_tiles_do_not_change_the_result():
    q, k, v = _drawn(512, 512, 2, 1, 64)
    run = functools.partial(_value_and_grads, q, k, v, window=200, implementation="tpu", interpret=True)
    base = run(tiles=tpu.Tiles(*(128,) * 6))
    for sizes in ((512, 128), (128, 512), (256, 256)):
        _alike(run(tiles=tpu.Tiles(*sizes * 3)), base)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"scale": -0.2}, {"scale": 1e-9, "segments": True}, {"scale": 1e7}], ids=str)
def test_any_scale_on_tpu(settings):
    """Below nothing, so small that what hides a key would not, so large that it would overflow."""
    q, k, v = (x * 1e-4 if settings["scale"] > 1 else x for x in _drawn(256, 256, dtype=jnp.float32))
    ids = jnp.arange(256)[None] // 100 if settings.get("segments") else None
    run = functools.partial(_value_and_grads, q, k, v, segment_ids=ids, scale=settings["scale"])
    _alike(run(implementation="tpu", interpret=True), run(implementation="reference"), 1e-3)


# How it is called.


@pytest.mark.parametrize(("where", "name"), [("tpu v5e", "tpu"), ("gpu h200", "gpu")])
def test_an_estimate_counts_the_pairs_that_are_seen(where, name):
    def estimates(**settings):
        shapes = [jax.ShapeDtypeStruct((2, 384, n, 64), jnp.bfloat16) for n in (4, 2, 2)]

        def loss(*x):
            return attention(*x, **settings, platform=where, implementation=name).astype(jnp.float32).sum()

        found = [
            one.params["cost_estimate"] for one in _kernels(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes).jaxpr)
        ]
        return sorted((one.flops, one.transcendentals) for one in found)

    seen = np.tri(384, dtype=bool) & ~np.tri(384, k=-100, dtype=bool)
    for settings, visible in (({"causal": False}, 384 * 384), ({"window": 100}, int(seen.sum()))):
        pairs = 2 * 4 * visible
        assert estimates(**settings) == [(2 * products * 64 * pairs, pairs) for products in (2, 3, 4)]


def _kernels(jaxpr):
    """Pallas calls of a jaxpr and of what it holds."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pallas_call", "mpmd_map"):
            found.append(eqn)
            continue
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _kernels(inner)
    return found


def test_residuals_are_named_and_kept():
    q, k, v = _drawn(8, 8, 2, 1, 8)
    counts = []
    for keep in (api.NAMES, ()):
        policy = jax.checkpoint_policies.save_only_these_names(*keep)
        body = jax.checkpoint(lambda q: attention(q, k, v).astype(jnp.float32).sum(), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(body))(q))
        counts.append(text.count("reduce_max"))  # only a forward looks for the largest score
    assert 0 < counts[0] < counts[1]


def test_explain_says_what_runs_where():
    q, k, v = _drawn(64, 64)
    chosen = {
        "tpu v5e": {"logit_soft_cap": 5.0},
        "gpu h200": {"window": 5},
        "cpu": {},
    }
    names = {where: attention.explain(q, k, v, platform=where, **settings).chosen for where, settings in chosen.items()}
    assert names == {"tpu v5e": "tpu", "gpu h200": "gpu", "cpu": "reference"}
    long = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    said = attention.explain(long, long, long, platform="gpu h200")
    assert said.chosen == "chunked"
    assert "needs bfloat16 or float16, not float32" in said.reasons["gpu"]
    said = attention.explain(q, k, v, segment_ids=jnp.zeros((1, 64), int), platform="gpu h200")
    assert "cuDNN does not support segment ids" in said.reasons["cudnn"]


def test_one_function_lowers_to_the_kernels_of_each_platform():
    q, k, v = _drawn(256, 256)

    def loss(q, k, v):
        return attention(q, k, v).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3
    assert "custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def _mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_under_shard_map(implementation, check_vma):
    """Keys alike on the axis of heads, queries not; gradients are summed where they must be."""
    q, k, v = _drawn(32, 32, 4, 1, 8, 2, jnp.float32)
    ids = jnp.repeat(jnp.arange(4), 8)[None].repeat(2, 0)
    run = functools.partial(attention, implementation=implementation)
    heads, rows = jax.P("data", None, "model"), jax.P("data")
    local = jax.shard_map(
        lambda q, k, v, ids: run(q, k, v, segment_ids=ids),
        mesh=_mesh(data=2, model=2),
        in_specs=(heads, rows, rows, rows),
        out_specs=heads,
        check_vma=check_vma,
    )

    def weigh(f):
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))

    whole = weigh(lambda q, k, v: run(q, k, v, segment_ids=ids))(q, k, v)
    _alike(weigh(lambda q, k, v: local(q, k, v, ids))(q, k, v), whole, 1e-5)


@pytest.mark.slow
def test_kernels_under_vmap_scan_and_donation():
    q, k, v = (jnp.stack([x, x[::-1]]) for x in _drawn(128, 128, 2, 1, 64, 2))
    run = functools.partial(attention, implementation="tpu", interpret=True)
    one_by_one = jnp.stack([run(*x) for x in zip(q, k, v, strict=True)])
    np.testing.assert_array_equal(jax.vmap(run)(q, k, v), one_by_one)
    _, scanned = jax.lax.scan(lambda _, x: (None, run(*x)), None, (q, k, v))
    np.testing.assert_array_equal(scanned, one_by_one)
    donated = jax.jit(run, donate_argnums=0)(q[0].copy(), k[0], v[0])
    np.testing.assert_array_equal(donated, one_by_one[0])


def test_second_derivatives_of_kernels_are_refused():
    q, k, v = _drawn(128, 128)

    def loss(q):
        return attention(q, k, v, implementation="tpu", platform="tpu v5e").astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=r"second derivatives.*implementation='reference'"):
        jax.jit(jax.grad(lambda q: jax.grad(loss)(q).astype(jnp.float32).sum())).trace(q)


# Bad input.

ids = jnp.zeros((1, 256), jnp.int32)
BAD = {
    "rank": ((lambda q, k, v: (q[0], k, v)), {}, r"got q \(256, 2, 64\).*expected q \(B,T,N,H\)"),
    "rows": ((lambda q, k, v: (q, k[:, :, :, :32], v[:, :, :, :32])), {}, "expected"),
    "k and v": ((lambda q, k, v: (q, k, v[:, :128])), {}, "expected"),
    "no queries": ((lambda q, k, v: (q[:, :0], k, v)), {}, "no empty dim"),
    "no keys": ((lambda q, k, v: (q, k[:, :0], v[:, :0])), {}, "no empty dim"),
    "heads": (
        (lambda q, k, v: (jnp.concatenate([q, q[:, :, :1]], 2), jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))),
        {},
        "3 query heads and 2 key",
    ),
    "mixed": ((lambda q, k, v: (q.astype(jnp.float32), k, v)), {}, "float32, bfloat16 and bfloat16, expected one"),
    "integers": ((lambda *x: tuple(one.astype(jnp.int32) for one in x)), {}, "expected one floating dtype"),
    "one side's ids": (None, {"segment_ids": (ids, None)}, "queries or of keys alone"),
    "ids' shape": (None, {"segment_ids": ids[:, :128]}, r"expected \(1, 256\) for queries"),
    "ids' type": (None, {"segment_ids": ids.astype(jnp.float32)}, "float32, expected integers"),
    "window 0": (None, {"window": 0}, "window=0, expected at least 1"),
    "window alone": (None, {"window": 3, "causal": False}, "window=3 and causal=False"),
    "cap": (None, {"logit_soft_cap": 0.0}, "logit_soft_cap=0.0, expected a positive"),
    "scale 0": (None, {"scale": 0.0}, "scale=0.0, expected a finite"),
    "scale NaN": (None, {"scale": float("nan")}, "scale=nan, expected a finite"),
    "name": (None, {"implementation": "tup"}, "unknown implementation 'tup'.*did you mean 'tpu'"),
    "platform": (None, {"platform": "rocm"}, "platform 'rocm': expected"),
    "tiles": (None, {"tiles": tpu.Tiles()}, "tiles belong to a named kernel"),
    "tiles of another": (
        None,
        {"tiles": gpu.Tiles(), "implementation": "tpu", "platform": "tpu"},
        "expected .*tpu.Tiles",
    ),
    "interpret": (None, {"interpret": True}, "interpret needs a named implementation"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_tracing(name):
    change, settings, said = BAD[name]
    given = _drawn()
    with pytest.raises(ValueError, match=said):
        attention(*(change(*given) if change else given), **settings)


def test_a_named_kernel_that_cannot_run_says_why():
    q, k, v = _drawn()
    wide = jnp.concatenate([q] * 9, -1), jnp.concatenate([k] * 9, -1), jnp.concatenate([v] * 9, -1)
    for given, settings, said in (
        ((q, k, v), {"implementation": "tpu"}, "it is for TPUs, and the target is cpu"),
        ((q, k, v), {"implementation": "gpu", "platform": "gpu a100"}, "9.0 .H100, H200., and the target is a100"),
        (wide, {"implementation": "tpu", "platform": "tpu v5e"}, "heads at most 256 wide, not 576"),
        (wide, {"implementation": "gpu", "platform": "gpu h200"}, "heads at most 256 wide, not 576"),
        (
            (q, k, v),
            {"implementation": "cudnn", "platform": "gpu a100", "logit_soft_cap": 5.0},
            "not support a soft cap",
        ),
    ):
        settings = {"platform": "cpu", **settings}
        with pytest.raises(NotImplementedError, match=rf"attention: implementation.*{said}.*implementation=None"):
            attention(*given, **settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tpu.Tiles(q=100), "tile q=100, expected a multiple of 128"),
        (lambda: gpu.Tiles(kv=96), "tile kv=96, expected 64 or 128"),
        (lambda: gpu.Tiles(stages=0), "stages=0"),
    ],
)
def test_tiles_check_themselves(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_models_get_long_tiles_where_they_pay():
    """Nobody asks for them; a grid of a kernel shows how many tiles there are, and steps along keys."""

    def grids(T, H=128, dtype=jnp.bfloat16, segments=None, **settings):
        q = jax.ShapeDtypeStruct((1, T, 1, H), dtype)
        ids = None if segments is None else jnp.zeros((1, T), jnp.int32)

        def loss(*x):
            return attention(*x, segment_ids=ids, platform="tpu v5e", implementation="tpu", **settings)

        grad = jax.grad(lambda *x: loss(*x).astype(jnp.float32).sum(), (0, 1, 2))
        found = _kernels(jax.make_jaxpr(grad)(q, q, q).jaxpr)
        return [tuple(one.params["grid_mapping"].grid)[2:] for one in found]

    assert grids(4096) == [(4, 4), (4, 4), (4, 1, 4)]
    assert grids(4096, causal=False) == [(4, 2), (4, 4), (4, 1, 4)]
    assert grids(4096, window=1024) == [(8, 3), (8, 3), (8, 1, 3)]  # longer ones would see more that is hidden
    assert grids(1024) == [(2, 2), (2, 2), (2, 1, 2)]
    assert grids(4096, logit_soft_cap=30.0) == [(4, 4), (8, 8), (8, 1, 8)]
    assert grids(4096, segments=True) == [(4, 4), (8, 8), (8, 1, 8)]
    assert grids(4096, H=256) == [(8, 8), (8, 8), (8, 1, 8)]
    assert grids(1500, dtype=jnp.float32) == [(3, 3), (3, 3), (3, 1, 3)]  # filled up to 1536


@pytest.mark.parametrize("options", [Options(), Options(False), Options(window=300)], ids=str)
def test_chosen_tiles_divide_every_length(options):
    for T, S in ((128, 4096), (384, 640), (1152, 2176), (8192, 8192), (2048, 128), (128, 2048)):
        for dtype, H in (("bfloat16", 128), ("bfloat16", 256), ("float32", 128), ("float32", 256)):
            for segments in (False, True):
                problem = Problem(1, T, S, 1, 1, H, dtype, segments, options)
                found = tpu.choose_tiles(None, problem)
                tpu.check_tiles(found, problem)
                sizes = dataclasses.asdict(found)
                small = dtype == "float32" or H == 256
                keys = 2048 if not (segments or options.causal) else 1024
                most = {"q": 512, "kv": 512} if small else {"q": 1024, "kv": keys}
                back = 512 if small or segments else 1024
                for name, size in sizes.items():
                    assert size <= min(T if name.startswith("q") else S, most.get(name, back)), (problem, name)


def test_tiles_that_do_not_fit_are_refused():
    q, k, v = _drawn(384, 384)
    with pytest.raises(ValueError, match=r"expected divisors of T=384 and S=384"):
        attention(q, k, v, implementation="tpu", platform="tpu v5e", tiles=tpu.Tiles(q=256))
    q, k, v = _drawn(256, 256, H=256)
    with pytest.raises(ValueError, match="bytes of shared memory for heads of 256, and a block has 232448"):
        attention(q, k, v, implementation="gpu", platform="gpu h200", tiles=gpu.Tiles())


def test_lengths_are_filled_up_to_where_larger_tiles_cost_less():
    """On TPU; what is a multiple of 128 stays as long as it is."""

    def length(T, module, causal=True):
        return api.padded_problem(Problem(1, T, T, 2, 1, 64, "bfloat16", False, Options(causal=causal)), module)

    found = {T: length(T, tpu) for T in (4100, 8300, 4224, 1100, 4096, 200, 640)}
    assert {T: (one.T, one.S) for T, one in found.items()} == {
        4100: (4608, 4608), 8300: (8704, 8704), 4224: (4224, 4224), 1100: (1280, 1280),
        4096: (4096, 4096), 200: (256, 256), 640: (640, 640),
    }  # fmt: skip
    assert not any(one.has_segments for one in found.values())
    assert length(4100, tpu, causal=False).has_segments
    assert tpu.choose_tiles(None, found[4100]).q == 512
    assert length(4100, gpu).T == 4224
