"""Norm: the battery, properties, what is refused, and how it behaves under other transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.layers.norm import LayerNorm, RMSNorm
from pallas_kernels.norm.api import explain, layer_norm, rms_norm
from pallas_kernels.norm.cases import CASES, Case
from pallas_kernels.norm.tpu import Tiles
from tests.kernels.battery import GRADIENTS, Subject, check, parameters


def inputs(case, key):
    keys = jax.random.split(key, 4)
    shape, dtype = (case.rows, case.width), jnp.dtype(case.dtype)
    vectors = 1 + 0.3 * jax.random.normal(keys[0], (1 + case.bias, case.width))
    arrays = [jax.random.normal(one, shape, dtype) for one in keys[1 : 2 + case.residual]]
    return (*vectors, *arrays)


def run(case, implementation, interpret):
    options = {"implementation": implementation, "interpret": interpret}

    def function(*args):
        vectors, arrays = args[: 1 + case.bias], args[1 + case.bias :]
        residual = arrays[1] if case.residual else None
        if not case.center:
            return rms_norm(arrays[0], *vectors, residual, **options)
        bias = vectors[1] if case.bias else None
        return layer_norm(arrays[0], vectors[0], bias, residual, **options)

    return function


def subject(case):
    # gradients of float32 vectors come of arrays in the case's type
    tolerance = GRADIENTS | {"float32": GRADIENTS[case.dtype]}
    differentiable = tuple(range(2 + case.bias + case.residual))
    return Subject([case], inputs, run, differentiable=differentiable, gradient_tolerance=tolerance)


@pytest.mark.parametrize(
    ("subject", "case", "implementation", "interpret"),
    [
        pytest.param(subject(case), *one.values, id=one.id, marks=one.marks)
        for case in CASES
        for one in parameters(subject(case))
    ],
)
def test_battery(subject, case, implementation, interpret, capfd):
    check(subject, case, implementation, interpret, capfd)


def test_where_nothing_is_named_it_is_the_layers_norm():
    x = jax.random.normal(jax.random.key(0), (3, 5, 32), jnp.bfloat16)
    weight, bias = jax.random.normal(jax.random.key(1), (2, 32))
    rms, layer = RMSNorm(32), LayerNorm(32)
    rms.weight[...], layer.weight[...], layer.bias[...] = weight, weight, bias
    np.testing.assert_array_equal(jax.jit(rms_norm)(x, weight), jax.jit(rms)(x))
    np.testing.assert_array_equal(jax.jit(layer_norm)(x, weight, bias), jax.jit(layer)(x))


def test_properties():
    """A longer row has the same norm; a shifted one the same layer norm; a NaN stays in its row."""
    x, weight = jax.random.normal(jax.random.key(0), (16, 128)), jnp.ones(128)
    kernel = {"implementation": "tpu", "interpret": True}
    y = rms_norm(x, weight, eps=0.0, **kernel)
    np.testing.assert_allclose(rms_norm(8 * x, weight, eps=0.0, **kernel), y, rtol=1e-6)
    shifted = layer_norm(x + 3, weight, **kernel)
    np.testing.assert_allclose(shifted, layer_norm(x, weight, **kernel), atol=2e-5)
    spoilt = rms_norm(x.at[3, 5].set(jnp.nan), weight, eps=0.0, **kernel)
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(y, 3, 0))


@pytest.mark.parametrize(
    ("check_vma", "kernel"),
    # JAX's interpreter of TPU kernels does not know of axes that arrays vary over
    [(True, {}), (False, {"implementation": "tpu", "interpret": True})],
    ids=["checked", "kernel"],
)
def test_inside_shard_map_scan_and_checkpoint(check_vma, kernel):
    """Rows over an axis, the weight whole: its gradient is the sum over devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, weights = jax.random.normal(jax.random.key(0), (32, 128)), 1 + jnp.arange(256.0).reshape(2, 128) / 256

    def stacked(x, weights, **kernel):
        def block(x, weight):
            y, h = rms_norm(x, weight, x, **kernel)
            return y + 0.1 * h, None

        return jax.lax.scan(jax.checkpoint(block), x, weights)[0]

    def sharded(x, weights):
        local = jax.shard_map(
            lambda x, w: stacked(x, w, **kernel),
            mesh=mesh,
            in_specs=(jax.P("x"), jax.P()),
            out_specs=jax.P("x"),
            check_vma=check_vma,
        )
        return local(x, weights)

    def both(function):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1)))(x, weights)

    for got, want in zip(jax.tree.leaves(both(sharded)), jax.tree.leaves(both(stacked)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_vectors_of_any_type(dtype):
    """Gradients come back in it."""
    x = jax.random.normal(jax.random.key(0), (16, 128))
    vectors = [one.astype(dtype) for one in 1 + 0.3 * jax.random.normal(jax.random.key(1), (2, 128))]

    def loss(weight, bias, **how):
        return jnp.sum(jnp.sin(layer_norm(x, weight, bias, **how)))

    got = jax.grad(functools.partial(loss, implementation="tpu", interpret=True), (0, 1))(*vectors)
    want = jax.grad(loss, (0, 1))(*(one.astype(jnp.float32) for one in vectors))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=1e-2, atol=1e-2)


def test_vmap():
    x, weight = jax.random.normal(jax.random.key(0), (2, 16, 128)), jnp.ones((2, 128))
    got = jax.vmap(lambda x, w: rms_norm(x, w, implementation="tpu", interpret=True))(x, weight)
    np.testing.assert_allclose(got, rms_norm(x, weight[0]), rtol=1e-6)


def test_second_derivatives_of_kernels_are_refused():
    x, weight = jnp.ones((16, 128)), jnp.ones(128)

    def slope(x, **kernel):
        return jnp.sum(jax.grad(lambda x: jnp.sum(rms_norm(x, weight, **kernel) ** 3))(x))

    with pytest.raises(NotImplementedError, match="norm: kernels have no second derivatives"):
        jax.grad(slope)(x, implementation="tpu", interpret=True)
    assert np.isfinite(jax.grad(slope)(x, implementation="reference")).all()


ROWS = jnp.ones((4, 512))
BAD = [
    ({"x": jnp.ones(())}, r"shape \(\), expected \(\.\.\., D\)"),
    ({"x": jnp.ones((0, 512))}, "without a dim of size 0"),
    ({"x": jnp.ones((4, 512), int)}, "x of type int32, expected floating point"),
    ({"weight": jnp.ones(4)}, r"weight of shape \(4,\), expected \(512,\)"),
    ({"weight": jnp.ones(512, int)}, "weight of type int32"),
    ({"residual": ROWS.astype(jnp.bfloat16)}, r"residual of bfloat16 \(4, 512\), expected float32"),
    ({"residual": ROWS[:2]}, r"residual of float32 \(2, 512\), expected float32 \(4, 512\)"),
    ({"eps": -1.0}, "eps -1.0, expected at least 0"),
    ({"eps": float("nan")}, "eps nan"),
    ({"implementation": "tup"}, "unknown implementation 'tup'.*did you mean 'tpu'"),
    ({"interpret": True}, "interpret needs a named"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        rms_norm(**{"x": ROWS, "weight": jnp.ones(512), **fields})


@pytest.mark.parametrize(
    ("platform", "implementation", "x", "says"),
    [
        ("cpu", "tpu", ROWS, "the target is cpu"),
        ("gpu a100", "gpu", ROWS, "compute capability 9.0"),
        ("gpu h200", "gpu", jnp.ones((4, 384)), "a multiple of 512 up to 8192, not 384"),
        ("tpu v5e", "tpu", jnp.ones((4, 96)), "a multiple of 128 up to 16384, not 96"),
        ("tpu v5e", "tpu", ROWS.astype(jnp.float16), "bfloat16 or float32, not float16"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(platform, implementation, x, says):
    with pytest.raises(NotImplementedError, match=says):
        rms_norm(x, jnp.ones(x.shape[1:]), platform=platform, implementation=implementation)


def test_what_runs_where():
    chosen = {
        chip: {explain(case, chip).chosen for case in CASES} for chip in ("tpu v5e", "gpu h200", "gpu a100", "cpu")
    }
    wide = {center: explain(Case("", 8, 5632, center=center), "gpu h200") for center in (False, True)}
    assert [one.chosen for one in wide.values()] == ["gpu", "reference"]
    assert "a layer norm's width that is a multiple of 512 up to 5120, not 5632" in (wide[True].why or "")
    assert chosen == {"tpu v5e": {"tpu"}, "gpu h200": {"gpu"}, "gpu a100": {"reference"}, "cpu": {"reference"}}


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="tiles of 8 and 16 rows, expected multiples of 16"):
        Tiles(8, 16)
