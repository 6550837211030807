"""Every kernel compiles for each TPU that it lists: its cases, and the edges of what it says it can."""

import functools

import jax
import pytest

from pallas_kernels.adam8.cases import Case as Adam
from pallas_kernels.attention.cases import CASES
from pallas_kernels.attention.cases import Case as Attention
from pallas_kernels.norm.cases import Case as Norm
from pallas_kernels.quantize.cases import Case as Quantize
from pallas_kernels.top_k.cases import Case as TopK
from tests.kernels import (
    aot,
    programs_attention,
    test_adam8_compiled,
    test_cross_entropy_compiled,
    test_norm_compiled,
    test_quantize_compiled,
)

pytestmark = [pytest.mark.slow, aot.tpu_compiler]
PLACES = {"v4": "tpu v4:2x2x1", "v5e": "tpu v5e:2x2", "v5p": "tpu v5p:2x2x1", "v6e": "tpu v6e:2x2"}
if jax.__version_info__ >= (0, 12):  # before, JAX cannot read the programs that libtpu makes for a 7x
    PLACES["7x"] = "tpu 7x:2x2x1"


def attention(chip):
    wide = [Attention("", 1024, 1024, 4, 2, 256, dtype=kind, soft_cap=5.0, segments=2) for kind in KINDS]
    known = [case for case in CASES if "aot" in case.tags]
    return [functools.partial(programs_attention.gradient, case=case) for case in (*known, *wide)]


def adam8(chip):
    edges = Adam("", 1, 64 * 1024, 256, 1024), Adam("", 1, 32 * 1000, 512, 32), Adam("", 1, 4096, 96, 256, "dynamic8")
    cases = [case for case in test_adam8_compiled.AOT if chip != "v4" or case.map != "dynamic8"]
    return [functools.partial(test_adam8_compiled.program, case) for case in (*cases, *edges)]


def rounded(chip):
    """Quantization and top-k."""
    edges = []
    for kind in KINDS:
        edges += [Quantize("", 1000, 512, bits, 512, -1, kind) for bits in (8, 4)]
        edges += [Quantize("", 2048 * 100, 256, 8, 2048, -2, kind), Quantize("", 64 * 1000, 512, 4, 64, -2, kind)]
        edges += [TopK("", 1001, 2048, 128, 2048, -1, kind), TopK("", 2048, 256, 16, 2048, -2, kind)]
    known = test_quantize_compiled.CASES | test_quantize_compiled.LARGEST
    return [functools.partial(test_quantize_compiled.program, case) for case in (*known.values(), *edges)]


def norm(chip):
    widest = [Norm("", 256, 16384, kind, center=True, bias=True, residual=True) for kind in KINDS]
    make, cases = test_norm_compiled, (*test_norm_compiled.AOT.values(), *widest)
    return [functools.partial(make.program, way, case, None) for way in (make.norm, make.gradient) for case in cases]


def cross_entropy(chip):
    cases = (test_cross_entropy_compiled.MIDDLE, test_cross_entropy_compiled.LARGE) if chip != "v4" else ()
    return [functools.partial(test_cross_entropy_compiled.program, case, "tpu") for case in cases]


KINDS = ("float32", "bfloat16")


@pytest.mark.parametrize("chip", PLACES)
def test_every_listed_chip(chip):
    asked = {
        f"{make.__name__} {i}": program
        for make in (attention, adam8, rounded, norm, cross_entropy)
        for i, program in enumerate(make(chip))
    }
    found = aot.compiled(PLACES[chip], asked)
    assert {name: one.error for name, one in found.items() if one.error} == {}
    assert [name for name, one in found.items() if not one.kernels] == []
