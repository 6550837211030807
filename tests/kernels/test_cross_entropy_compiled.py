"""Cross-entropy as compilers of absent chips have it: a chunk of logits at a time, or, by the TPU kernel, none."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cross_entropy.api import cross_entropy
from pallas_kernels.cross_entropy.cases import CASES, Case
from tests.kernels.aot import compiled, gpu_compiler, lowered, tpu_compiler

LARGE = next(case for case in CASES if "aot" in case.tags)
MIDDLE = Case("middle", 256, 256, 1000)


def program(case, implementation, devices):
    """The sum, and gradients of x and of the head."""
    make, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    args = make((case.rows, case.width), dtype), make((case.head, case.width), dtype), make((case.rows,), jnp.int32)

    def run(*args):
        return jax.value_and_grad(lambda *a: cross_entropy(*a, implementation=implementation)[0], (0, 1))(*args)

    return lowered(devices, run, args)


def sharded(implementation, devices):
    """The vocabulary over "x"."""
    make = jax.ShapeDtypeStruct
    args = make((2048, 1024), jnp.bfloat16), make((16384, 1024), jnp.bfloat16), make((2048,), jnp.int32)

    def run(x, head, labels):
        def local(x, head, labels):
            return cross_entropy(x, head, labels, axis="x", chunk=1024, implementation=implementation)[0]

        specs = jax.P(), jax.P("x"), jax.P()
        return jax.shard_map(local, in_specs=specs, out_specs=jax.P())(x, head, labels)

    grad = jax.value_and_grad(run, (0, 1))
    return lowered(devices, grad, args, mesh={"x": 2}, specs=(jax.P(), jax.P("x"), jax.P()))


def logits(case):
    """Bytes of all logits in float32."""
    return 4 * case.rows * case.head


@tpu_compiler
def test_tpu_kernel():
    """Three kernels, one forward and two backward, and as good as nothing temporary."""
    found = compiled("tpu v5e:2x2", {"tpu": functools.partial(program, MIDDLE, "tpu")})["tpu"]
    assert found.error is None
    assert (found.kernels, found.collectives) == (3, 0)
    assert found.temp <= 2**20


@pytest.mark.slow
@tpu_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_every_case_on_tpu(chip):
    programs = {name: functools.partial(program, LARGE, name) for name in ("tpu", "chunked")}
    programs["sharded"] = functools.partial(sharded, "tpu")
    found = compiled(f"tpu {chip}:2x2", programs)
    assert [one.error for one in found.values()] == [None] * 3
    assert (found["tpu"].kernels, found["sharded"].kernels) == (3, 3)
    assert found["tpu"].temp <= 2**20
    assert found["chunked"].temp <= 3.3e9
    assert found["chunked"].temp < logits(LARGE)


@pytest.mark.slow
@gpu_compiler
def test_chunks_on_hopper():
    """A chunk's logits, in two types, and the head's gradient in float32: no more."""
    programs = {"whole": functools.partial(program, LARGE, None), "sharded": functools.partial(sharded, None)}
    found = compiled("gpu h200 x 2", programs)
    assert [one.error for one in found.values()] == [None] * 2
    assert found["whole"].temp <= 4 * LARGE.head * LARGE.width + 8 * 2048 * LARGE.head
