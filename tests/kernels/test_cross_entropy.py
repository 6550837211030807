"""Cross-entropy: the battery, properties, a sharded vocabulary, and what is refused."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.layers.loss import cross_entropy as of_layers
from jaxscale.layers.loss_kernel import kernel_sums
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import layout
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.cross_entropy.api import cross_entropy, explain
from pallas_kernels.cross_entropy.cases import CASES, Case
from pallas_kernels.cross_entropy.tpu import Tiles, default_tiles
from tests.kernels.battery import GRADIENTS, TOLERANCE, Subject, check, parameters


def inputs(case, key):
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (case.rows, case.width), jnp.dtype(case.dtype))
    head = (0.3 * jax.random.normal(keys[1], (case.head, case.width))).astype(case.dtype)
    labels = jax.random.randint(keys[2], (case.rows,), 0, case.vocab or case.head)
    if case.ignored:
        labels = labels.at[:: case.ignored].set(-1)
    return x, head, labels, jax.random.uniform(keys[3], (case.rows,))


def run(case, implementation, interpret):
    return functools.partial(
        cross_entropy,
        vocab=case.vocab,
        soft_cap=case.soft_cap,
        z_loss=case.z_loss,
        chunk=100,
        implementation=implementation,
        interpret=interpret,
    )


SUBJECT = Subject(
    CASES,
    inputs,
    run,
    platforms={"tpu": "tpu"},
    differentiable=(0, 1, 3),
    tolerance=TOLERANCE | {"float32": 2e-5},
    gradient_tolerance=GRADIENTS | {"float32": 2e-5},
)


@pytest.mark.parametrize(("case", "implementation", "interpret"), parameters(SUBJECT))
def test_battery(case, implementation, interpret, capfd):
    check(SUBJECT, case, implementation, interpret, capfd)


CHUNKED = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if "slow" in case.tags else [])
    for case in CASES
    if "small" in case.tags
]


@pytest.mark.parametrize("case", CHUNKED)
def test_chunks(case, capfd):
    """Chunks of 100 rows, which do not divide them."""
    check(SUBJECT, case, "chunked", False, capfd)


def test_is_the_layers_loss():
    """With padding of the vocabulary, a cap, a penalty and weights: total, penalty and all gradients."""
    case = Case("", 24, 16, 40, vocab=37, soft_cap=5.0, z_loss=1e-2, dtype="float32")
    x, head, labels, weights = inputs(case, jax.random.key(0))

    def theirs(x, head, weights):
        options = {"vocab": 37, "soft_cap": 5.0, "z_loss": 1e-2, "chunk": 5}
        loss = of_layers(x[None], head, labels[None], weights[None], **options)
        return loss.total + loss.penalty, loss.penalty

    def ours(x, head, weights):
        return cross_entropy(x, head, labels, weights, vocab=37, soft_cap=5.0, z_loss=1e-2, chunk=7)

    both = [jax.jit(jax.value_and_grad(one, (0, 1, 2), has_aux=True))(x, head, weights) for one in (ours, theirs)]
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["chunked", "tpu"])
def test_properties(implementation):
    """Gradients of logits sum to 0 over words; ignored labels give 0; a large cap is none; a bad label, NaN."""
    case = Case("", 128, 128, 256, dtype="float32", ignored=3)
    x, head, labels, weights = inputs(case, jax.random.key(0))
    more = {"implementation": implementation, "interpret": implementation == "tpu"}

    @functools.partial(jax.jit, static_argnames="soft_cap")
    def loss(x, head, labels, soft_cap=None):
        def total(x, head):
            return cross_entropy(x, head, labels, weights, soft_cap=soft_cap, **more)[0]

        return jax.value_and_grad(total, (0, 1))(x, head)

    total, (dx, d_head) = loss(x, head, labels)
    np.testing.assert_allclose(jnp.sum(d_head, 0), 0, atol=1e-4)
    np.testing.assert_array_equal(dx[::3], 0)
    np.testing.assert_allclose(loss(x, head, labels, soft_cap=1e5)[0], total, rtol=1e-5)
    np.testing.assert_array_equal(loss(x, head, jnp.full_like(labels, -1))[0], 0)
    assert np.isnan(loss(x, head, labels.at[1].set(256))[0])
    assert np.isnan(loss(x.at[1, 1].set(jnp.nan), head, labels)[0])


@pytest.mark.parametrize("implementation", ["chunked", "reference", "tpu"])
@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_ignored_rows_may_hold_anything(implementation, value):
    """Their total is 0, and so are their gradients; those of the others are what they are without them."""
    case = Case("", 128, 128, 200, soft_cap=20.0, z_loss=1e-2, dtype="float32", ignored=3)
    x, head, labels, weights = inputs(case, jax.random.key(0))
    total = run(case, implementation, implementation == "tpu")
    found = jax.jit(jax.value_and_grad(lambda x, head, weights: total(x, head, labels, weights)[0], (0, 1, 2)))
    spoilt = jnp.where((labels < 0)[:, None], value, x)
    assert not np.isfinite(spoilt).all()
    got, want = found(spoilt, head, weights), found(x, head, weights)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got[1][0][::3], 0)


def sharded(case, implementation, check_vma, x, head, labels, weights):
    """Rows over "data", the vocabulary over "words": the sum over all devices, and gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "words"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(x, head, labels, weights):
        options = {"vocab": case.vocab, "soft_cap": case.soft_cap, "z_loss": case.z_loss, "chunk": 20, "axis": "words"}
        interpret = implementation == "tpu"
        found = cross_entropy(x, head, labels, weights, **options, implementation=implementation, interpret=interpret)
        return jax.lax.psum(found, "data")

    rows = jax.P("data")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(rows, jax.P("words"), rows, rows), out_specs=jax.P(), check_vma=check_vma
    )(x, head, labels, weights)


@pytest.mark.parametrize(
    ("implementation", "check_vma"),
    [
        ("chunked", True),
        pytest.param("chunked", False, marks=pytest.mark.slow),
        pytest.param("reference", True, marks=pytest.mark.slow),
        pytest.param("reference", False, marks=pytest.mark.slow),
        pytest.param("tpu", False, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_vocabulary(implementation, check_vma):
    """As on one device, with all words of the last shard but one padding."""
    case = Case("", 256, 128, 512, vocab=385, soft_cap=9.0, z_loss=1e-2, dtype="float32", ignored=5)
    x, head, labels, weights = inputs(case, jax.random.key(0))

    def both(function):
        def total(x, head, weights):
            return function(x, head, labels, weights)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, head, weights)

    got = both(functools.partial(sharded, case, implementation, check_vma))
    want = both(run(case, "reference", False))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_one_chunk_of_logits_at_a_time():
    """Of the program: nothing is as large as all logits, and three products a chunk."""
    make = jax.ShapeDtypeStruct
    args = make((64, 8), jnp.float32), make((300, 8), jnp.float32), make((64,), jnp.int32)
    text = str(jax.make_jaxpr(jax.grad(lambda *a: cross_entropy(*a, chunk=16)[0], (0, 1)))(*args))
    assert "16,300" in text
    assert "64,300" not in text
    assert text.count("dot_general") == 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "data:2,tensor:2", "fsdp:2,sequence:2,tensor:2"])
def test_the_layers_loss_by_the_kernel(mesh):
    """On a mesh with rows, positions and words sharded: total, penalty and gradients."""
    case = Case("", 1024, 128, 512, vocab=500, soft_cap=9.0, z_loss=1e-2, dtype="float32", ignored=5)
    x, head, labels, weights = inputs(case, jax.random.key(0))
    arrays = x.reshape(4, 256, 128), head, weights.reshape(4, 256) * (labels >= 0).reshape(4, 256)
    labels = jnp.maximum(labels, 0).reshape(4, 256)
    told = {"vocab": 500, "soft_cap": 9.0, "z_loss": 1e-2}

    def theirs(x, head, weights):
        loss = of_layers(x, head, labels, weights, **told)
        return loss.total + loss.penalty, loss.penalty

    def ours(x, head, weights):
        return kernel_sums(x, head, labels, weights, **told, interpret=True)

    want = jax.jit(jax.value_and_grad(theirs, (0, 1, 2), has_aux=True))(*arrays)
    with contextlib.nullcontext() if mesh is None else layout(MeshSpec.parse(mesh).build(), AxisRules()):
        got = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_the_layers_loss_refuses_what_the_kernel_cannot():
    args = jnp.ones((1, 8, 4)), jnp.ones((16, 4)), jnp.zeros((1, 8), int)
    with pytest.raises(UserError, match="the target is cpu; or set a chunk instead of this kernel"):
        of_layers(*args, vocab=16, implementation="tpu")
    with layout(MeshSpec.parse("data:1").build(), AxisRules()), pytest.raises(UserError, match="the target is cpu"):
        of_layers(*args, vocab=16, implementation="tpu")
    with pytest.raises(UserError, match="unknown implementation of cross-entropy 'kernel'"):
        of_layers(*args, vocab=16, implementation="kernel")


X, HEAD, LABELS = jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.zeros(8, int)
BAD = [
    ({"x": jnp.ones(4)}, r"x \(4,\) and head \(16, 4\), expected \(M, D\) and \(V, D\)"),
    ({"x": jnp.ones((8, 5))}, r"x \(8, 5\)"),
    ({"x": jnp.ones((0, 4))}, "none empty"),
    ({"x": X.astype(jnp.bfloat16)}, "type bfloat16 and a head of type float32"),
    ({"x": X.astype(int), "head": HEAD.astype(int)}, "one floating-point type"),
    ({"labels": jnp.zeros(8)}, "labels of type float32"),
    ({"labels": jnp.zeros(7, int)}, r"shape \(7,\), expected integers of shape \(8,\)"),
    ({"weights": jnp.ones(8, int)}, "weights of type int32"),
    ({"weights": jnp.ones(7)}, r"weights of type float32 and shape \(7,\)"),
    ({"vocab": 17}, "vocab 17, expected 1 to 16"),
    ({"vocab": 0}, "vocab 0"),
    ({"soft_cap": 0.0}, "soft_cap 0.0, expected more than 0"),
    ({"soft_cap": float("inf")}, "soft_cap inf, expected more than 0 and finite"),
    ({"z_loss": -1.0}, "z_loss -1.0"),
    ({"chunk": 0}, "chunk 0"),
    ({"implementation": "chunk"}, "did you mean 'chunked'"),
    ({"interpret": True}, "interpret needs a named"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        cross_entropy(**{"x": X, "head": HEAD, "labels": LABELS, **fields})


@pytest.mark.parametrize(
    ("platform", "shape", "dtype", "says"),
    [
        ("gpu h200", (128, 128), "float32", "the target is gpu"),
        ("tpu v5e", (100, 128), "float32", "multiples of 128, not 100 and 128"),
        ("tpu v5e", (128, 128), "float16", "bfloat16 or float32, not float16"),
        ("tpu v5e", (128, 2**17), "float32", "no tile of a width of 131072 fits"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(platform, shape, dtype, says):
    x = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=says):
        cross_entropy(x, x[:1], jnp.zeros(shape[0], int), platform=platform, implementation="tpu")


def test_what_runs_where():
    assert {explain(case, chip).chosen for case in CASES for chip in ("tpu v5e", "gpu h200", "cpu")} == {"chunked"}


def test_tiles_fit():
    for width in (128, 2304, 4096, 8192, 16384):
        for dtype in ("bfloat16", "float32"):
            found = default_tiles(Case("", 8192, width, 128256, dtype=dtype))
            assert found is not None
            assert found.vmem_bytes(width, jnp.dtype(dtype).itemsize) <= 96 * 2**20
    with pytest.raises(ValueError, match="expected multiples of 128"):
        Tiles(64, 128)
