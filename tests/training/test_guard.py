"""Runs whose steps are skipped: what they keep, how they end, and how they go on."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import EXIT_CODES, Diverged, MostlySkipped
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Guard
from jaxscale.records.metrics import read_metrics
from jaxscale.training.loop import train
from jaxscale.training.run import Run

pytestmark = pytest.mark.usefixtures("shared_steps")
# a rate that is 0.01 in the first step and 1e29 in the second
EXPLODING = Optimizer(learning_rate=1e-2, final_learning_rate=1e30, schedule="linear")
EVERY_STEP = Checkpointing(every=1, minutes=None, best=False, keep=2)


def events(run_dir, name):
    return [row for row in read_metrics(run_dir, "event") if row["name"] == name]


def weights(run_dir):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(Run(run_dir).state.params)]


def test_updates_beyond_numbers_are_skipped_and_every_checkpoint_stays_sound(toy, tmp_path):
    experiment = toy(optimizer=EXPLODING, guard=Guard(patience=5), checkpoint=EVERY_STEP)
    with pytest.raises(
        Diverged, match=r"5 steps in a row were skipped up to step 6 .*learning rate .*checkpoints/0+1\."
    ):
        train(experiment, out=tmp_path / "run", quiet=True)
    assert [row["step"] for row in events(tmp_path / "run", "skipped")] == [2, 3, 4, 5, 6]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", write=False)
    assert checkpoints.last_good() == 1
    assert all(checkpoints.describe(step).is_sound for step in checkpoints.steps())
    train(experiment, out=tmp_path / "first", quiet=True, callbacks=[lambda event: event.step == 1])
    for skipped, first in zip(weights(tmp_path / "run"), weights(tmp_path / "first"), strict=True):
        assert np.isfinite(skipped).all()
        np.testing.assert_allclose(skipped, first, rtol=1e-6)


def spoil(monkeypatch, steps):
    """Make the gradients of the steps after so many not finite."""
    from jaxscale.step.train_step import TrainStep

    real = TrainStep.__call__

    def run(self, state, batch):
        if int(state.step) not in steps:
            return real(self, state, batch)
        good = jax.tree.map(np.array, state.params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        bad = jax.tree.map(lambda leaf: leaf * np.float32("nan"), state.params)
        after, metrics = real(self, dataclasses.replace(state, params=bad), batch)
        return dataclasses.replace(after, params=jax.device_put(good, shardings)), metrics

    monkeypatch.setattr(TrainStep, "__call__", run)


def test_a_run_with_more_than_a_tenth_of_its_steps_skipped_ends_with_a_code_of_its_own(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, [2, 5])
    run_dir = tmp_path / "run"
    sentence = (
        r"^2 of 12 steps \(17%\) were skipped, so .*run holds the weights of 10 updates.* Lower the learning rate"
    )
    with pytest.raises(MostlySkipped, match=sentence):
        train(toy(), out=run_dir, quiet=True)
    assert EXIT_CODES[MostlySkipped] == 6
    assert events(run_dir, "finished"), "the run is whole: its checkpoint and report are there"
    assert (run_dir / "report.html").exists()
    steps = Checkpoints(run_dir / "checkpoints", write=False).steps()
    assert steps[-1] == 12
    with pytest.raises(MostlySkipped, match=sentence):  # a finished run that is started again
        train(toy(), out=run_dir, quiet=True)
    assert Checkpoints(run_dir / "checkpoints", write=False).steps() == steps


def test_a_tenth_of_the_steps_may_be_skipped(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, [3])
    assert train(toy(steps=10), out=tmp_path / "run", quiet=True).step == 10
    assert train(toy(steps=10), out=tmp_path / "run", quiet=True).step == 10
