"""The chart of a run's trace, and what it refuses."""

import itertools
import json

import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.training.profile import FOLDER, Profiler, ProfileRange
from jaxscale.training.traced_actions import ACTIONS, measured_run, operation_names_by_kind, trace_files
from jaxscale.values import override, to_json


@pytest.mark.slow
def test_a_run_is_drawn_as_it_was(tmp_path, capsys):
    model = Decoder(vocab=12, context=8, layers=2, embed=8, heads=2)
    step = build(
        Experiment("traced", model, None, batch=4), override(Plan(), {"pipeline": "1f1b:2x2", "mesh": "data:2"})
    )
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 12, (4, 8)).astype(np.int32) for name in ("tokens", "targets")}
    assert trace_files(step) == {}
    step.compile(batch)
    assert set(operation_names_by_kind(step.program or "")) == {"F", "B"}
    state, profiler = step.init(), Profiler(ProfileRange(2, 4))
    for n in range(1, 4):
        profiler.start_before(n, tmp_path)
        state, metrics = step(state, step.place(batch))
        float(metrics["loss"])
        if profiler.is_last_step(n):
            profiler.stop_after(n, tmp_path, state, extra_files=trace_files(step))
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, **to_json(step.plan)}))
    plan, found, steps = measured_run(tmp_path)
    assert str(plan.pipeline) == "1f1b:2x2"
    assert steps == 2
    for order in found.spans:
        assert all(start < end for start, end in order)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(order))
    at = {
        action: span
        for order, spans in zip(found.schedule.orders, found.spans, strict=True)
        for action, span in zip(order, spans, strict=True)
    }
    for action, (start, _) in at.items():
        for needed in found.schedule.inputs(action):
            assert at[needed][1] <= start, (str(needed), str(action))
    assert main(["draw", "pipeline", "--measured", str(tmp_path)]) == 0
    assert "1f1b:2x2 measured, mean of 2 steps" in capsys.readouterr().out
    assert main(["draw", "pipeline", "gpipe:2x2", "--measured", str(tmp_path)]) == 2
    assert "got schedule, which the run of --measured already specifies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "told", "message"),
    [
        (None, None, "is not a run: it has no plan.json"),
        ({}, None, "was trained without a pipeline"),
        ({"pipeline": "pipedream:2"}, None, "never drains, and a step works on several batches"),
        ({"pipeline": "1f1b:2x2"}, None, "train again with --profile FIRST:STOP"),
        ({"pipeline": "1f1b:2x2"}, {"processes": 2}, "had 2 processes, and their clocks differ"),
        ({"pipeline": "1f1b:2x2"}, {"processes": 1, "operations": {}}, "no branch for each kind of action"),
        ({"pipeline": "1f1b:2x2"}, {"operations": {"F": "dot"}}, "actions.json: operations.F: got 'dot'"),
        ({"pipeline": "1f1b:2x2"}, {"ranks": {"\N{SUPERSCRIPT TWO}": 1}}, "expected the number of a device"),
        ({"pipeline": "1f1b:2x2"}, [], "actions.json: "),
    ],
)
def test_runs_that_cannot_be_drawn(tmp_path, plan, told, message):
    if plan is not None:
        (tmp_path / "plan.json").write_text(json.dumps({"version": 1, **plan}))
    if told is not None:
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / ACTIONS).write_text(json.dumps(told))
    with pytest.raises(UserError, match=message):
        measured_run(tmp_path)
