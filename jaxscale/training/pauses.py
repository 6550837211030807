"""Work between the steps of a run: evaluation, samples and checkpoints, each when it is due."""

import dataclasses
import time
from typing import Any

from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.recipe.experiment import Experiment
from jaxscale.records.source import versions
from jaxscale.training.evaluate import held_out_means
from jaxscale.training.journal import Journal


@dataclasses.dataclass
class Pauses:
    """The pauses of one run, from its first step on.

    Args:
        experiment: the experiment, which specifies the intervals.
        step: the train step.
        data: the opened data.
        checkpoints: the run's checkpoints.
        journal: the run's journal.
        best_loss: the least held-out loss so far; `None` before the first.
        one_at_a_time: wait for each batch of the held-out data before the next one, which the CPU platform requires.
        held_out_loss: held-out loss of the last pause; `None` if it measured none.
    """

    experiment: Experiment
    step: Any
    data: Any
    checkpoints: Checkpoints
    journal: Journal
    best_loss: float | None
    one_at_a_time: bool
    held_out_loss: float | None = None

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()

    def is_late(self) -> bool:
        """Return whether a checkpoint is due by the clock."""
        minutes = self.experiment.checkpoint.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def is_due(self, updates: int) -> bool:
        """Return whether a pause is due after this number of updates."""
        intervals = self.experiment.evaluation.every, self.experiment.samples.every, self.experiment.checkpoint.every
        return any(_is_due(updates, interval) for interval in intervals)

    def __call__(
        self, updates: int, tokens: int, state: Any, data_state: Any, *, stopping: bool, save_now: bool
    ) -> None:
        """After a step, evaluate, sample and save if they are due.

        Args:
            updates: number of updates so far; after the run's last update all three are due.
            tokens: number of target tokens so far.
            state: the train state.
            data_state: state of the iterator over batches after this step's batch.
            stopping: whether the run stops early, after this step; if so, the checkpoint is waited for.
            save_now: whether a checkpoint is due by the clock.
        """
        is_last = updates == self.experiment.steps
        checkpoint, is_best = self.experiment.checkpoint, False
        self.held_out_loss = None
        if is_last or _is_due(updates, self.experiment.evaluation.every):
            is_best = self._evaluate(updates, state)
        if is_last or _is_due(updates, self.experiment.samples.every):
            self._sample(updates, state)
        if is_last or stopping or save_now or _is_due(updates, checkpoint.every) or (is_best and checkpoint.best):
            self._save(updates, tokens, state, data_state, wait=is_last or stopping)

    def poll(self) -> None:
        """Log the checkpoint that was committed since the last call, if there is one."""
        self._log_commit(self.checkpoints.poll())

    def _evaluate(self, updates: int, state: Any) -> bool:
        """Measure and log the held-out loss, and return whether it is the least so far."""
        batch_count = self.experiment.evaluation.batches
        metrics = held_out_means(self.step, self.data, state, batch_count, one_at_a_time=self.one_at_a_time)
        if metrics is None:
            return False
        self.held_out_loss = metrics["loss"]
        is_best = self.best_loss is None or metrics["loss"] < self.best_loss
        if is_best:
            self.best_loss = metrics["loss"]
        self.journal.log_evaluation(updates, metrics, is_best=is_best)
        return is_best

    def _sample(self, updates: int, state: Any) -> None:
        """Draw, store and show the samples of the experiment."""
        from jaxscale.training.generate import draw_samples

        for prompt, text in draw_samples(self.experiment, self.data.tokenizer, lambda: self.step.module(state)):
            self.journal.log_sample(updates, prompt, text)

    def _save(self, updates: int, tokens: int, state: Any, data_state: Any, *, wait: bool) -> None:
        """Save a checkpoint in the background; with `wait`, return only after it is committed."""
        self._log_commit(self.checkpoints.wait())
        self._save_start = time.perf_counter()
        description = Description(
            step=updates,
            tokens=tokens,
            data=data_state,
            experiment=self.experiment.name,
            loss=self.held_out_loss,
            best=self.best_loss,
            versions=versions(),
        )
        self.journal.flush()  # a bucket's lines are buffered, and must be written before the checkpoint
        self.checkpoints.save_arrays(self.step.to_canonical(state), description)
        self._saved_at = time.monotonic()
        if wait:
            self._log_commit(self.checkpoints.wait())

    def _log_commit(self, description: Description | None) -> None:
        """Log that a checkpoint was committed; `None` logs nothing."""
        if description is not None:
            self.journal.log_event(description.step, "checkpoint", seconds=time.perf_counter() - self._save_start)


def _is_due(step: int, interval: int) -> bool:
    """Return whether work of this interval is due after a step; never for an interval of 0."""
    return interval > 0 and step % interval == 0
