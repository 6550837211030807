"""Attention, compiled for chips that are not here: kernels, bytes, registers, and what rematerialization runs again."""

import functools
import re

import pytest

from jaxscale.compiler.collectives import collectives
from pallas_kernels.attention.cases import CASES
from tests.kernels import aot, programs_attention

pytestmark = pytest.mark.slow

COMPILED = {case.name: case for case in CASES if "aot" in case.tags}
SPILLS = {"causal_4k": 24, "part_8k": 24, "window_4k": 396, "wide_4k": 2048}
"""Bytes that ptxas may spill, stores and loads: the passes for dk and dv (without options by JAX 0.12's compiler
alone; with a cap and segments), and for dq of heads of 256."""


def programs(names=COMPILED):
    made = {}
    for name in names:
        for one in (programs_attention.forward, programs_attention.gradient):
            made[name, one.__name__] = functools.partial(one, case=COMPILED[name])
    return made


def check(found, copied):
    """Each program runs the kernels, and holds nothing but an output and a number per query beside them.

    Copies into the kernels' order of dims, in bytes of the queries, are `copied`.
    """
    for (name, which), one in found.items():
        assert one.error is None, (name, which, one.error)
        assert one.kernels == {"forward": 1, "gradient": 4 if name == "wide_4k" and one.said else 3}[which], (
            name,
            which,
        )
        assert one.collectives == 0
        case = COMPILED[name]
        queries = 2 * case.B * case.T * case.N * case.H  # bytes of them
        held = {"forward": 0, "gradient": 1}[which]  # the output, where it is no result
        if case.H == 64:  # on TPU they lie in lanes of 128, and are copied there
            held = {"forward": 2, "gradient": 6}[which]
        assert one.temp <= (max(held, copied[which]) + 0.25) * queries, (name, which)


@aot.tpu_compiler
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_on_tpu(chip):
    names = COMPILED if chip.startswith("v5e") else ("causal_4k", "window_4k")
    # on v5e XLA copies where arguments and results lie
    copied = {"forward": 0, "gradient": 0} if chip.startswith("v5e") else {"forward": 2.5, "gradient": 6}
    check(aot.compiled(f"tpu {chip}", programs(names)), copied)


@aot.gpu_compiler
def test_on_a_gpu():
    """No register is spilled but where it is known, and wgmma is not serialized (ptxas' C7512)."""
    found = aot.compiled("gpu h200", programs())
    check(found, {"forward": 0, "gradient": 0})
    for (name, which), one in found.items():
        assert "C7512" not in one.said, (name, which)
        assert one.spilled <= SPILLS.get(name, 0), (name, which, one.said)


@pytest.mark.parametrize(
    "platform",
    [pytest.param("tpu v5e:2x2", marks=aot.tpu_compiler), pytest.param("gpu h200 x 4", marks=aot.gpu_compiler)],
)
def test_kept_residuals_spare_the_second_forward(platform):
    """A scan over layers under shard_map and checkpoint: three kernels, and four where nothing is kept."""
    ways = {
        (keep, check_vma): functools.partial(programs_attention.rematerialized, keep=keep, check_vma=check_vma)
        for keep, check_vma in ((True, True), (False, True), (True, False))
    }
    found = aot.compiled(platform, ways)
    assert {way: one.error for way, one in found.items()} == dict.fromkeys(ways)
    assert {way: one.kernels for way, one in found.items()} == {way: 3 if way[0] else 4 for way in ways}


@pytest.mark.parametrize(
    "platform",
    [pytest.param("tpu v5e:2x2", marks=aot.tpu_compiler), pytest.param("gpu h200 x 4", marks=aot.gpu_compiler)],
)
def test_parts_of_a_sequence_under_shard_map(platform):
    """Three kernels, and nothing crosses devices but keys' and values' gradients, where types or their lack say so."""
    ways = {check_vma: functools.partial(programs_attention.parts, check_vma=check_vma) for check_vma in (True, False)}
    found = aot.compiled(platform, ways)
    assert {way: one.error for way, one in found.items()} == dict.fromkeys(ways)
    for one in found.values():
        assert one.kernels == 3
        assert not re.search(r"all-gather(-start)?\(|all-to-all\(|collective-permute(-start)?\(", one.hlo)
        assert 1 <= one.collectives <= 2


@aot.gpu_compiler
def test_other_gpus_take_the_plain_ways():
    """None never fails for want of a kernel: an A100 has no wgmma."""
    found = aot.compiled("gpu a100-80", programs(["causal_4k"]))
    assert {one.error for one in found.values()} == {None}
    assert {one.kernels for one in found.values()} == {0}


@pytest.mark.parametrize(
    ("platform", "mesh"),
    [
        pytest.param("tpu v5e:4x4", "fsdp:8,tensor:2", marks=aot.tpu_compiler),
        pytest.param("gpu h200 x 8", "fsdp:4,tensor:2", marks=aot.gpu_compiler),
        pytest.param("tpu v5e:2x2", "sequence:4", marks=aot.tpu_compiler),
        pytest.param("gpu h200 x 4", "sequence:4", marks=aot.gpu_compiler),
    ],
)
def test_a_train_step_has_the_kernels_and_no_scores(platform, mesh):
    """Nobody asked for them; heads lie over the tensor axis, queries over the sequence axis.

    What crosses the sequence axis by layer: what keys and values are made of, forward and when they are made again;
    sums of their gradients, scattered; and sums of weights' gradients.
    """
    from jaxscale.planning.program import lowered_step
    from jaxscale.recipe.plan import Plan
    from jaxscale.values import override

    plan = override(
        Plan(precision="bfloat16"), {"mesh": mesh, "zero": "3" if "fsdp" in mesh else "0", "memory": "full"}
    )
    step = functools.partial(lowered_step, make=programs_attention.experiment, plan=plan)
    (found,) = aot.compiled(platform, {"step": step}).values()
    assert found.error is None
    assert found.kernels == 4  # the forward twice, for nothing was kept
    # activations are (rows, 2048, 2048) as well: scores have heads before them
    assert not re.search(r"\[\d+,\d+,(2048|512),2048\]", found.hlo)
    if mesh == "sequence:4":
        in_layers = [one for one in collectives(found.hlo, {"sequence": 4}) if one.in_loop]
        assert {one.kind for one in in_layers} == {"all-gather", "reduce-scatter", "all-reduce"}
        assert sum(one.kind == "all-gather" for one in in_layers) == 4
        keys = 2 * 16 * 2048 * 2 * 128  # bytes
        assert sum(one.bytes for one in in_layers if one.kind == "reduce-scatter") == 2 * keys
