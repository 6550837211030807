"""The judge for GPUs, by the CUDA plugin; where it is installed."""

import pytest

pytest.importorskip("jax_plugins.xla_cuda13")

from jaxscale.compiler.compile import compile_report
from tests.compiler import programs

MIB = 2**20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a100 x 4", "h100 x 4", "h200 x 4", "b200 x 4"])
def test_a_step_and_its_peak(text):
    report = compile_report(programs.train_step, f"gpu {text}", explain=True)
    # eight inputs of 32 MiB are kept; three more such arrays, and the gradient, are alive beside them
    assert report.temp_bytes == pytest.approx((11 * 32 + 8) * MIB, rel=0.02)
    assert report.argument_bytes == 48 * MIB
    assert report.flop == 4 * programs.LAYERS * 2 * 16384 * programs.EMBED**2
    assert report.live is not None
    assert sum(one.bytes for one in report.live) == pytest.approx(report.device_bytes, rel=0.01)
    kept = [one for one in report.live if one.kind == "kept"]
    assert ("block", 256 * MIB) in {(one.name.split("/")[0], one.bytes) for one in kept}
    assert {one.name for one in report.live if one.kind == "argument"} == {"w", "momentum", "x"}


@pytest.mark.slow
def test_two_hosts():
    report = compile_report(programs.zero, "gpu h100 x 16")
    weights = programs.EMBED**2
    found = {(one.kind, one.axes): one.bytes for one in report.collectives}
    assert found == {
        ("all-gather", ("fsdp",)): 4 * weights,
        ("reduce-scatter", ("fsdp",)): 4 * weights,
        ("all-reduce", ("data",)): 4 * weights // 8,
    }


@pytest.mark.slow
def test_activations_on_the_host():
    report = compile_report(programs.offloaded, "gpu h200")
    assert report.host_temp_bytes == programs.LAYERS * 16384 * programs.EMBED * 2


@pytest.mark.slow
def test_more_than_the_card_has_is_bytes_above_the_limit():
    """XLA's GPU compiler refuses nothing: whether it fits is for the limit to say."""
    report = compile_report(programs.too_large, "gpu h100")
    assert report.device_bytes == pytest.approx(programs.TOO_LARGE, rel=0.01)
    assert not report.fits(80 * 10**9)
