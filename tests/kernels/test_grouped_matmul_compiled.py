"""Grouped matmul as compilers of absent chips have it: a kernel each, nothing spilled, no masked operand in memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case
from tests.kernels.aot import compiled, gpu_compiler, lowered, tpu_compiler

LARGE = next(case for case in CASES if "aot" in case.tags)
MIDDLE = Case("middle", 2048, 512, 256, (512,) * 4)


def program(case, backward, devices):
    make, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    groups = len(case.sizes)
    x, w = make((case.rows, case.inner), dtype), make((groups, case.inner, case.outer), dtype)
    sizes, dy = make((groups,), jnp.int32), make((case.rows, case.outer), dtype)

    def gradients(x, w, sizes, dy):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](dy)

    return (
        lowered(devices, gradients, [x, w, sizes, dy]) if backward else lowered(devices, grouped_matmul, [x, w, sizes])
    )


def programs(case):
    return {"forward": functools.partial(program, case, False), "backward": functools.partial(program, case, True)}


def proved(found):
    assert [one.error for one in found.values()] == [None] * 2
    assert (found["forward"].kernels, found["backward"].kernels) == (1, 2)
    assert [one.spilled for one in found.values()] == [0, 0]
    assert not any("C7512" in one.said for one in found.values())
    assert max(one.temp for one in found.values()) <= 2**20


@gpu_compiler
def test_hopper():
    proved(compiled("gpu h200", programs(MIDDLE)))


@pytest.mark.slow
@gpu_compiler
def test_every_case_on_hopper():
    proved(compiled("gpu h200", programs(LARGE)))


@pytest.mark.slow
@gpu_compiler
def test_any_number_of_rows_on_hopper():
    """Rows are filled up to a multiple of 8, which takes a copy of them."""
    found = {}
    for rows in (130, 300, 1003):
        case = Case("", rows, 128, 256, (rows,) * 2)
        found |= {f"{rows} {name}": one for name, one in programs(case).items()}
    found = compiled("gpu h200", found)
    assert {name: one.error for name, one in found.items()} == dict.fromkeys(found)
    assert [one.kernels for one in found.values()] == [1, 2] * 3
    assert [one.spilled for one in found.values()] == [0] * 6


@pytest.mark.slow
@tpu_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_ragged_dot_on_tpu(chip):
    """It is XLA's kernel: no operand of rows times groups is made."""
    found = compiled(f"tpu {chip}:2x2", programs(LARGE))
    assert [one.error for one in found.values()] == [None] * 2
    masked = 2 * LARGE.rows * LARGE.inner * len(LARGE.sizes)
    assert max(one.temp for one in found.values()) < masked
