"""What the TPU's compiler makes of save sets: the FLOP and the bytes that they say."""

import functools

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.memory.graph import solve
from tests.memory import save_programs

pytestmark = pytest.mark.slow
VMEM = 128 * 2**20


def test_bytes_and_flop_are_the_predicted_ones():
    pytest.importorskip("libtpu")
    graph = save_programs.graph()
    least, most = solve(graph, 0), solve(graph, 128 * 2**20)
    predicted = save_programs.LAYERS * (most.bytes - least.bytes)
    assert predicted >= 4 * VMEM
    reports = {
        save: compile_report(functools.partial(save_programs.gradient, save=save), "tpu v5e:2x2")
        for save in (least, most)
    }
    temps = {save: report.temp_bytes for save, report in reports.items()}
    assert temps[most] - temps[least] == pytest.approx(predicted, rel=0.1)
    flop = {save: report.flop for save, report in reports.items()}
    apart = save_programs.LAYERS * (least.flop - most.flop)
    assert flop[least] - flop[most] == pytest.approx(apart, abs=0.005 * flop[least])
