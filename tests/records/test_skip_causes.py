"""What is advised after skipped steps depends on the cause: a learning rate is blamed only if it can be one."""

import inspect
import math
import types
from unittest import mock

import numpy as np
import pytest

from jaxscale.errors import Diverged, MostlySkipped
from jaxscale.records.skip_causes import Causes
from jaxscale.training.endings import check_skipped, stop_diverged

METRICS = {"loss": math.nan, "grad_norm": math.nan, "skipped": 1, "skipped_in_row": 20, "learning_rate": 1e-3}


STATE = types.SimpleNamespace(params={"w": np.ones(2)})


def causes_of(step, batch, **metrics):
    causes = Causes(types.SimpleNamespace(experiment=types.SimpleNamespace(model=None), module=lambda state: None))
    causes.note(step, batch, STATE)
    fields = causes.cause_fields(step, METRICS | metrics)
    assert fields == ({"cause": causes.text} if causes.text else {})
    return causes


def diverged(causes, folder):
    journal, checkpoints = mock.Mock(folder=folder), mock.Mock()
    checkpoints.last_good.return_value = 8
    with pytest.raises(Diverged) as caught:
        inspect.unwrap(stop_diverged)(journal, checkpoints, 30, METRICS, causes)  # as without run-time type checks
    return str(caught.value)


def test_inputs_that_are_not_finite_are_named_and_no_lower_rate_is_advised(tmp_path):
    rows = np.ones((6, 2), np.float32)
    rows[[1, 4], 0] = np.nan
    causes = causes_of(9, {"x": rows, "y": np.arange(6)}, skipped=1)
    assert causes.text == "x of the batch of step 9 has numbers that are not finite, in rows 1, 4"
    message = diverged(causes, tmp_path)
    assert "learning_rate" not in message
    assert "No learning rate changes that: leave out or repair such rows of x" in message
    assert message.endswith("Then go on from it with --from 8")
    with pytest.raises(MostlySkipped, match=r"rows 1, 4\. 3 of 10 steps .* No learning rate changes that"):
        check_skipped(tmp_path, 10, 3, causes)


def test_before_the_first_update_the_rate_is_not_the_cause(tmp_path):
    message = diverged(causes_of(1, {"x": np.ones(2)}, skipped=1), tmp_path)
    assert "No update had been applied before, so the learning rate is not the cause" in message
    assert "--optimizer.learning_rate" not in message


@pytest.mark.parametrize("metrics", [{"skipped": 1}, {"loss": 3.0, "grad_norm": 900.0, "skipped": 9}])
def test_after_an_update_or_a_spike_a_lower_rate_is_advised(metrics, tmp_path):
    causes = causes_of(9, {"x": np.ones(2)}, **metrics)
    assert causes.advice == ""
    assert "Go on from it with --from 8 and a lower --optimizer.learning_rate" in diverged(causes, tmp_path)
