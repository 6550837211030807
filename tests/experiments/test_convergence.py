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


def test_a_second_moment_with_zero_loses_more(benchmark, lost):
    control = next(row for row in benchmark.ROWS if row.name == "control_adamw_second_moment_with_zero")
    assert lost(control.name) > control.gate
