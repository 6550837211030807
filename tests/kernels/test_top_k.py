"""Block top-k: the battery, the definition against the codecs' own, its properties, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.replicas import TopK
from pallas_kernels.top_k.api import explain, top_k
from pallas_kernels.top_k.cases import CASES, Case
from pallas_kernels.top_k.tpu import Tiles, candidates
from tests.kernels.battery import Subject, check, parameters


def array(case, key):
    """Numbers of which many are as large; a block of zeros, one of equal numbers, one with NaN and infinities."""
    x = jnp.round(jax.random.normal(key, (case.rows, case.cols)) * 8) / 8
    for i, value in ((3, 0.0), (5, -1.0)):
        x = x.at[: case.block, i].set(value) if case.axis == -2 else x.at[i].set(value)
    return (x.at[8, 8].set(jnp.inf).at[9, 9].set(jnp.nan).astype(case.dtype),)


def run(case, implementation, interpret):
    return functools.partial(
        top_k, k=case.k, block=case.block, axis=case.axis, implementation=implementation, interpret=interpret
    )


def compare(case, got, want):
    """To the bit, ties too."""
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0].astype(jnp.float32), want[0].astype(jnp.float32))


SUBJECT = Subject(
    CASES,
    array,
    run,
    supports=lambda case, name: explain(case, {"tpu": "tpu v5e", "gpu": "gpu h200"}[name]).chosen == name,
    compare=compare,
)


@pytest.mark.parametrize(("case", "implementation", "interpret"), parameters(SUBJECT))
def test_battery(case, implementation, interpret, capfd):
    check(SUBJECT, case, implementation, interpret, capfd)


def test_the_definition_is_the_codecs():
    case = Case("", 16, 64, 5, 64, -1, "float32")
    (x,) = array(case, jax.random.key(0))
    values, places = top_k(x, 5, block=64, axis=-1)
    kept = TopK(5 / 64, block=64).encode(x.reshape(-1), None)
    np.testing.assert_array_equal(values, kept.values)
    np.testing.assert_array_equal(places, kept.offsets)


@pytest.mark.parametrize("axis", [-1, -2])
def test_against_a_stable_sort(axis):
    """Largest first, the first of equal ones before the others, whichever way blocks lie."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (6, 16)).astype(np.float32)
    x[2] = 0
    order = np.argsort(-np.abs(x), axis=1, kind="stable")[:, :7]
    given = x if axis == -1 else x.T
    values, places = top_k(jnp.asarray(given), 7, block=16, axis=axis)
    values, places = (one if axis == -1 else one.T for one in (values, places))
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


BAD = [
    ({"x": jnp.zeros(64)}, r"shape \(64,\), expected \(R, C\)"),
    ({"x": jnp.zeros((64, 0))}, "without a dim of size 0"),
    ({"x": jnp.zeros((64, 64), jnp.float16)}, "got float16, expected float32 or bfloat16"),
    ({"axis": 1}, "axis 1, expected -2"),
    ({"block": 48}, "blocks of 48 along dim -2.*a divisor of 64"),
    ({"k": 0}, "k=0, expected 1 to 32"),
    ({"k": 33}, "k=33, expected 1 to 32"),
    ({"implementation": "sort"}, "unknown implementation 'sort'"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        top_k(**{"x": jnp.zeros((64, 64)), "k": 2, "block": 32, **fields})


@pytest.mark.parametrize(
    ("platform", "fields", "says"),
    [
        ("cpu", {"implementation": "gpu"}, "the target is cpu"),
        ("gpu h200", {"implementation": "gpu", "block": 32}, "blocks of 64, 128, 256, not 32"),
        (
            "gpu h200",
            {"implementation": "gpu", "x": jnp.zeros((4, 256)), "axis": -1, "block": 256, "k": 129},
            "not 129",
        ),
        ("gpu h200", {"implementation": "gpu", "axis": -1, "block": 16}, "a multiple of 32 up to 2048, not 16"),
        ("gpu h200", {"implementation": "gpu", "x": jnp.zeros((1, 4096)), "axis": -1, "block": 4096}, "not 4096"),
        ("tpu v5e", {"implementation": "tpu", "block": 8}, "multiple of 16 up to 2048, not 8"),
        ("tpu v5e", {"implementation": "tpu", "axis": -1, "block": 32}, "rows of one block, not 64 columns"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(platform, fields, says):
    with pytest.raises(NotImplementedError, match=says):
        top_k(**{"x": jnp.zeros((64, 64)), "k": 2, "block": 64, "platform": platform, **fields})


def test_the_codec_takes_the_kernel_on_hopper():
    """Of the blocks that it makes by default, and of a shorter leaf's."""
    for elements in (10**6, 1024, 768):
        blocks, block, kept = TopK(0.01).sizes(elements)
        assert explain(Case("", blocks, block, kept, block, -1, "float32"), "gpu h200").chosen == "gpu"


@pytest.mark.parametrize(("platform", "name"), [("tpu v5e", "tpu"), ("gpu h200", "gpu")])
@pytest.mark.parametrize("axis", [-1, -2])
def test_code_is_as_long_for_many_rounds_and_blocks(axis, platform, name):
    """Compilers take as long as the code is, and a bar of 5 s holds for any k."""
    how = {"block": 128, "axis": axis, "platform": platform, "implementation": name}

    def maxima(k, blocks):
        x = jnp.zeros((blocks * 128, 128))
        return str(jax.make_jaxpr(lambda x: top_k(x, k, **how))(x)).count("reduce_max")

    assert maxima(8, 2) == maxima(128, 2) == maxima(8, 16) <= 2


def test_tiles_divide_blocks():
    odd = Case("", 43 * 256, 4096, 3, 256)
    assert candidates(odd) == []
    assert "not 43 blocks of 3" in explain(odd, "tpu v5e").reasons["tpu"]
    for case in CASES:
        found = candidates(case)
        assert found
        assert all(tiles.rows % case.block == 0 or case.axis == -1 for tiles in found)
    with pytest.raises(ValueError, match="tiles of 0 by 8"):
        Tiles(0, 8)
