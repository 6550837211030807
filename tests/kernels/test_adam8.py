"""8-bit AdamW: the battery, the definition against the optimizer's own, its properties, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.lowbit import codebooks as optimizer_maps
from jaxscale.lowbit.quantize import Quantized, decode
from jaxscale.lowbit.quantized import quantize_state
from pallas_kernels import dispatch
from pallas_kernels.adam8 import decades, reference
from pallas_kernels.adam8.api import Settings, adam8, explain, has_kernel, hyper
from pallas_kernels.adam8.cases import CASES, Case
from pallas_kernels.adam8.maps import MAPS
from pallas_kernels.adam8.tpu import Tiles, candidates
from tests.kernels.battery import TOLERANCE, Subject, check, close, parameters

NAMES = {"soft8": ("soft8", "sqrt8"), "dynamic8": ("dynamic8", "dynamic8_unsigned")}
"""Maps of the optimizer, of m and of v."""


def settings_of(case):
    return Settings(case.block, weight_decay=case.weight_decay, map=case.map)


def arrays(case, key):
    """Weights, gradients of which some are not finite, states of which one column is zero, the third update."""
    shape = (case.layers, case.rows, case.cols)
    scales = (case.layers, case.rows // case.block, case.cols)
    k = iter(jax.random.split(key, 6))
    g = jax.random.normal(next(k), shape).at[0, 3, 5].set(jnp.nan).at[0, 7, 2].set(-jnp.inf).at[0, :, 9].set(1e-40)
    low, high = (-127, 128) if case.map == "soft8" else (0, 255)
    m = jax.random.randint(next(k), shape, low, high).astype(MAPS[case.map].m_dtype)
    v = jax.random.randint(next(k), shape, 0, 256).astype(jnp.uint8)
    m_scale, v_scale = (
        (jax.random.uniform(next(k), scales) * size).at[0, 0, 9].set(0).at[0, 0, 11].set(0) for size in (1e-2, 1e-4)
    )
    p = jax.random.normal(next(k), shape)
    return (
        p,
        (g * 1e-2).astype(case.gradient),
        (m, m_scale),
        (v, v_scale),
        hyper(1e-3, 3, settings_of(case), factor=0.5),
    )


def run(case, implementation, interpret):
    return functools.partial(adam8, settings=settings_of(case), implementation=implementation, interpret=interpret)


def compare(case, got, want):
    """Weights and scales are close; of the codes at most one in a hundred is the next one, where two are as near."""
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    close((got[0], got[1][1], got[2][1]), (want[0], want[1][1], want[2][1]), TOLERANCE, "weights and scales")
    for a, b in ((got[1][0], want[1][0]), (got[2][0], want[2][0])):
        off = np.abs(np.asarray(a, int) - np.asarray(b, int))
        assert a.dtype == b.dtype
        assert off.max() <= 1
        assert (off > 0).mean() <= 0.01


def supports(case, implementation):
    return implementation == "tpu" or case.cols % 32 == 0


SUBJECT = Subject(CASES, arrays, run, supports=supports, compare=compare)


@pytest.mark.parametrize(
    ("case", "implementation", "interpret"),
    # JAX's interpreter of TPUs loses the shape of a result that takes an argument's place where tiles reach past it
    [one for one in parameters(SUBJECT) if one.values[1:] != ("tpu", "races") or one.values[0].cols % 128 == 0],
)
def test_battery(case, implementation, interpret, capfd):
    check(SUBJECT, case, implementation, interpret, capfd)


@pytest.mark.parametrize("map", MAPS)
def test_maps_are_the_optimizers(map):
    ours, (m, v) = MAPS[map], (optimizer_maps.MAPS[name] for name in NAMES[map])
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(size=5000) * 10 ** rng.uniform(-8, 0, 5000), [0.0, 1.0, -1.0, 1e-9]]).clip(-1, 1)
    for theirs, enc, dec, zero in (
        (m, ours.encode_m, ours.decode_m, ours.m_zero),
        (v, functools.partial(ours.encode_v, sqrt=jnp.sqrt), ours.decode_v, 0),
    ):
        table = theirs.table
        points = np.concatenate([y if theirs.is_signed else abs(y), table, (table[:-1] + table[1:]) / 2])
        points = jnp.asarray(points, jnp.float32)

        @jax.jit
        def both(points, enc=enc, dec=dec, theirs=theirs):
            codes = theirs.encode(points)
            return (enc(points), dec(codes)), (codes.astype(jnp.int32), theirs.decode(codes))

        for got, want in zip(*both(points), strict=True):
            np.testing.assert_array_equal(got, want)
        assert zero == theirs.zero_code


@jax.jit
def by_decade(codes, y):
    """Of both dynamic maps: what the TPU's kernel makes of all codes and of numbers, and what the definition does."""
    maps, rows = MAPS["dynamic8"], [list(jnp.asarray(one)) for one in decades.tables().reshape(2, decades.ROWS, 8, 128)]
    size = abs(y)
    values = decades.decode_m(127 - codes, rows[0]), decades.decode_v(codes - 128, rows[1])
    found = decades.encode_m(size * decades.M.unit, y, rows[0]), decades.encode_v(size * decades.V.unit, rows[1])
    defined = (maps.decode_m(codes), maps.decode_v(codes)), (maps.encode_m(y), maps.encode_v(size, jnp.sqrt))
    return (values, [one.astype(jnp.uint8) for one in found]), defined


def test_dynamic_maps_by_decade_are_the_definitions():
    """All codes; numbers of every size, all middles between levels and decades, and the numbers beside these."""
    tables = [optimizer_maps.MAPS[name].table for name in NAMES["dynamic8"]]
    special = np.concatenate([*tables, *((one[:-1] + one[1:]) / 2 for one in tables), 10.0 ** np.arange(-9, 1)])
    beside = [(special.astype(np.float32).view(np.int32) + n).view(np.float32) for n in (-2, -1, 0, 1, 2)]
    rng = np.random.default_rng(0)
    wide = (rng.normal(size=20000) * 10 ** rng.uniform(-9, 0, 20000)).astype(np.float32)
    y = np.concatenate([*beside, wide, [0, 1, -1, 1e-13]])
    y = np.resize(y[abs(y) <= 1], (-(-y.size // 1024) * 8, 128)).astype(np.float32)
    codes = jnp.tile(jnp.arange(256).reshape(2, 128), (4, 1))
    (values, found), (defined, wanted) = jax.tree.map(np.asarray, by_decade(codes, jnp.asarray(y)))
    for got, want in zip(values, defined, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)
    for got, want, table, number in zip(found, wanted, tables, (y, abs(y)), strict=True):
        off = got.astype(int) != want
        one, other = table[got[off]], table[want[off]]
        assert (abs(got.astype(int) - want) <= 1).all()
        assert (abs(number[off] - (one + other) / 2) <= 1e-4 * abs(one - other)).all()


@pytest.mark.parametrize(("map", "block"), [("soft8", 128), ("dynamic8", 64)])
def test_the_definition_is_the_optimizers(map, block):
    """One step of the reference and of `quantize_state(optax.adamw)`, from the same codes."""
    case = Case("", 2, 128, 8, block, map=map)
    settings = settings_of(case)
    p, _, m, v, _ = arrays(case, jax.random.key(1))
    g = jax.random.normal(jax.random.key(2), p.shape) * 1e-3
    rule = quantize_state(optax.adamw(1e-3, weight_decay=case.weight_decay), "int8")
    first, second = NAMES[map]
    state = (
        optax.ScaleByAdamState(jnp.int32(4), {"w": Quantized(*m, first, block)}, {"w": Quantized(*v, second, block)}),
        optax.EmptyState(),
        optax.EmptyState(),
    )

    @jax.jit
    def both(p, g, m, v):
        updates, (after, *_) = rule.update({"w": g}, state, {"w": p})
        ours = reference.step(p, g, m, v, hyper(1e-3, 5, settings), settings)
        mu, nu = after.mu["w"], after.nu["w"]
        return ours, (p + updates["w"], (mu.codes, mu.scale), (nu.codes, nu.scale))

    compare(case, *both(p, g, m, v))


@functools.cache
def stepped():
    """What the properties look at: a step of the reference on a case with every oddity."""
    case = CASES[0]
    settings = settings_of(case)
    given = arrays(case, jax.random.key(3))
    step = jax.jit(functools.partial(adam8, settings=settings, implementation="reference"))
    return given, step(*given), step(*given[:4], given[4].at[4].set(0.0)), settings, step


def whole(moment, name, block):
    return np.asarray(decode(Quantized(*moment, name, block)))


def test_elements_without_a_finite_gradient_stay():
    (p, _, m, v, _), (new_p, new_m, new_v), _, settings, _ = stepped()
    for row, col in ((3, 5), (7, 2)):
        assert new_p[0, row, col] == p[0, row, col]
        for old, new, name in ((m, new_m, "soft8"), (v, new_v, "sqrt8")):
            before, after = whole(old, name, settings.block), whole(new, name, settings.block)
            step = 2 / 127 * float(new[1][0, 0, col])
            assert abs(before[0, row, col] - after[0, row, col]) <= step
    assert all(bool(jnp.isfinite(x).all()) for x in (new_p, new_m[1], new_v[1]))
    assert bool((new_p != p)[0, 8:].any())


def test_no_state_no_gradient_no_change():
    given, _, _, settings, step = stepped()
    p = given[0]
    nothing = tuple(jax.tree.map(jnp.zeros_like, one) for one in given[1:4])
    after, m, v = step(p, *nothing, given[4])
    np.testing.assert_allclose(after, p * (1 - 1e-3 * settings.weight_decay), rtol=1e-6)
    assert not any(np.asarray(x).any() for x in (*m, *v))


def test_a_skipped_step_leaves_every_bit():
    given, _, skipped, _, _ = stepped()
    for old, new in zip(jax.tree.leaves((given[0], *given[2:4])), jax.tree.leaves(skipped), strict=True):
        np.testing.assert_array_equal(old, new)


def test_codes_are_the_nearest():
    """What codes say of the new moments is off by less than half of the widest step at that place."""
    (p, g, m, v, _), (_, new_m, new_v), _, settings, _ = stepped()
    grad = np.nan_to_num(np.asarray(g, np.float32) * 0.5, nan=0, posinf=0, neginf=0)
    good = np.isfinite(np.asarray(g, np.float32))
    old_m, old_v = whole(m, "soft8", settings.block), whole(v, "sqrt8", settings.block)
    want_m = np.where(good, settings.b1 * old_m + (1 - settings.b1) * grad, old_m)
    want_v = np.where(good, settings.b2 * old_v + (1 - settings.b2) * grad**2, old_v)
    for want, got, name in ((want_m, new_m, "soft8"), (want_v, new_v, "sqrt8")):
        table = optimizer_maps.MAPS[name].table
        widest = np.diff(table).max() / 2
        scale = np.repeat(np.asarray(got[1]), settings.block, 1)
        assert (np.abs(want - whole(got, name, settings.block)) <= scale * max(widest, table[0]) * 1.001).all()
    assert p.shape == want_m.shape


F32, SHAPE = jnp.float32, (256, 8)


def call(p=(SHAPE, F32), g=(SHAPE, F32), m=(SHAPE, jnp.int8), scale=((2, 8), F32), v=(SHAPE, jnp.uint8), **options):
    made = [jnp.zeros(*one) for one in (p, g, m, scale, v)]
    given = options.pop("hyper", jnp.zeros(5))
    return adam8(made[0], made[1], (made[2], made[3]), (made[4], made[3]), given, **options)


BAD = [
    ({"p": ((256,), F32)}, r"parameters of shape \(256,\), expected \(\.\.\., R, C\)"),
    ({"p": ((0, 8), F32)}, "without a dim of size 0"),
    ({"p": (SHAPE, jnp.bfloat16)}, r"p bfloat16\[256, 8\], expected float32"),
    ({"g": ((256, 4), F32)}, r"got g float32\[256, 4\], expected float32 or bfloat16\[256, 8\]"),
    ({"g": (SHAPE, jnp.int32)}, "got g int32"),
    ({"m": (SHAPE, jnp.uint8)}, "codes of m uint8.*expected int8"),
    ({"scale": ((1, 8), F32)}, r"scales of m float32\[1, 8\], expected float32\[2, 8\]"),
    ({"v": (SHAPE, jnp.int8)}, "codes of v int8.*expected uint8"),
    ({"hyper": jnp.zeros(3)}, r"hyper float32\[3\], expected float32\[5\]"),
    ({"hyper": jnp.zeros(5, jnp.bfloat16)}, "hyper bfloat16"),
    ({"settings": Settings(96)}, "blocks of 96 rows do not divide R"),
    ({"implementation": "cuda"}, "unknown implementation 'cuda'"),
    ({"interpret": True}, "interpret needs a named implementation"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        call(**fields)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"b1": 1.0}, "b1 1.0"),
        ({"b2": -0.1}, "b2 -0.1"),
        ({"eps": 0.0}, "eps 0.0"),
        ({"eps": float("inf")}, "eps inf, expected a finite number above 0"),
        ({"weight_decay": float("nan")}, "weight_decay nan, expected a finite number"),
        ({"block": 0}, "blocks of 0"),
        ({"block": 2.5}, "blocks of 2.5 rows, expected a whole number"),
        ({"map": "int4"}, "map 'int4', expected soft8 or dynamic8"),
    ],
)
def test_settings_out_of_range(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


def test_a_named_kernel_that_cannot_run_says_why():
    for platform, name, says in (
        ("cpu", "tpu", "it is for TPUs, and the target is cpu"),
        ("gpu a100", "gpu", "compute capability 9.0"),
        ("gpu h200", "gpu", "columns that are a multiple of 32, not 8"),
    ):
        with pytest.raises(NotImplementedError, match=says):
            call(implementation=name, platform=platform)
    with pytest.raises(NotImplementedError, match="multiple of 32 rows, not 8"):
        call(implementation="tpu", platform="tpu v5e", settings=Settings(8), scale=((32, 8), F32))
    with pytest.raises(
        ValueError, match="tiles of 0 blocks by 128 columns, expected 1 or more of each; or leave tiles"
    ):
        Tiles(0, 128)


def test_who_runs_what():
    assert explain(Case("", 1, 512, 64), "gpu h200").chosen == "gpu"
    assert [has_kernel((512, 64), 128, where) for where in ("tpu v5e", "gpu h100", "gpu a100", "cpu")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_v4_has_no_gather_for_the_dynamic_map():
    says = "looks up the map dynamic8 along sublanes, which a v4 cannot: take soft8"
    assert says in (explain(Case("", 1, 512, 128, 256, "dynamic8"), "tpu v4").why or "")
    for shape, kind, kernel in (
        ((512, 128), "soft8", True),
        ((512, 64), "dynamic8", True),
        ((512, 128), "dynamic8", False),
    ):
        assert has_kernel(shape, 256, "tpu v4", kind) is kernel
        assert has_kernel(shape, 256, "tpu v5p", kind)


@pytest.mark.parametrize("check_vma", [True, False])
def test_on_hopper_types_that_vary_have_the_reference_and_named_the_cure(check_vma):
    """JAX 0.11 and newer take no such type where a kernel changes arrays in place."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, settings = jax.P("x"), Settings(64)
    scale, make = ((4, 64), F32), jax.ShapeDtypeStruct
    moments = [(make((256, 64), kind), make(*scale)) for kind in (jnp.int8, jnp.uint8)]
    given = make((256, 64), F32), make((256, 64), F32), *moments, make((5,), F32)
    specs = rows, rows, (rows, rows), (rows, rows), jax.P()

    def traced(name):
        step = functools.partial(adam8, settings=settings, platform="gpu h200", implementation=name)
        out = rows, (rows, rows), (rows, rows)
        notes = []
        with dispatch.noting(notes):
            whole = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
            jax.jit(whole).trace(*given)
        return notes[0][0]

    if check_vma and jax.__version_info__ >= (0, 11):
        assert "give jax.shard_map check_vma=False" in traced(None).why
        with pytest.raises(dispatch.CannotRun, match=r"give jax\.shard_map check_vma=False"):
            traced("gpu")
    else:
        assert [traced(name).chosen for name in (None, "gpu")] == ["gpu", "gpu"]


def test_tiles_divide_blocks_and_fit():
    for case in (*CASES, Case("", 1, 43 * 256, 5120, 256)):
        found = candidates(case)
        assert found
        for tiles in found:
            assert case.rows // case.block % tiles.blocks == 0
            assert tiles.blocks * case.block * tiles.cols <= 17 * 2**14
        larger = candidates(case, "v5p")
        assert set(found) <= set(larger)
        assert all(tiles.blocks * case.block * tiles.cols <= 17 * 2**15 for tiles in larger)
