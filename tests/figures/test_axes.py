"""Round numbers, and curves that keep their spikes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.figures.axes import byte_ticks, round_step, thin, ticks


@given(st.floats(1e-9, 1e9), st.integers(4, 12))
def test_steps_are_round(span, most):
    step = round_step(span, most)
    assert span / step <= most * (1 + 1e-6)
    assert f"{step:e}"[:3] in ("1.0", "2.0", "5.0")
    assert step <= 10 * span / most


@pytest.mark.parametrize("low", [-3.0, 0.0, 1e-9, 0.99])
@pytest.mark.parametrize("span", [1e-7, 0.3, 1.0, 7.7, 2e6])
def test_ticks_are_round_and_inside(low, span):
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 9
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)


@given(st.floats(1.0, 1e15))
def test_bytes_are_multiples_of_a_power_of_two(high):
    multiples = byte_ticks(high)
    assert 3 <= len(multiples) - 1 <= 6
    assert multiples[-1] <= high < multiples[-1] + multiples[1]
    assert float(np.log2(multiples[1])).is_integer()


def test_a_thinned_curve_keeps_spikes_ends_and_gaps():
    values = np.ones(30_000)
    values[[0, 12_345, 20_000, -1]] = [2.0, 7.0, -3.0, 4.0]
    values[15_000:15_200] = np.nan
    steps, thinned = thin(np.arange(30_000), values, 300)
    assert len(steps) <= 602
    assert [thinned[steps == step] for step in (0, 12_345, 20_000, 29_999)] == [[2.0], [7.0], [-3.0], [4.0]]
    assert np.isnan(thinned).any()
    for unthinned in (thin(steps, thinned, 301), thin(np.arange(0), np.zeros(0), 9)):
        assert len(unthinned[0]) in (len(steps), 0)
