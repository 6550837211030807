"""Every implementation of attention against a loop over queries and keys, in float64.

By default the cases whose settings include those of the others; devices split the sequence alone; splash on every axis.
"""

import collections
import contextlib
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.compiler.collectives import collectives
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.errors import UserError
from jaxscale.layers.attend_on_mesh import attend
from jaxscale.layers.attention_splash import attend_splash
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.attention.visibility import Visibility
from tests.tiers import variants

SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0], [7, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8]])

CASES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 3},
    "wide_window": {"window": 100},
    "soft_cap": {"soft_cap": 1.5, "scale": 0.7},
    "segments": {"q_segments": SEGMENTS, "kv_segments": SEGMENTS},
    "bidirectional_segments": {"causal": False, "q_segments": SEGMENTS, "kv_segments": SEGMENTS},
    "packed": {
        "q_segments": SEGMENTS,
        "kv_segments": SEGMENTS,
        "q_positions": POSITIONS,
        "kv_positions": POSITIONS,
        "window": 2,
        "soft_cap": 2.0,
    },
    "shifted": {"q_positions": POSITIONS + 3, "kv_positions": POSITIONS},
    "blind": {"q_positions": POSITIONS, "kv_positions": POSITIONS + 6},
}


def _brute(q, k, v, *, causal=True, window=None, soft_cap=None, scale=None, **given):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    q_pos = np.broadcast_to(given.get("q_positions", np.arange(queries)[None]), (batch, queries))
    kv_pos = np.broadcast_to(given.get("kv_positions", np.arange(keys)[None]), (batch, keys))
    q_seg, kv_seg = given.get("q_segments"), given.get("kv_segments")
    out = np.zeros((batch, queries, heads, v.shape[-1]))
    for b, t, n in itertools.product(range(batch), range(queries), range(heads)):
        kv_head = n // (heads // groups)
        scores, values = [], []
        for s in range(keys):
            distance = int(q_pos[b, t]) - int(kv_pos[b, s])
            if causal and distance < 0:
                continue
            if window is not None and not 0 <= distance < window:
                continue
            if q_seg is not None and (q_seg[b, t] != kv_seg[b, s] or kv_seg[b, s] == 0):
                continue
            score = scale * (q[b, t, n] @ k[b, s, kv_head])
            scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
            values.append(v[b, s, kv_head])
        if scores:
            chances = np.exp(np.array(scores) - max(scores))
            out[b, t, n] = (chances / chances.sum()) @ np.array(values)
    return out


def _draw(queries=11, keys=11, heads=4, groups=2, width=8, batch=2, dtype=jnp.float32):
    shapes = (batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width)
    drawn = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    return [x.astype(dtype) for x in drawn]


def _jitted(arguments, **settings):
    return jax.jit(lambda *x: attend(*x, **settings))(*arguments)


def _gradient(function):
    """Of a loss that weighs every output differently; and the outputs."""

    def loss(*arguments):
        out = function(*arguments).astype(jnp.float32)
        strides = np.cumprod((1, *out.shape[:0:-1]), dtype=np.float32)[::-1]
        # the index in `out.ravel()`, which a device computes for its own part
        index = sum(jax.lax.broadcasted_iota(jnp.float32, out.shape, dim) * strides[dim] for dim in range(out.ndim))
        return jnp.sum(out * jnp.cos(index)), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def _gradients(function, arguments):
    return jax.jit(_gradient(function))(*arguments)


def _close(found, expected, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


@pytest.mark.parametrize("case", variants(CASES, default=["causal", "bidirectional_segments", "packed", "blind"]))
def test_values_are_the_definition_and_chunked_gradients_the_plain_ones(case):
    """And a query that sees no key gives zeros, in value and in gradient."""
    arguments = _draw()
    expected = _brute(*arguments, **CASES[case])
    blind = np.all(expected == 0, axis=(2, 3))
    assert blind.any() == (case in ("segments", "bidirectional_segments", "packed", "blind"))
    steps = {
        name: _gradient(lambda *x, name=name: attend(*x, **CASES[case], implementation=name, chunk=4))
        for name in ("plain", "chunked")
    }
    found = jax.jit(lambda *x: {name: step(*x) for name, step in steps.items()})(*arguments)
    for (_, out), gradients in found.values():
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
        assert not np.asarray(out)[blind].any()
        assert not np.asarray(gradients[0])[blind].any()
    _close(found["chunked"][1], found["plain"][1], 2e-5)
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
def test_gradients_are_the_slope_of_the_definition(implementation):
    arguments = _draw(queries=5, keys=5, batch=1)
    settings = {"soft_cap": 1.5, "window": 3}
    _, gradients = _gradients(lambda *x: attend(*x, **settings, implementation=implementation, chunk=2), arguments)
    weigh = np.cos(np.arange(arguments[0].size)).reshape(arguments[0].shape)
    for which, index in [(0, (0, 3, 1, 2)), (1, (0, 2, 1, 5)), (2, (0, 1, 0, 0))]:
        sides = []
        for step in (1e-4, -1e-4):
            moved = [np.asarray(x, np.float64).copy() for x in arguments]
            moved[which][index] += step
            sides.append((_brute(*moved, **settings) * weigh).sum())
        np.testing.assert_allclose(gradients[which][index], (sides[0] - sides[1]) / 2e-4, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
@pytest.mark.parametrize(("queries", "keys", "settings"), [(3, 11, {"causal": False}), (11, 3, {"window": 2})])
def test_unequal_lengths(queries, keys, settings, implementation):
    arguments = _draw(queries, keys)
    found = _jitted(arguments, **settings, implementation=implementation, chunk=4)
    np.testing.assert_allclose(found, _brute(*arguments, **settings), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
def test_a_traced_window_is_a_window(implementation):
    arguments = _draw()
    found = jax.jit(lambda w: attend(*arguments, window=w, implementation=implementation, chunk=4))(3)
    np.testing.assert_allclose(found, _brute(*arguments, window=3), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_narrow_types_are_scored_in_float32(implementation, scale):
    arguments = _draw(dtype=jnp.bfloat16)
    found = _jitted(arguments, scale=scale, implementation=implementation, chunk=4)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), _brute(*arguments, scale=scale), rtol=2e-2, atol=1e-2)


def _temp_bytes(length, implementation):
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: _draw(length, length, batch=1))]

    def loss(q, k, v):
        return jnp.sum(jnp.square(attend(q, k, v, implementation=implementation, chunk=64)))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunked_memory_grows_linearly_forward_and_backward():
    short, long = _temp_bytes(1024, "chunked"), _temp_bytes(4096, "chunked")
    assert long < 4.2 * short
    assert long < 4 * 4 * 4096 * 4096 / 8  # a bound no T x S of 4 heads in float32 gets under
    assert _temp_bytes(4096, "plain") > 12 * _temp_bytes(1024, "plain")


def test_chunks_out_of_reach_are_not_computed():
    poison = jnp.full((1, 4, 2, 8), jnp.nan)
    q, k, v = _draw(batch=1, queries=12, keys=12)
    k = jnp.concatenate([poison, k[:, 4:]], 1)
    found = attend(q, k, v, window=2, implementation="chunked", chunk=4)
    np.testing.assert_allclose(
        np.asarray(found)[:, 8:], _brute(q[:, 4:], k[:, 4:], v[:, 4:], window=2)[:, 4:], rtol=2e-5, atol=2e-5
    )


LONG = 256
DOCUMENTS = jnp.array([[1] * 100 + [2] * 130 + [0] * 26, [1] * 256])
PACKED = {"q_segments": DOCUMENTS, "kv_segments": DOCUMENTS, "window": 70, "soft_cap": 2.0, "scale": 0.7}
MESHES = [("sequence:4", 32, PACKED), ("data:2,sequence:2,tensor:2", 40, {}), ("data:2,tensor:2", 64, PACKED)]


def _dot_flop(text):
    """FLOP of the matrix products that one device runs, loops counted, every branch taken."""
    program, total = HloProgram(text), 0
    for computation in program.computations.values():
        for op in computation.instructions.values():
            if op.opcode == "dot":
                shapes = [_shape(computation.instructions[name].type) for name in op.operands]
                contracted = re.search(r"lhs_contracting_dims=\{(\d+)\}", op.attributes)[1]
                total += (
                    2
                    * math.prod(_shape(op.type))
                    * shapes[0][int(contracted)]
                    * program.executions(computation.name)[0]
                )
    return total


def _shape(kind):
    return [int(size) for size in re.search(r"\[([\d,]*)\]", kind)[1].split(",")]


@pytest.mark.parametrize(("mesh", "chunk", "settings"), variants(MESHES, default=1))
def test_a_device_attends_from_its_own_queries_alone(mesh, chunk, settings):
    """Same values and gradients; 1/devices of the products; keys gathered once, their gradients scattered once."""
    arguments = q, k, _ = _draw(LONG, LONG, heads=8)
    expected = _gradients(lambda *x: attend(*x, **settings, implementation="plain"), arguments)
    mesh = MeshSpec.parse(mesh).build()
    with layout(mesh, AxisRules()):
        rows = NamedSharding(mesh, PartitionSpec("data", "sequence", "tensor"))
        placed = [jax.device_put(x, rows) for x in arguments]
        step = _gradient(lambda *x: attend(*x, **settings, implementation="chunked", chunk=chunk))
        step = jax.jit(step).lower(*placed).compile()
    _close(step(*placed), expected, 2e-5)
    text, parts = step.as_text(), mesh.size // mesh.shape["sequence"]
    sent = collections.defaultdict(int)
    for one in collectives(text, mesh):
        if one.bytes > 4:  # but for the sum that the test's loss is
            assert (one.axes, one.in_loop, one.count) == (("sequence",), False, 1)
            sent[one.kind] += one.bytes
    if mesh.shape["sequence"] == 1:
        assert not sent
        return
    keys_and_values = 2 * k.nbytes // parts
    assert sent == {"all-gather": keys_and_values, "reduce-scatter": keys_and_values}
    if LONG // mesh.shape["sequence"] % chunk == 0:
        assert _dot_flop(text) == 7 * 2 * q.size * LONG / mesh.size  # 2 products forward, 5 backward
    biggest = max(math.prod(_shape(array)) for array in re.findall(r"f32\[\d[\d,]*\]", text))
    assert biggest < q.size // parts


def test_a_device_skips_the_keys_that_its_own_queries_cannot_see():
    q, k, v = _draw(16, 16)
    poisoned = k.at[:, 8:].set(jnp.nan)
    with layout(MeshSpec.parse("sequence:4").build(), AxisRules()):
        found = _jitted((q, poisoned, v), implementation="chunked", chunk=4)
    np.testing.assert_allclose(found[:, :8], _brute(q[:, :8], k[:, :8], v[:, :8]), rtol=2e-5, atol=2e-5)
    assert np.isnan(found[:, 8:]).all()


# Splash, in interpret mode: a TPU's kernel run step by step.

SPLASH = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 70},
    "segments_cap": {"q_segments": DOCUMENTS, "kv_segments": DOCUMENTS, "soft_cap": 3.0, "scale": 0.5},
}


def _splash(q, k, v, *, soft_cap=None, scale=None, **given):
    return attend_splash(
        q,
        k,
        v,
        Visibility(**given),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
        interpret=True,
    )


@pytest.mark.parametrize(
    ("mesh", "case"),
    variants(
        [
            ("data:2,sequence:2,tensor:2", "segments_cap"),
            ("sequence:2", "window"),
            (None, "bidirectional"),
            (None, "segments_cap"),
            ("tensor:4", "causal"),
        ],
        default=2,
    ),
)
def test_splash_is_the_definition(mesh, case):
    """On a mesh too, where masks are of the queries' places in the whole sequence, not in a device's part of it."""
    arguments = _draw(LONG, LONG, width=16)
    expected = _gradients(lambda *x: attend(*x, **SPLASH[case], implementation="plain"), arguments)
    with contextlib.nullcontext() if mesh is None else layout(MeshSpec.parse(mesh).build(), AxisRules()):
        found = _gradients(lambda *x: _splash(*x, **SPLASH[case]), arguments)
    _close(found, expected, 2e-4)


def test_splash_lowers_for_a_tpu():
    arguments = _draw(LONG, LONG, width=64, dtype=jnp.bfloat16)

    def loss(q, k, v):
        visibility = Visibility(None, None, DOCUMENTS, DOCUMENTS, 100, True)
        return jnp.sum(attend_splash(q, k, v, visibility, scale=0.125, soft_cap=30.0).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3


def test_splash_lowers_where_some_axes_are_manual():
    """As within a pipeline's stage: the kernel is manual over what is left, and its heads lie over tensor."""
    mesh, arguments = MeshSpec.parse("pipe:2,tensor:2").build(), _draw(LONG, LONG, width=64, dtype=jnp.bfloat16)

    def body(q, k, v):
        with layout(jax.sharding.get_abstract_mesh(), AxisRules(batch=())):
            return attend_splash(q, k, v, Visibility(), scale=0.125, soft_cap=None)

    region = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"pipe"}, check_vma=False
    )
    text = jax.jit(region).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert '"tensor"' in text


def test_what_splash_cannot_do_is_refused_by_name():
    q, k, v = _draw(LONG, LONG)
    with pytest.raises(UserError, match="got platform cpu, expected tpu"):
        attend(q, k, v, implementation="splash")
    with pytest.raises(UserError, match="multiple of 128"):
        _splash(q[:, :100], k[:, :100], v[:, :100])
    with pytest.raises(UserError, match="256 queries and 128 keys"):
        _splash(q, k[:, :128], v[:, :128])
    with pytest.raises(UserError, match="got positions"):
        _splash(q, k, v, q_positions=jnp.zeros((1, LONG), int))
    with pytest.raises(UserError, match="traced window"):
        _splash(q, k, v, window=jnp.int32(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"implementation": "chunkd"}, "did you mean 'chunked'"),
        ({"q_segments": SEGMENTS}, "pass segments of both"),
        ({"window": 2, "causal": False}, "leave one of them out"),
        ({"window": 0}, "at least 1"),
        ({"chunk": 0}, "at least 1"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(UserError, match=message):
        attend(*_draw(), **settings)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="4 query heads, expected a multiple of the 3 key heads"):
        attend(*_draw(groups=3))
