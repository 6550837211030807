"""The clock and the FLOP of steps that libtpu compiles, where it is installed."""

import pytest

pytest.importorskip("libtpu")

import jaxscale as jx
from jaxscale.compiler.compile import compile_report
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.compiler_seconds import COMPUTE, compiler_seconds

pytestmark = pytest.mark.slow
MODEL = jx.models.Decoder(vocab=2048, context=1024, layers=4, embed=1024, heads=8, mlp=4096)
EXPERIMENT = jx.Experiment("clocked", MODEL, jx.data.Text("text.txt", context=1024), batch=32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level


def compiled(platform, **fields):
    """Return the report of a step and its seconds by the clock."""
    plan = jx.Plan(precision="bfloat16", **fields)
    report = compile_report(step_recipe(EXPERIMENT, plan, None), platform)
    return report, compiler_seconds(report.schedule, plan, jx.Platform.parse(platform))


def test_recomputation_costs_what_its_flop_and_bytes_say():
    """Rules of one mesh have the order of their FLOP by the clock, and the reverse order of their bytes."""
    rules = ("none", "dots", "full")
    steps = [compiled("tpu v5e:2x2", mesh="fsdp:4", zero=3, memory=rule) for rule in rules]
    reports, seconds = [report for report, _ in steps], [each for _, each in steps]
    flop, nbytes = [report.flop for report in reports], [report.device_bytes for report in reports]
    assert flop[0] <= flop[1] < flop[2]
    assert nbytes[0] > nbytes[1] > nbytes[2]
    totals = [each.total for each in seconds]
    assert totals[0] < totals[1] < totals[2]
    peak = jx.Platform.parse("tpu v5e:2x2").chip.peak("bfloat16")
    assert all(each.items[COMPUTE] > 0.8 * report.flop / peak for report, each in zip(reports, seconds, strict=True))


def test_products_around_a_ring_have_the_flop_of_whole_ones():
    """libtpu unrolls the loops of products around a ring of 8 chips; their trips are not counted as bodies."""
    ring, seconds = compiled("tpu v5e:2x4", mesh="fsdp:8", zero=3)
    plain, _ = compiled("tpu v5e:2x4", mesh="data:8")
    assert any(each.kind == "collective-permute" and each.in_loop for each in ring.collectives)
    assert ring.flop == pytest.approx(plain.flop, rel=0.02)
    permuted = ring.sent("fsdp", "collective-permute")
    weights = 2 * 4 * (4 * 1024**2 + 3 * 1024 * 4096)  # bytes of the blocks' weights in bfloat16
    assert permuted < 4 * weights  # two gathers, and a reduction in float32, at most
    assert seconds.hidden > 0
