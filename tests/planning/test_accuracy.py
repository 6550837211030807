"""What was recorded of estimates holds what is promised of them."""

import pytest

from jaxscale.planning import accuracy
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.kernels import Kernels
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan


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
    assert held_out.worst <= accuracy.MARGIN
    assert "train steps that nothing was fitted on were off by" in str(held_out)


def test_what_was_not_recorded():
    assert accuracy.recorded_accuracy("cpu") is None
    assert accuracy.held_out_accuracy("cpu") is None
    assert accuracy.factors("cpu") == accuracy.Factors()


@pytest.mark.parametrize(
    ("chip", "fields", "margin"),
    [
        (
            "tpu v5p:2x2x1",
            {"zero": 1, "microbatches": 2, "memory": "save:2GiB", "state": StatePlan(moments="int8")},
            0.1,
        ),
        ("tpu 7x:2x2x1", {}, 0.15),
        ("gpu h100", {}, 0.15),
        ("tpu v6e:2x2", {"precision": "float32"}, 0.15),
        ("tpu v6e:2x2", {"offload": OffloadPlan(weights="host")}, 0.15),
        ("tpu v6e:2x2", {"memory": "sqrt"}, 0.15),
        ("tpu v6e:2x2", {"kernels": Kernels(loss_chunk=256)}, 0.15),
        ("tpu v6e:2x2", {"pipeline": "1f1b:2x4"}, 0.15),
    ],
)
def test_a_margin_is_narrow_only_for_steps_like_those_that_were_recorded(chip, fields, margin):
    plan = Plan(**{"precision": "bfloat16", **fields})
    chip = Platform.parse(chip).chip
    assert accuracy.margin(chip, plan) == margin
    assert accuracy.margin(chip, plan, has_looped_blocks=False) == 0.15
    assert accuracy.margin(chip, plan, is_partly_trained=True) == 0.3
