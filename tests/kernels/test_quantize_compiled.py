"""Quantization and block top-k as compilers of absent chips have them: one kernel, nothing temporary, nothing sent."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.quantize import cases as quantize_cases
from pallas_kernels.quantize.api import quantize
from pallas_kernels.top_k import cases as top_k_cases
from pallas_kernels.top_k.api import explain, top_k
from tests.kernels.aot import compiled, gpu_compiler, lowered, tpu_compiler

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in quantize_cases.CASES if "aot" in case.tags}
LARGEST = {f"top_k {case.name}": case for case in top_k_cases.CASES if "aot" in case.tags}
LIMITS = {
    f"top_k {name} {dtype}": dataclasses.replace(case, dtype=dtype)
    for name, case in {
        "rows of 2048": top_k_cases.Case("", 1001, 2048, 128, block=2048, axis=-1),
        "rows of 2016": top_k_cases.Case("", 1001, 2016, 20, block=2016, axis=-1),
        "rows of 3 x 32": top_k_cases.Case("", 1001, 96, 32, block=32, axis=-1),
        "three rows": top_k_cases.Case("", 3, 768, 8, block=768, axis=-1),
        "columns of 256": top_k_cases.Case("", 2048, 1024, 128, block=256),
    }.items()
    for dtype in ("float32", "bfloat16")
}
"""What Hopper's kernel holds in registers at most, and blocks that are no whole number of tiles."""
EDGES = {
    f"quantize{bits} {axis} {dtype}": quantize_cases.Case("", 1024, 256, bits, 256, axis, dtype)
    for bits in (8, 4)
    for axis in (-1, -2)
    for dtype in ("float32", "bfloat16")
}
"""The largest blocks of Hopper's quantization."""


def program(case, devices):
    if isinstance(case, top_k_cases.Case):
        run = functools.partial(top_k, k=case.k, block=case.block, axis=case.axis)
    else:
        run = functools.partial(quantize, bits=case.bits, block=case.block, axis=case.axis)
    return lowered(devices, run, [jax.ShapeDtypeStruct((case.rows, case.cols), jnp.dtype(case.dtype))])


def layers(devices, check_vma=False):
    """Of stacked layers, inside a `shard_map`: what a codec of gradients does."""

    def local(x):
        return jax.vmap(functools.partial(quantize, bits=4, block=256, axis=-1))(x)

    def run(x):
        return jax.shard_map(local, in_specs=jax.P(None, "x"), out_specs=jax.P(None, "x"), check_vma=check_vma)(x)

    given = [jax.ShapeDtypeStruct((3, 2048, 256), jnp.float32)]
    return lowered(devices, run, given, mesh={"x": 2}, specs=(jax.P(None, "x"),))


def proved(programs, found):
    for name, one in found.items():
        assert one.error is None, name
        assert (one.kernels, one.collectives, one.spilled) == (1, 0, 0), name
        assert one.temp <= 1024, name  # pointers of a tuple of results
        assert "C7512" not in one.said
    assert found.keys() == programs.keys()


@tpu_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_tpu(chip):
    programs: dict[str, Any] = {name: functools.partial(program, case) for name, case in (CASES | LARGEST).items()}
    programs |= {"layers": layers, "typed layers": functools.partial(layers, check_vma=True)}
    proved(programs, compiled(f"tpu {chip}:2x2", programs))


@gpu_compiler
def test_hopper():
    assert {explain(case, "gpu h200").chosen for case in (LARGEST | LIMITS).values()} == {"gpu"}
    programs: dict[str, Any] = {
        name: functools.partial(program, case) for name, case in (CASES | LARGEST | LIMITS | EDGES).items()
    }
    programs |= {"layers": layers, "typed layers": functools.partial(layers, check_vma=True)}
    proved(programs, compiled("gpu h200 x 2", programs))
