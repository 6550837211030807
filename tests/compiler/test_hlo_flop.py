"""FLOP of compiled programs, against the count of their jaxprs (an independent implementation) and closed forms."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxscale.compiler.hlo_flop import ProgramFlop, program_flop
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.programs.flop import count_flop


def compiled(fn, *shapes) -> ProgramFlop:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_flop(HloProgram(jax.jit(fn).lower(*arguments).compile().as_text()))


def conv(x, w, **options):
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


IMAGE, KERNEL = (4, 12, 10, 8), (3, 3, 8, 16)
PROGRAMS = {
    "product": (lambda x, w: x @ w, (32, 64), (64, 16)),
    "batched": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (4, 32, 64), (4, 64, 16)),
    "scan": (lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (8, 16), (5, 16, 16)),
    "scans in a scan": (
        lambda x, w: lax.scan(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w), x, w)[0],
        (8, 16),
        (3, 5, 16, 16),
    ),
    "gradient of a scan": (
        jax.grad(lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum(), 1),
        (8, 16),
        (5, 16, 16),
    ),
    "convolution": (conv, IMAGE, KERNEL),
    "strided": (functools.partial(conv, window_strides=(2, 2)), IMAGE, KERNEL),
    "dilated": (functools.partial(conv, rhs_dilation=(2, 2)), IMAGE, KERNEL),
    "padded": (functools.partial(conv, padding=[(2, 1), (0, 3)]), IMAGE, KERNEL),
    "depthwise": (functools.partial(conv, feature_group_count=8), IMAGE, (3, 3, 1, 16)),
    "gradients of a convolution": (jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1)), IMAGE, KERNEL),
    "gradients of a strided one": (
        jax.grad(lambda x, w: (conv(x, w, window_strides=(2, 2)) ** 2).sum(), (0, 1)),
        IMAGE,
        KERNEL,
    ),
    "gradients of a depthwise one": (
        jax.grad(lambda x, w: (conv(x, w, feature_group_count=8) ** 2).sum(), (0, 1)),
        IMAGE,
        (3, 3, 1, 16),
    ),
    "the dearest branch": (
        lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w),
        (32, 64),
        (64, 64),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_the_jaxpr(name):
    fn, *shapes = PROGRAMS[name]
    expected = count_flop(fn, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).total
    assert expected > 0
    assert compiled(fn, *shapes) == ProgramFlop(expected)


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    found = compiled(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), (16, 16))
    assert found == ProgramFlop(2 * 16**3, unknown_loops=1)


# spellings of libraries and kernels, as XLA:GPU and XLA:TPU print them
GEMM = """
ENTRY %main (x: bf16[64,32], w: bf16[32,16]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %call = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %y = bf16[64,16]{1,0} get-tuple-element(%call), index=0
}
"""
CUDNN = """
ENTRY %main (a: bf16[4,12,10,8], b: bf16[3,3,8,16]) -> bf16[4,12,10,16] {{
  %a = bf16[{a}]{{3,2,1,0}} parameter(0)
  %b = bf16[{b}]{{3,2,1,0}} parameter(1)
  ROOT %call = (bf16[{out}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{kind}"
}}
"""
SAID = """
ENTRY %main (x: f32[512,512]) -> f32[512,512] {
  %x = f32[512,512]{1,0} parameter(0)
  %said = f32[512,512]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"AA","cost_estimate":{"flops":"1000","transcendentals":"5"}}}
  ROOT %silent = f32[512,512]{1,0} custom-call(%said), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"AA"}}
}
"""


def test_a_library_s_product():
    assert program_flop(HloProgram(GEMM)).total == 2 * 64 * 32 * 16


@pytest.mark.parametrize(("kind", "places"), [("Forward", "abo"), ("BackwardInput", "oba"), ("BackwardFilter", "aob")])
def test_a_library_s_convolution(kind, places):
    """Input, kernel and output, of which two are given and the third computed: the same work."""
    shapes = dict(zip(places, ("4,12,10,8", "3,3,8,16", "4,12,10,16"), strict=True))
    text = CUDNN.format(a=shapes["a"], b=shapes["b"], out=shapes["o"], kind=kind)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (IMAGE, KERNEL))
    assert program_flop(HloProgram(text)).total == count_flop(conv, x, w).total


def test_a_kernel_s_own_word():
    assert program_flop(HloProgram(SAID)) == ProgramFlop(1000, silent_kernels=1)
