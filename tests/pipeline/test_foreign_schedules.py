"""Schedules that PyTorch wrote, and one of no known shape: timed, drawn, and run with the gradients of one device."""

import functools
from pathlib import Path

import jax
import pytest

from jaxscale.pipeline.charts.text import text_chart
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.csv import parse_csv, read_csv
from jaxscale.pipeline.orders import Schedule
from tests.pipeline.tiny_stages import Model, distance, run

GOLDEN = Path(__file__).parents[1] / "golden" / "pipeline"
FILES = sorted(path.name for path in GOLDEN.glob("*.csv") if path.name != "1f1b.csv")

OWN = """
,0F0,0F1,0F2,,3F0,3I0,3F1,3B1,3W0,3F2,3B2,0B0,0I1,0W1,0B2
,1F0,1F1,2F0,1F2,2F1,2F2,2I0,1B0,2B1,2W0,1B1,2B2,1I2,1W2
"""
"""Two ranks, stages down and up again, B and I with W mixed."""


@functools.cache
def reference(stages: int, microbatches: int):
    return Model(stages).reference(microbatches, jax.random.key(7))


def gives_the_gradients_of_one_device(schedule: Schedule, **settings) -> None:
    loss, gradients = run(Model(schedule.stages), schedule, **settings)
    expected, exact = reference(schedule.stages, schedule.microbatches)
    assert abs(loss - expected) <= 1e-6 * abs(expected)
    assert distance(gradients, exact) <= 1e-6


@pytest.mark.parametrize("name", FILES)
def test_timed_and_drawn(name):
    schedule = read_csv(GOLDEN / name)
    found = simulate(schedule, Costs.alike(schedule))
    assert 0 < found.bubble < 0.6
    assert len(text_chart(found, 100).splitlines()) >= schedule.ranks


def test_a_file_of_no_known_shape_runs():
    schedule = parse_csv(OWN.strip("\n"), "own")
    assert schedule.routes == ((0, 1, 1, 0),)
    assert schedule.split
    gives_the_gradients_of_one_device(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["input", "residuals"])
@pytest.mark.parametrize("name", FILES)
def test_gradients_equal_those_of_one_device(name, stash):
    gives_the_gradients_of_one_device(read_csv(GOLDEN / name), stash=stash)
