"""The callback of `docs/start/own_loop.md` for W&B and trackio, with stand-ins for the services."""

import importlib
import re
from pathlib import Path

import jax
import pytest

import jaxscale as jx
from tests.tiers import variants
from tests.trackers import install

PAGE = Path(__file__).parents[2] / "docs" / "start" / "own_loop.md"
SETTINGS = {"wandb": {"id": "toy", "config": {"batch": 4}}, "trackio": {"config": {"batch": 4}}}

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.mark.parametrize("name", variants(["wandb", "trackio"], default=1))
def test_a_tracker_has_the_numbers_of_the_log_and_may_continue(name, toy, tmp_path, monkeypatch):
    (source,) = re.findall(
        r"^```python\n(import jax\n\n\nclass Tracker:.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    namespace = {}
    exec(compile(source, str(PAGE), "exec"), namespace)
    runs = install(name, monkeypatch)
    own = toy(evaluation=jx.Evaluation(every=3, batches=1))
    for steps in (4, 6):
        tracker = namespace["Tracker"](importlib.import_module(name), project="toys", name="toy", **SETTINGS[name])
        run = jx.train(own, steps=steps, out=tmp_path / "run", quiet=True, callbacks=[tracker])
        tracker.finish()
    assert all(tracked.is_finished and tracked.settings["resume"] == "allow" for tracked in runs)
    assert "callback_failed" not in {row["name"] for row in run.events}
    logged = [pair for tracked in runs for pair in tracked.logged]
    losses = {step: numbers["train/loss"] for step, numbers in logged if "train/loss" in numbers}
    assert losses == {row["step"]: row["loss"] for row in run.metrics}
    held_out = {step: numbers["eval/loss"] for step, numbers in logged if "eval/loss" in numbers}
    assert held_out == {row["step"]: row["loss"] for row in run.evaluations}
    assert sorted(held_out) == [3, 4, 6]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    silent = namespace["Tracker"](importlib.import_module(name), project="toys")
    silent(jx.Event("step", 1, {"loss": 1.0}, tmp_path))
    silent.finish()
    assert len(runs) == 2, "another process sends nothing"
