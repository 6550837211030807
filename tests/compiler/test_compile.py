"""The judge on the CPU: what comes back from another process, whatever happens there."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxscale.compiler.compile import ProgramRecipe, RecipeFailed, compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.compiler.report_cache import read_report
from jaxscale.errors import UserError
from tests.compiler import programs

PROGRAMS = "tests.compiler.programs:"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reports"


def test_a_step_on_virtual_devices(cache):
    report = compile_report(ProgramRecipe(PROGRAMS + "train_step", (8192,)), "cpu x 4", explain=True)
    layer = 4 * programs.EMBED * programs.EMBED // 4
    rows = 8192 // 4 * programs.EMBED * 2
    # weights and momentum in float32, a fourth of each on a device, and a fourth of the input; both donated
    assert report.argument_bytes == 2 * programs.LAYERS * layer + rows
    assert report.alias_bytes == 2 * programs.LAYERS * layer
    # a forward pass, its recomputation, and two products of the backward pass
    assert report.flop == 4 * programs.LAYERS * 2 * (8192 // 4) * programs.EMBED**2
    assert report.unknown_loops == 0
    assert report.host_bytes == 0
    assert report.sent("fsdp", "all-gather") > 0
    assert {"jax", "jaxlib"} <= set(report.versions)
    assert not report.cached
    # the layers' inputs, kept for the backward pass, under the name of the scope that makes them
    assert report.live is not None
    kept = [one for one in report.live if one.kind == "kept" and one.bytes >= programs.LAYERS * rows]
    assert kept
    assert all("block" in one.name and one.phase == "forward" for one in kept)
    assert {"w", "momentum", "x"} <= {one.name for one in report.live if one.kind == "argument"}
    assert sum(one.bytes for one in report.live) == pytest.approx(report.device_bytes, rel=0.05)
    assert report.timeline is not None
    assert max(moment.total for moment in report.timeline) == pytest.approx(report.device_bytes, rel=0.05)
    # the second time it comes from the disk, and is the same
    again = compile_report(ProgramRecipe(PROGRAMS + "train_step", (8192,)), "cpu x 4", explain=True)
    assert again.cached
    assert dataclasses.replace(again, cached=False) == report
    assert [path.stem for path in cache.iterdir()] == [report.key]
    assert CompileReport.from_json(json.loads(json.dumps(report.json()))) == report
    for text in ("{", "3", "[" * 100_000):
        (cache / f"{report.key}.json").write_text(text)
        assert read_report(cache, report.key) is None
    assert report.device_bytes is not None
    assert report.fits(report.device_bytes)
    assert not report.fits(report.device_bytes - 1)


def test_a_traced_program_and_a_loop_of_unknown_length():
    report = compile_report(programs.unrolled, "cpu", cache=False)
    assert (report.flop, report.unknown_loops) == (2 * 64**3, 1)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGFPE, "died by SIGFPE"), (signal.SIGKILL, "this machine ran out of memory")]
)
def test_a_compiler_that_dies_is_a_report(number, says):
    report = compile_report(ProgramRecipe(PROGRAMS + "dies", (number,)), "cpu")
    assert report.crashed is not None
    assert says in report.crashed
    assert report.device_bytes is None
    assert not report.fits(2**60)
    assert says in str(report)


def test_products_that_a_compiler_fails_on_are_compiled_in_another_way():
    recipe = ProgramRecipe(PROGRAMS + "fails_like_triton")
    report = compile_report(recipe, "cpu x 4")
    assert report.crashed is None
    assert report.device_bytes == compile_report(ProgramRecipe(PROGRAMS + "zero"), "cpu x 4").device_bytes
    assert report.added_options == {"xla_gpu_enable_triton_gemm": False}
    assert "with xla_gpu_enable_triton_gemm=False: the compiler fails without it" in str(report)
    # an option that the caller or the program has set stays
    for other, options in (
        (recipe, {"xla_gpu_enable_triton_gemm": True}),
        (ProgramRecipe(PROGRAMS + "fails_like_triton", (True,)), None),
    ):
        report = compile_report(other, "cpu x 4", options=options)
        assert "output tile sizes" in str(report.crashed)
        assert not report.added_options


def test_a_compiler_that_takes_too_long_is_a_report():
    report = compile_report(ProgramRecipe(PROGRAMS + "sleeps"), "cpu", timeout=0.5)
    assert report.crashed == "still running after 0.5 s: pass a longer timeout"


def test_a_recipes_own_error_comes_back_with_its_traceback():
    with pytest.raises(RecipeFailed, match=r"(?s)in fails.*no such layer"):
        compile_report(programs.fails, "cpu")


def test_a_mistake_found_in_the_child():
    with pytest.raises(UserError, match=r"must return a jax.stages.Lowered or Traced .* got NoneType"):
        compile_report(ProgramRecipe(PROGRAMS + "nothing"), "cpu")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("tests.compiler.programs:trian_step", "did you mean 'train_step'"),
        ("tests.platforms.nowhere:step", "no module 'tests.platforms.nowhere'"),
    ],
)
def test_a_recipe_that_names_nothing(function, says):
    with pytest.raises(UserError, match=says):
        ProgramRecipe(function)([])


@pytest.mark.parametrize(
    ("recipe", "platform", "says"),
    [
        (lambda devices: None, "cpu", "cannot be sent to another process"),
        (functools.partial(programs.train_step, rows=lambda: 1), "cpu", "cannot be sent"),
        (programs.train_step, "tpu v5e:3x5", "has no slice 3x5"),
        (programs.train_step, "tpu v5e:0x4", "has no slice 0x4"),
        (programs.train_step, "gpu l4", "lacks its data"),
        (programs.train_step, "gpu h100 x 12", "do not fill hosts of 8"),
    ],
)
def test_a_mistake_found_before_a_child_starts(recipe, platform, says, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UserError, match=says):
        compile_report(recipe, platform)


def test_a_recipe_is_a_module_and_a_name():
    with pytest.raises(UserError, match="expected MODULE:FUNCTION"):
        ProgramRecipe("train_step")


@pytest.mark.parametrize(
    ("platform", "hidden", "says"),
    [("tpu v5e:2x2", "libtpu", r"jaxscale\[aot-tpu\]"), ("gpu h100", "jax_cuda13", r"jaxscale\[aot-gpu\]")],
)
def test_a_missing_compiler_says_what_to_install(platform, hidden, says, monkeypatch):
    import importlib.metadata
    import importlib.util

    spec, version = importlib.util.find_spec, importlib.metadata.version

    def no_spec(name, *rest):
        return None if name == hidden else spec(name, *rest)

    def no_version(name):
        if name.startswith(("jax-cuda", "jax_cuda")):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", no_spec)
    monkeypatch.setattr(importlib.metadata, "version", no_version)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match=says):
        compile_report(programs.train_step, platform)


def test_a_script_sends_its_own_functions_and_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "file"))
    script = tmp_path / "script.py"
    script.write_text(
        "from jaxscale.compiler.compile import ProgramRecipe, compile_report\n"
        "from jaxscale.compiler.compile_child import example\n"
        "def mine(devices):\n    return example(devices)\n"
        "if __name__ == '__main__':\n"
        "    recipe = ProgramRecipe('tests.compiler.programs:made_by', (mine,))\n"
        "    print(compile_report(recipe, 'cpu x 2').flop)\n"
    )
    root = str(pathlib.Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) == 2 * 128 * 128 * 64


def test_a_function_of_the_prompt_has_no_file_to_send(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(UserError, match="define it in a module"):
        compile_report(ProgramRecipe("__main__:mine"), "cpu")


@pytest.mark.slow
def test_two_at_once_share_a_cache(cache):
    recipe = ProgramRecipe("jaxscale.compiler.compile_child:example")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: compile_report(recipe, "cpu x 2"), range(2))
    assert dataclasses.replace(first, cached=False, seconds=0) == dataclasses.replace(second, cached=False, seconds=0)
    assert len(list(cache.iterdir())) == 1
