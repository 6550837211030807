"""The judge for TPUs, by libtpu; where it is installed."""

import concurrent.futures

import pytest

pytest.importorskip("libtpu")

from jaxscale.compiler import compile as judge
from jaxscale.compiler import trust
from jaxscale.compiler.compile import ProgramRecipe, compile_report
from jaxscale.compiler.usable import usable_bytes
from jaxscale.platforms.platform import Platform
from tests.compiler import programs

MIB = 2**20
PROGRAMS = "tests.compiler.programs:"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level


@pytest.mark.slow
def test_a_step_and_its_peak():
    report = compile_report(programs.train_step, "tpu v5e:2x2", explain=True)
    # eight inputs of 32 MiB are kept; one more array of that size is alive beside them outside VMEM
    assert report.temp_bytes == pytest.approx(9 * 32 * MIB, rel=0.01)
    assert report.argument_bytes == 48 * MIB
    assert report.flop == 4 * programs.LAYERS * 2 * 16384 * programs.EMBED**2
    assert report.live is not None
    assert sum(one.bytes for one in report.live) == pytest.approx(report.device_bytes, rel=0.01)
    kept = [one for one in report.live if one.kind == "kept"]
    assert [(one.name.split("/")[0], one.bytes) for one in kept] == [("block", 256 * MIB)]
    assert {one.name for one in report.live if one.kind == "argument"} == {"w", "momentum", "x"}
    assert not report.attached
    assert report.versions["libtpu"] == trust.TRUSTED


@pytest.mark.slow
def test_the_bytes_are_those_of_the_refusal():
    """One program: refused where it does not fit, and compiled where it does."""
    refused = compile_report(programs.kept, "tpu v5e:2x2", explain=True)
    compiled = compile_report(programs.kept, "tpu v5p:2x2x1")
    assert refused.oom is not None
    assert compiled.device_bytes == pytest.approx(refused.oom.required, rel=0.01)
    assert refused.oom.available == usable_bytes(Platform.parse("tpu v5e:2x2"))
    assert not refused.fits(2**60)
    # a refusal lists who is alive as well
    assert refused.live is not None
    assert sum(one.bytes for one in refused.live) == pytest.approx(refused.oom.required, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:2x2", "7x:2x2x1", "v5e:2x2 x 2"])
def test_every_generation_says_what_its_devices_have(text):
    platform = Platform.parse(f"tpu {text}")
    report = compile_report(ProgramRecipe(PROGRAMS + "too_large"), platform)
    assert report.oom is not None
    assert report.oom.available == pytest.approx(usable_bytes(platform), rel=1e-4)
    assert report.oom.required == pytest.approx(programs.TOO_LARGE, rel=1e-3)


@pytest.mark.slow
def test_activations_on_the_host():
    report = compile_report(programs.offloaded, "tpu v5e:1x1")
    assert report.host_temp_bytes == programs.LAYERS * 16384 * programs.EMBED * 2
    assert report.host_bytes == report.host_temp_bytes


@pytest.mark.slow
def test_flags_of_another_compiler_do_no_harm(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_force_host_platform_device_count=8")
    assert compile_report(programs.zero, "tpu v5e:2x2", cache=False).crashed is None


@pytest.mark.slow
def test_devices_that_another_process_holds_are_described(monkeypatch):
    monkeypatch.setattr(judge, "accelerators", lambda: frozenset({"tpu"}))
    report = compile_report(ProgramRecipe("jaxscale.compiler.compile_child:example"), "tpu v5e:2x2", cache=False)
    assert (report.crashed, report.attached, report.flop) == (None, False, 2 * 64 * 128 * 64)


@pytest.mark.slow
def test_what_zero_sends_by_axis():
    report = compile_report(programs.zero, "tpu v5e:2x2")
    weights = programs.EMBED**2
    found = {(one.kind, one.axes): one.bytes for one in report.collectives}
    assert found == {
        ("all-gather", ("fsdp",)): 2 * weights,  # a float32 product runs in bfloat16 passes: cast before it is sent
        ("reduce-scatter", ("fsdp",)): 4 * weights,
        ("all-reduce", ("data",)): 4 * weights // 2,
    }


@pytest.mark.slow
def test_two_processes_at_once():
    recipe = ProgramRecipe("jaxscale.compiler.compile_child:example")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: compile_report(recipe, "tpu v5e:2x2", cache=False), range(2)))
    assert [report.crashed for report in reports] == [None, None]
    assert reports[0].device_bytes == reports[1].device_bytes
    assert reports[0].flop == 2 * 64 * 128 * 64


@pytest.mark.slow
def test_kernels_say_their_cost_or_are_counted_as_silent():
    report = compile_report(programs.matmul_kernel, "tpu v5e:1x1")
    assert (report.flop, report.silent_kernels) == (2 * 512**3, 1)


@pytest.mark.slow
def test_a_kernel_too_large_for_the_chip():
    report = compile_report(programs.big_kernel, "tpu v5e:1x1")
    assert report.oom is not None
    assert (report.oom.memory, report.oom.required, report.oom.available) == ("on-chip", 72000 * 512 * 4, 128 * MIB)


@pytest.mark.slow
def test_mistakes():
    with pytest.raises(ValueError, match=r"for other devices .cpu. than it received .TPU v5 lite"):
        compile_report(programs.elsewhere, "tpu v5e:1x1")
    with pytest.raises(ValueError, match="has no option 'xla_tpu_nothing'"):
        compile_report(programs.zero, "tpu v5e:2x2", options={"xla_tpu_nothing": True})


@pytest.mark.slow
def test_the_known_program_has_the_known_bytes():
    report = compile_report(trust.program, "tpu v5e:2x2")
    assert report.device_bytes == pytest.approx(trust.KNOWN_BYTES, rel=0.001)
