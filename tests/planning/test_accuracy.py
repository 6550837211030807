"""What was recorded of estimates holds what is promised of them."""

import pytest

from jaxscale.planning import accuracy


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize(("compiled", "median", "worst"), [(False, 0.07, 0.18), (True, 0.05, 0.12)])
def test_the_recorded_estimates(kind, compiled, median, worst):
    recorded_accuracy = accuracy.recorded_accuracy(kind, is_compiled=compiled)
    assert recorded_accuracy is not None
    assert recorded_accuracy.median <= median
    assert recorded_accuracy.worst <= worst
    # a verdict outside the margin was right for every one of them
    assert recorded_accuracy.worst <= (accuracy.NEARER_MARGIN if compiled else accuracy.MARGIN)
    assert ("with the piece that needs the most memory compiled" in str(recorded_accuracy)) == compiled


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_fit_prints_the_errors_on_cases_that_nothing_was_fitted_on(kind, is_pipelined):
    held_out = accuracy.held_out_accuracy(kind, is_pipelined=is_pipelined)
    assert held_out is not None
    assert held_out.programs >= accuracy.LEAST_PROGRAMS
    assert held_out.median <= 0.1
    assert held_out.worst <= accuracy.margin(kind, is_pipelined=is_pipelined)
    assert "train steps that nothing was fitted on were off by" in str(held_out)


def test_what_was_not_recorded():
    assert accuracy.recorded_accuracy("cpu") is None
    assert accuracy.held_out_accuracy("cpu") is None
    assert accuracy.factors("cpu") == accuracy.Factors()
