"""Attention's static cycles on TPU stay what they were: libtpu's schedule against tests/golden/kernels."""

import json
import pathlib

import pytest

from tests.kernels import aot

pytestmark = [pytest.mark.slow, aot.tpu_compiler]

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "kernels"


@pytest.mark.parametrize("chip", sorted(file.stem for file in GOLDEN.glob("*.json")))
def test_no_pass_takes_three_percent_more(chip, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "benchmarks"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    import kernel_cycles

    golden = json.loads((GOLDEN / f"{chip}.json").read_text())["attention"]
    assert set(golden) == set(kernel_cycles.PASSES)
    for tile in {facts["tile"] for facts in golden.values()}:
        found = kernel_cycles.cycles("ours", chip, tile)
        for one, facts in golden.items():
            if facts["tile"] == tile:
                assert found[one]["cycles"] <= 1.03 * facts["cycles"], (one, found[one], facts)
