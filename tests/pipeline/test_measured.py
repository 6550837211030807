"""A trace's times, as actions of a schedule."""

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Kind
from jaxscale.pipeline.charts.draw import Chart
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.measured import measured_simulation
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.schedules import METHODS

OPERATIONS = {kind: [f"{kind}.begin", f"{kind}.end", f"{kind}.elsewhere"] for kind in "FBIW"}


def traced(found, start, rank):
    """What a trace shows of a simulated rank: a short operation at the start and at the end of each action."""
    line = {}
    for action, (begin, end) in zip(found.schedule.orders[rank], found.spans[rank], strict=True):
        kind, third = action.kind.value, (end - begin) / 3
        line.setdefault(f"{kind}.begin", []).append((start + begin, start + begin + third))
        line.setdefault(f"{kind}.end", []).append((start + end - third, start + end))
    line["F.elsewhere"] = [(start, start + 1e3)]  # ran another number of times, and says nothing
    return line


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "chimera", "dualpipe-v", "lockstep"])
def test_what_was_traced_is_what_is_drawn(name):
    schedule = METHODS[name].schedule(4, 8)
    stages = schedule.stages
    costs = Costs(tuple(1.0 + stage / 8 for stage in range(stages)), (1.5,) * stages, (0.5,) * stages)
    ran = simulate(schedule, costs)
    lines = {rank: [_both(traced(ran, 5.0, rank), traced(ran, 205.0, rank))] * 2 for rank in range(4)}
    simulation = measured_simulation(schedule, OPERATIONS, lines, 2)
    assert simulation.seconds == pytest.approx(ran.seconds)
    for got, wanted in zip(simulation.spans, ran.spans, strict=True):
        assert [time for span in got for time in span] == pytest.approx([time for span in wanted for time in span])
    for kind in (Kind.F, Kind.B) if not schedule.split else (Kind.F, Kind.I, Kind.W):
        assert [simulation.costs.seconds(kind, s) for s in range(stages)] == pytest.approx(
            [costs.seconds(kind, s) for s in range(stages)]
        )
    assert f"{ran.bubble:.1%}" in Chart((("it", simulation),), timed=True).text()


def _both(first, second):
    return {name: [*times, *second[name]] for name, times in first.items()}


def test_traces_of_something_else_are_refused():
    schedule = METHODS["1f1b"].schedule(2, 4)
    ran = simulate(schedule, Costs.alike(schedule))
    lines = {rank: [traced(ran, 0.0, rank)] for rank in range(2)}
    with pytest.raises(UserError, match="no device of rank 1 of 1f1b"):
        measured_simulation(schedule, OPERATIONS, {0: lines[0]}, 1)
    with pytest.raises(UserError, match="does not show F of 1f1b on rank 0 8 times, 4 times in each step"):
        measured_simulation(schedule, OPERATIONS, lines, 2)
