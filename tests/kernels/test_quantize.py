"""Quantization: the battery, the definition against the codecs' own, its properties, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.replicas import integers
from pallas_kernels.quantize.api import dequantize, explain, quantize
from pallas_kernels.quantize.cases import CASES, Case
from pallas_kernels.quantize.reference import MIN_SCALE, max_code
from pallas_kernels.quantize.tpu import Tiles, candidates
from tests.kernels.battery import TOLERANCE, Subject, check, close, parameters


def array(case, key):
    """Numbers of many sizes; a block of zeros, one of numbers too small, one of equal numbers."""
    a, b = jax.random.split(key)
    shape = (case.rows, case.cols)
    x = jax.random.normal(a, shape) * jnp.exp(2 * jax.random.normal(b, shape))
    for i, value in ((3, 0.0), (5, 1e-32), (7, -2.5)):
        x = x.at[: case.block, i].set(value) if case.axis == -2 else x.at[i].set(value)
    return (x.astype(case.dtype),)


def run(case, implementation, interpret):
    return functools.partial(
        quantize,
        bits=case.bits,
        block=case.block,
        axis=case.axis,
        implementation=implementation,
        interpret=interpret,
    )


def numbers(codes, bits):
    """Codes one by one, as int64."""
    whole = np.asarray(codes).astype(np.int64)
    return whole if bits == 8 else np.stack([((whole & 15) ^ 8) - 8, whole >> 4])


def compare(case, got, want):
    """Scales are the same; of the codes at most one in a thousand is the next one, where two are as near."""
    close(got[1], want[1], TOLERANCE, "scales")
    assert got[0].shape == want[0].shape
    assert got[0].dtype == jnp.int8
    off = np.abs(numbers(got[0], case.bits) - numbers(want[0], case.bits))
    assert off.max() <= 1
    assert (off > 0).mean() <= 1e-3


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


@pytest.mark.parametrize("bits", [8, 4])
def test_the_definition_is_the_codecs(bits):
    """Along the rows: codes and scales of `replicas.integers`, to the bit."""
    case = Case("", 16, 64, bits, 64, -1, "float32")
    (x,) = array(case, jax.random.key(0))
    codes, scale = quantize(x, bits=bits, block=64, axis=-1, implementation="reference")
    theirs = integers.encode_integers(x, bits, 64, None)
    np.testing.assert_array_equal(codes[:, None], theirs.codes)
    np.testing.assert_array_equal(scale, theirs.scale)
    ours = dequantize(codes, scale, bits=bits, block=64, axis=-1)
    np.testing.assert_array_equal(ours, integers.decode_integers(integers.IntegerCodes(codes[:, None], scale), bits))


@pytest.mark.parametrize(("bits", "axis"), [(8, -2), (4, -2), (8, -1), (4, -1)])
def test_properties(bits, axis):
    """Off by half a step at most, but in a block that counts as zeros; quantized again it is the same."""
    case = Case("", 64, 64, bits, 32, axis, "float32")
    (x,) = array(case, jax.random.key(bits))
    here = {"bits": bits, "block": 32, "axis": axis}
    codes, scale = quantize(x, **here)
    told = dequantize(codes, scale, **here)
    whole = np.repeat(scale, 32, axis)
    assert (np.abs(told - x) <= np.maximum(whole / (2 * max_code(bits)) * 1.0001, MIN_SCALE)).all()
    again, _ = quantize(told, **here)
    np.testing.assert_array_equal(again, codes)


BAD = [
    ({"x": jnp.zeros(64)}, r"shape \(64,\), expected \(R, C\)"),
    ({"x": jnp.zeros((0, 64))}, "without a dim of size 0"),
    ({"x": jnp.zeros((64, 64), jnp.int32)}, "got int32, expected float32 or bfloat16"),
    ({"bits": 5}, "5 bits, expected 8 or 4"),
    ({"axis": 0}, "axis 0, expected -2"),
    ({"block": 48}, "blocks of 48 along dim -2.*a divisor of 64"),
    ({"block": 1, "bits": 4}, "an even divisor of 64"),
    ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ({"interpret": True}, "interpret needs a named"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        quantize(**{"x": jnp.zeros((64, 64)), "block": 32, **fields})


def test_codes_of_other_scales_are_refused():
    with pytest.raises(ValueError, match=r"codes int8\[64, 8\] and scales \[3, 8\], expected .* scales \[2, 8\]"):
        dequantize(jnp.zeros((64, 8), jnp.int8), jnp.zeros((3, 8)), block=32)


@pytest.mark.parametrize(
    ("platform", "fields", "says"),
    [
        ("cpu", {"implementation": "tpu"}, "the target is cpu"),
        ("gpu a100", {"implementation": "gpu"}, "compute capability 9.0"),
        ("gpu h200", {"implementation": "gpu", "block": 32}, "blocks of 64, 128, 256, not 32"),
        ("gpu h200", {"implementation": "gpu", "block": 64, "bits": 4}, "blocks of 128, 256, not 64"),
        ("tpu v5e", {"implementation": "tpu", "bits": 4, "block": 32}, "multiple of 64 rows, not 32"),
        ("tpu v5e", {"implementation": "tpu", "axis": -1, "block": 64}, "multiple of 128 up to 512, not 64"),
        ("tpu v5e", {"implementation": "tpu", "axis": -1, "block": 32}, "rows of one block, not 64 columns"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(platform, fields, says):
    with pytest.raises(NotImplementedError, match=says):
        quantize(jnp.zeros((64, 64)), **{"block": 64, "platform": platform, **fields})


def test_tiles_divide_blocks_and_fit():
    for case in (*CASES, Case("", 43 * 128, 4096), Case("", 40, 128, axis=-1)):
        found = candidates(case)
        assert found
        assert all(tiles.rows % case.block == 0 or case.axis == -1 for tiles in found)
        assert all(tiles.rows * tiles.cols <= 2**19 for tiles in found)
    with pytest.raises(ValueError, match="tiles of 0 by 8"):
        Tiles(0, 8)
