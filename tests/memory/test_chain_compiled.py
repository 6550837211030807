"""What the TPU's compiler makes of chain plans and segments: the FLOP of the simulator, the bytes of the formula."""

import functools
import math

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.memory.chain import Stage, keep_all, revolve, simulate
from tests.memory import chain_programs

pytestmark = pytest.mark.slow
PRODUCT = 2 * chain_programs.CHAIN_ROWS * chain_programs.CHAIN_WIDTH**2


@pytest.fixture(autouse=True)
def _compiler():
    pytest.importorskip("libtpu")


def compiled(recipe, *args):
    report = compile_report(functools.partial(recipe, **dict(args)), "tpu v5e:2x2")
    assert report.temp_bytes is not None, report
    return report


@pytest.mark.parametrize(("count", "slots", "runs"), [(32, 4, 107), (16, 3, 49), (8, 2, 22)])
def test_compiled_flop_are_those_of_the_runs(count, slots, runs):
    nodes = revolve(count, slots)
    assert simulate(nodes, [Stage(1.0, 2.0, 1)] * count, 1).forwards == runs
    report = compiled(chain_programs.chain_gradient, ("nodes", nodes))
    assert report.flop == pytest.approx((runs + 2 * count) * PRODUCT, rel=0.005)


def test_a_plan_that_keeps_all_runs_each_block_once():
    report = compiled(chain_programs.chain_gradient, ("nodes", keep_all(8)))
    assert report.flop == pytest.approx((8 + 2 * 8) * PRODUCT, rel=0.005)


def test_segments_take_the_bytes_of_the_formula():
    """temp = unit * (ceil(L / K) + K) and what one block's backward pass takes, the same for every K."""
    layers, unit = chain_programs.DEPTH, chain_programs.ROWS * chain_programs.WIDTH * 2
    temps = {
        k: compiled(chain_programs.segments_gradient, ("layers", layers), ("segment", k)).temp_bytes / unit
        for k in (2, 4, 6, 8, 16)
    }
    formula = {k: math.ceil(layers / k) + k for k in temps}
    block = sum(temps[k] - formula[k] for k in temps) / len(temps)
    for k in temps:
        assert temps[k] == pytest.approx(formula[k] + block, rel=0.05), (temps, formula)
