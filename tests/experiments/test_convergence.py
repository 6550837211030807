"""A cross-section of `benchmarks/convergence.py`: 60 of its 400 steps, on the text that ships, one seed."""

import sys
from pathlib import Path

import jax
import pytest

STEPS = 60
FOLDER = Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture(scope="module")
def benchmark(monkeypatch_module):
    monkeypatch_module.syspath_prepend(str(FOLDER))
    import convergence

    return convergence


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
        sys.modules.pop("convergence", None)


@pytest.fixture(scope="module")
def lost(benchmark):
    """Nats that a row loses beside its baseline."""
    text, rest = benchmark.read(benchmark.SHIPPED)
    held = benchmark.windows(rest, 64, 123)
    rows = {row.name: row for row in benchmark.ROWS}
    losses = {}

    def of(name):
        for each in (name, rows[name].baseline):
            if each not in losses:
                with jax.numpy_rank_promotion("allow"):  # the benchmark's own model, not ours
                    losses[each] = benchmark.train(rows[each], text, held, 0, STEPS)
        return losses[name] - losses[rows[name].baseline]

    assert of("adamw") == 0
    assert losses["adamw"] < 3.2, "the baseline learns: it begins at 4.6"
    return of


@pytest.mark.variant  # by default, rules in few bits are compared with their definitions, step by step
@pytest.mark.parametrize(
    "name",
    [
        "adamw_state_int8",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("adamw_reduce_int8", "adamw_state_int4", "sgdm_reduce_powersgd_16")
        ),
    ],
)
def test_few_bits_lose_no_more_than_their_gate(benchmark, lost, name):
    gate = next(row.gate for row in benchmark.ROWS if row.name == name)
    assert lost(name) <= gate


@pytest.mark.variant
def test_a_state_with_zero_loses_more(benchmark, lost):
    rows = {row.name: row for row in benchmark.ROWS}
    control = rows["control_adamw_state_with_zero"]
    assert lost(control.name) > max(rows[name].gate for name in control.fails)


def test_every_row_has_a_gate_and_every_gate_a_row_that_fails_it(benchmark):
    rows = {row.name: row for row in benchmark.ROWS}
    assert len(rows) == len(benchmark.ROWS)
    failed = {name for row in rows.values() for name in row.fails}
    for row in rows.values():
        exact = row == benchmark.Row(row.baseline, row.rule)
        assert exact or row.gate is not None or row.fails, f"{row.name} shows nothing"
        assert not exact or row.gate is None
        assert row.gate is None or 0 < row.gate <= 0.3, f"{row.name}: a gate that nothing would fail"
        assert row.gate is None or row.name in failed, f"{row.name}: no row fails its gate"
        for name in row.fails:
            assert name != row.name
            assert rows[name].gate is not None
            assert rows[name].baseline == row.baseline, f"{row.name} and {name} are compared with different twins"


def test_gates_and_controls_hold_on_their_own_sides(benchmark):
    rows = {row.name: row for row in benchmark.ROWS}
    row, control = rows["adamw_reduce_int8"], rows["adamw_reduce_int4"]
    assert [f.holds for f in benchmark.figures_of(row, 2.0, row.gate)] == [True]
    assert [f.holds for f in benchmark.figures_of(row, 2.0, row.gate + 1e-6)] == [False]
    # four bits have a gate of their own, and fail that of eight
    assert [f.holds for f in benchmark.figures_of(control, 2.0, 0.015)] == [True, True]
    assert [f.holds for f in benchmark.figures_of(control, 2.0, row.gate)] == [True, False]
    broken = benchmark.lost([float("nan"), 2.0], [2.0, 2.0])
    assert [f.holds for f in benchmark.figures_of(row, broken, broken)] == [False]
    assert [f.holds for f in benchmark.figures_of(rows["control_adamw_reduce_onebit"], broken, broken)] == [True]
