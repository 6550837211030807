"""Grouped matmul: the battery, properties, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import explain, grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.gpu import Tiles, default_tiles, tile_table
from tests.kernels.battery import Subject, check, parameters


def inputs(case, key):
    a, b = jax.random.split(key)
    dtype = jnp.dtype(case.dtype)
    x = jax.random.normal(a, (case.rows, case.inner), dtype)
    w = jax.random.normal(b, (len(case.sizes), case.inner, case.outer), dtype)
    # what lies past the last group is not looked at
    return x.at[sum(case.sizes) :].set(jnp.nan), w, jnp.array(case.sizes, jnp.int32)


def run(case, implementation, interpret):
    return functools.partial(grouped_matmul, implementation=implementation, interpret=interpret)


SUBJECT = Subject(CASES, inputs, run, platforms={"gpu": "gpu"}, differentiable=(0, 1))


RAGGED = [
    pytest.param(case, "ragged", False, id=f"{case.name}-ragged") for case in CASES if case.name in ("least", "nothing")
]


@pytest.mark.parametrize(("case", "implementation", "interpret"), [*RAGGED, *parameters(SUBJECT)])
def test_battery(case, implementation, interpret, capfd):
    check(SUBJECT, case, implementation, interpret, capfd)


def test_sizes_that_cannot_be_checked_are_defined():
    """Under jit: a negative size is 0, and groups end with the rows."""
    x, w = jnp.arange(1.0, 9).reshape(4, 2), jnp.stack([jnp.eye(2), 2 * jnp.eye(2), 3 * jnp.eye(2)])
    for implementation in ("ragged", "reference"):
        run = jax.jit(functools.partial(grouped_matmul, implementation=implementation))
        np.testing.assert_array_equal(run(x, w, jnp.array([-3, 1, 9])), x * jnp.array([2, 3, 3, 3.0])[:, None])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("int8", (100, 100)), ("uint8", (200, 200)), ("int32", (3, 2**31 - 1)), ("uint32", (250, 2**32 - 1))],
)
def test_sums_of_sizes_do_not_overflow(kind, sizes):
    """Under jit, whatever the type of sizes holds; the definition counts in Python's integers."""
    rows = 300
    x, w = jnp.arange(1.0, rows + 1)[:, None], jnp.array([[[1.0]], [[2.0]]])
    ends = np.minimum(np.cumsum(np.array(sizes, object)), rows).astype(int)
    factor = np.where(np.arange(rows) < ends[0], 1.0, np.where(np.arange(rows) < ends[1], 2.0, 0.0))
    got = jax.jit(functools.partial(grouped_matmul, implementation="reference"))(x, w, jnp.array(sizes, kind))
    np.testing.assert_array_equal(got, x * factor[:, None])


def test_a_group_is_a_matmul_of_its_own():
    case = CASES[1]
    x, w, sizes = inputs(case, jax.random.key(0))
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    whole = jax.jit(grouped_matmul)(x, w, sizes)
    first = 0
    for e, size in enumerate(case.sizes):
        rows = slice(first, first + size)
        np.testing.assert_allclose(whole[rows], x[rows] @ w[e], rtol=1e-4, atol=1e-4)
        first += size


@pytest.mark.parametrize(
    "sizes", [(100, 0, 211, 201), (0, 0, 0, 0), (512, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 512), (7, 122, 129, 127)]
)
def test_the_table_covers_every_row_once(sizes):
    table = np.asarray(jax.jit(tile_table, static_argnums=1)(jnp.array(sizes), 512))
    owner = np.full(512, -1)
    for group, read_start, store_start, store_end in table.T:
        # TMA cuts a tile of 8 rows that starts elsewhere; JAX's interpreter reads it whole
        assert read_start % 8 == 0
        assert read_start <= store_start <= store_end <= read_start + 128
        assert (owner[store_start:store_end] == -1).all()
        owner[store_start:store_end] = group
    np.testing.assert_array_equal(owner, np.repeat(range(5), [*sizes, 512 - sum(sizes)]))


def test_the_table_has_room_for_the_worst_groups():
    """Every group starts one row before a multiple of 8, and its last tile has one row."""
    rng, rows = np.random.default_rng(), 1024
    table_of = jax.jit(tile_table, static_argnums=1)
    for worst in [[127, 2, 127, 1, 129, 1, 127, 2, 127], [7, 130, 130, 130, 130, 130, 130, 130, 97]]:
        np.testing.assert_equal(np.diff(np.asarray(table_of(jnp.array(worst), rows))[2:], axis=0).sum(), rows)
    for _ in range(100):
        sizes = rng.multinomial(rng.integers(0, rows + 1), rng.dirichlet(np.full(9, 0.5)))
        table = np.asarray(table_of(jnp.array(sizes), rows))
        assert (table[3] - table[2]).sum() == rows, f"sizes {sizes.tolist()}"


X, W, SIZES = jnp.ones((8, 4)), jnp.ones((2, 4, 6)), jnp.array([3, 5])
BAD = [
    ({"x": jnp.ones(4)}, r"x \(4,\) and w \(2, 4, 6\), expected \(M, D\) and \(E, D, F\)"),
    ({"x": jnp.ones((8, 5))}, r"x \(8, 5\)"),
    ({"x": jnp.ones((0, 4))}, "none empty"),
    ({"w": W.astype(jnp.bfloat16)}, "type float32 and w of type bfloat16"),
    ({"x": X.astype(int), "w": W.astype(int)}, "one floating-point type"),
    ({"sizes": jnp.array([3, 4, 1])}, r"shape \(3,\), expected integers of shape \(2,\)"),
    ({"sizes": jnp.array([3.0, 5.0])}, "sizes of type float32"),
    ({"sizes": jnp.array([-1, 5])}, r"sizes \[-1, 5\], expected none negative"),
    ({"sizes": jnp.array([4, 5])}, "at most 8 in total"),
    ({"implementation": "rag"}, "unknown implementation 'rag'"),
    ({"interpret": True}, "interpret needs a named"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        grouped_matmul(**{"x": X, "w": W, "sizes": SIZES, **fields})


@pytest.mark.parametrize(
    ("platform", "shape", "dtype", "says"),
    [
        ("cpu", (128, 128, 128), "bfloat16", "the target is cpu"),
        ("gpu a100", (128, 128, 128), "bfloat16", "compute capability 9.0"),
        ("gpu h200", (128, 128, 128), "float32", "bfloat16 or float16, not float32"),
        ("gpu h200", (128, 128, 96), "bfloat16", "multiples of 128, not 128 and 96"),
        ("gpu h200", (64, 128, 128), "bfloat16", "at least 128 rows, not 64"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(platform, shape, dtype, says):
    rows, inner, outer = shape
    x, w = jnp.zeros((rows, inner), dtype), jnp.zeros((1, inner, outer), dtype)
    with pytest.raises(NotImplementedError, match=says):
        grouped_matmul(x, w, jnp.array([rows]), platform=platform, implementation="gpu")


def test_what_runs_where():
    for case in CASES:
        assert explain(case, "tpu v5e").chosen == explain(case, "cpu").chosen == "ragged"
        assert explain(case, "gpu h200").chosen == "gpu"


def test_tiles_fit():
    assert all(columns % default_tiles(columns).columns == 0 for columns in range(128, 4096, 128))
    with pytest.raises(ValueError, match="262144 bytes of shared memory, expected <= 232448"):
        Tiles(256, 4)
    with pytest.raises(ValueError, match="expected 64, 128 or 256 columns"):
        Tiles(96)
