"""Options of the compiler that a plan sets: they reach the compiler, the same in a report as in a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.options import options_for
from jaxscale.compiler.report import program_hash
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.planning.program import batch_shapes, step_recipe
from jaxscale.platforms.compiler_options import IN_PLACE_BRANCHES, SETS, CompilerOptions
from jaxscale.platforms.platform import Platform, chips
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from tests.tiers import variants

WITHOUT_FUSION = "xla_disable_hlo_passes=fusion,cpu-instruction-fusion"
GPU = Platform.parse("gpu h100 x 8").chip


class Tokens:
    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, 16), "int32"))


def experiment(compiler: str = "default") -> Experiment:
    model = Decoder(vocab=64, context=16, heads=2, layers=2, embed=64)
    return Experiment("tiny", model, Tokens(), batch=4, steps=3, plan=Plan(mesh="data:2", compiler=compiler))


@functools.cache
def compiled_step(compiler: str) -> TrainStep:
    """Return the compiled step of the experiment under these options."""
    step = build(experiment(compiler))
    step.compile(batch_shapes(step.experiment))
    return step


@pytest.mark.parametrize("compiler", variants([WITHOUT_FUSION, "default"], default=1))
def test_a_report_and_a_run_have_one_program(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    step = compiled_step(compiler)
    report = compile_report(step_recipe(experiment(compiler), step.plan, None), "cpu x 2")
    assert report.program_hash == program_hash(step.program) != ""


def test_the_program_depends_on_the_options():
    assert program_hash(compiled_step("default").program) != program_hash(compiled_step(WITHOUT_FUSION).program)


def test_the_branches_of_a_pipeline_write_in_place_with_the_same_results():
    plan = Plan(mesh="pipe:2", pipeline="gpipe:2x4", memory="none")
    plans = (plan, dataclasses.replace(plan, compiler=f"{IN_PLACE_BRANCHES['cpu']}=false"))
    batch = dict.fromkeys(("tokens", "targets"), jnp.arange(64, dtype="int32").reshape(4, 16))
    results, temporaries = [], []
    for variant in plans:
        step = build(dataclasses.replace(experiment(), plan=variant))
        compile_facts = step.compile(batch)
        temporaries.append(compile_facts.temp_bytes)
        results.append(step(step.init(), batch))
    in_place_bytes, copied_bytes = temporaries
    assert in_place_bytes < 0.9 * copied_bytes
    for value, other_value in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(value, other_value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overlp", "expected default, the name of a set .*did you mean 'overlap'"),
        ("overlap,triton", "compiler 'triton': expected default, the name of a set"),
        ("overlap,overlap", "got a set or an option twice"),
        ("triton_gemm=true", "expected an option of XLA"),
        ("xla_a=1,xla_a=2", "got a set or an option twice"),
        ("xla_cpu_enable_fast_maths=true", "xla_cpu_enable_fast_maths=True: the compiler of cpu has no such option"),
        ("xla_cpu_enable_fast_math=perhaps", "rejects it .*'perhaps' is not a valid bool"),
        ("xla_gpu_enable_pipelined_all_gathers=true", ""),  # a CPU rehearses the run without it
    ],
)
def test_what_no_compiler_takes_is_refused_before_a_trace(text, message):
    if not message:
        assert options_for(CompilerOptions.parse(text), build(experiment(text)).mesh.devices.flat[0]) == {}
        return
    with pytest.raises(UserError, match=message):
        build(experiment(text))


def test_the_text_form_comes_back_and_values_have_types():
    text = "overlap,xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,xla_gpu_enable_triton_gemm=false,xla_a=3"
    options = CompilerOptions.parse(text)
    assert str(options) == text
    assert CompilerOptions.parse(str(CompilerOptions())) == CompilerOptions()
    values = options.of(GPU)
    assert values["xla_gpu_enable_command_buffer"] == "FUSION,CUSTOM_CALL"
    assert values["xla_gpu_enable_triton_gemm"] is False
    assert values["xla_a"] == 3
    v6e = Platform.parse("tpu v6e:2x2").chip
    both = CompilerOptions.parse("overlap,vmem").of(v6e)
    assert both == CompilerOptions.parse("overlap").of(v6e) | CompilerOptions.parse("vmem").of(v6e)
    overlap = CompilerOptions.parse("overlap,xla_gpu_enable_pipelined_all_gather=false").of(GPU)
    assert overlap["xla_gpu_enable_pipelined_all_gather"] is False  # a single option precedes the set's


def test_every_recommended_option_has_its_source_and_its_effect():
    names = {*chips(), "gpu"}
    for chip_sets in SETS.values():
        assert set(chip_sets) <= names
        for rows in chip_sets.values():
            assert all(row.option.startswith("xla_") and row.source and row.effect for row in rows)
            assert len({row.option for row in rows}) == len(rows)


def test_a_set_without_an_effect_on_a_chip_is_refused_there():
    with pytest.raises(
        UserError, match=r"plan\.compiler vmem: no option of this set has an effect on h100, only on v6e"
    ):
        CompilerOptions(("vmem",)).of(GPU)
    assert CompilerOptions(("vmem",)).of(Platform.parse("cpu x 2").chip) == {}


PLATFORMS = {
    "gpu": ("gpu h100 x 2", "gpu b200 x 2"),
    "v5e": ("tpu v5e:2x2",),
    "v5p": ("tpu v5p:2x2x1",),
    "v6e": ("tpu v6e:2x2",),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chip"), [(name, chip) for name, chip_sets in SETS.items() for chip in chip_sets])
def test_each_set_compiles_for_its_chips(name, chip, monkeypatch, tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13" if chip == "gpu" else "libtpu")
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for platform in PLATFORMS[chip]:
        plan = Plan(zero=3, compiler=name)
        report = compile_report(step_recipe(dataclasses.replace(experiment(), plan=plan), plan, None), platform)
        assert report.crashed is None, report
        assert report.temp_bytes is not None
