"""Kernels under `jax.vmap`: mapped, with the values of a loop, or refused by name."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.adam8.api import Settings, adam8, hyper
from pallas_kernels.attention.api import attention
from pallas_kernels.cross_entropy.api import cross_entropy
from pallas_kernels.dispatch import CannotRun
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.norm.api import rms_norm
from pallas_kernels.quantize.api import quantize
from pallas_kernels.top_k.api import top_k
from tests.kernels.aot import compiled, gpu_compiler, lowered, tpu_compiler
from tests.kernels.battery import GPU_INTERPRETER

MAPS_REFERENCES = jax.__version_info__ >= (0, 12)
F32, BF16 = jnp.float32, jnp.bfloat16


def _slopes(function, *arrays):
    """Gradients by all arrays of the sum."""
    return jax.grad(lambda *x: function(*x).astype(F32).sum(), tuple(range(len(arrays))))(*arrays)


def programs(**how):
    """By kernel, a function of arrays without the mapped dim, and the shapes and types of these with it."""
    step = functools.partial(adam8, hyper=hyper(0.1, 1, Settings()), settings=Settings(block=128), **how)

    def moment(kind):
        return (((2, 256, 128), kind), ((2, 2, 128), F32))

    matrix, heads = ((2, 256, 128), F32), lambda count: ((2, 1, 128, count, 64), BF16)
    return {
        "attention": (lambda *x: _slopes(functools.partial(attention, **how), *x), (heads(2), heads(1), heads(1))),
        "norm": (lambda x: _slopes(lambda x: rms_norm(x, jnp.ones(512), **how) ** 2, x), (((2, 64, 512), F32),)),
        "quantize": (functools.partial(quantize, **how), (matrix,)),
        "top_k": (functools.partial(top_k, k=4, **how), (matrix,)),
        "adam8": (
            lambda p, g, codes, scale, v_codes, v_scale: step(p, g, (codes, scale), (v_codes, v_scale)),
            (matrix, matrix, *moment(jnp.int8), *moment(jnp.uint8)),
        ),
        "grouped_matmul": (
            functools.partial(grouped_matmul, **how),
            (((2, 256, 128), BF16), ((2, 2, 128, 128), BF16), ((2, 2), jnp.int32)),
        ),
        "cross_entropy": (
            lambda x, head, labels: _slopes(lambda x, head: cross_entropy(x, head, labels, **how)[0], x, head),
            (matrix, ((2, 200, 128), F32), ((2, 256), jnp.int32)),
        ),
    }


def _drawn(shapes):
    """Numbers of these types; whole ones are small and not negative."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape, kind)
        if jnp.issubdtype(kind, jnp.floating)
        else jax.random.randint(key, shape, 0, 100).astype(kind)
        for key, (shape, kind) in zip(keys, shapes, strict=True)
    ]


WAYS = [
    ("quantize", "tpu"),
    *(
        pytest.param(kernel, way, marks=pytest.mark.slow)
        for kernel in ("attention", "norm", "quantize", "top_k", "adam8", "grouped_matmul", "cross_entropy")
        for way in ("reference", "tpu", *(["gpu"] if GPU_INTERPRETER else []))
        if (kernel, way) not in (("grouped_matmul", "tpu"), ("cross_entropy", "gpu"))
        and (kernel, way) != ("quantize", "tpu")
    ),
]


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_mapped_kernels_are_loops(kernel, way):
    function, shapes = programs(implementation=way, interpret=way != "reference")[kernel]
    given = _drawn(shapes)
    mapped = jax.jit(jax.vmap(function))(*given)
    alone = jax.jit(function)
    looped = [alone(*(x[i] for x in given)) for i in range(2)]
    for got, *parts in zip(*map(jax.tree.leaves, (mapped, *looped)), strict=True):
        want = jnp.stack(parts)
        assert got.dtype == want.dtype
        # XLA may add the parts of a plain product in another order
        near = {"rtol": 1e-2, "atol": 2e-2} if got.dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}
        exact = way != "reference" or jnp.issubdtype(got.dtype, jnp.integer)
        np.testing.assert_allclose(got.astype(F32), want.astype(F32), **({"rtol": 0} if exact else near))


def test_what_jax_cannot_map_is_refused_by_name():
    """JAX before 0.12 cannot map a GPU's kernel over references."""
    function, shapes = programs(platform="gpu h200")["adam8"]
    refused = pytest.raises(
        CannotRun,
        match=r"adam8: JAX .* cannot map implementation gpu by jax.vmap: .*or pass implementation='reference'",
    )
    with contextlib.nullcontext() if MAPS_REFERENCES else refused:
        jax.jit(jax.vmap(function)).trace(*(jax.ShapeDtypeStruct(*one) for one in shapes))


def program(kernel, devices):
    named = {"implementation": "tpu"} if kernel == "cross_entropy" else {}
    function, shapes = programs(**named)[kernel]
    return lowered(devices, jax.vmap(function), [jax.ShapeDtypeStruct(*one) for one in shapes])


@pytest.mark.slow
@tpu_compiler
def test_mapped_on_tpu():
    """As many kernels as without the map."""
    counts = {"attention": 3, "norm": 2, "quantize": 1, "top_k": 1, "adam8": 1, "cross_entropy": 3}
    found = compiled("tpu v5e:2x2", {kernel: functools.partial(program, kernel) for kernel in counts})
    assert {kernel: one.error for kernel, one in found.items()} == dict.fromkeys(counts)
    assert {kernel: one.kernels for kernel, one in found.items()} == counts


@pytest.mark.slow
@gpu_compiler
def test_mapped_on_hopper():
    counts = {"attention": 3, "norm": 2, "quantize": 1, "top_k": 1, "grouped_matmul": 1}
    counts |= {"adam8": 1} if MAPS_REFERENCES else {}
    found = compiled("gpu h200 x 2", {kernel: functools.partial(program, kernel) for kernel in counts})
    assert {kernel: one.error for kernel, one in found.items()} == dict.fromkeys(counts)
    assert {kernel: one.kernels for kernel, one in found.items()} == counts
    assert all(one.spilled == 0 for kernel, one in found.items() if kernel != "attention")
