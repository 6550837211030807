"""The work between the steps of a run: the evaluations, samples and checkpoints that are due after a step."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

from jaxscale import heartbeat
from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.recipe.experiment import Experiment
from jaxscale.records.source import versions
from jaxscale.training.evaluate import all_means
from jaxscale.training.journal import Journal


@dataclasses.dataclass
class Pauses:
    """The pauses of one run, for evaluations, samples and checkpoints.

    Args:
        experiment: the experiment, which specifies the intervals between pauses.
        step: the train step.
        data: the opened data.
        sets: the opened held-out sets by name.
        checkpoints: the run's checkpoints.
        journal: the run's journal.
        best_loss: the lowest value so far of the held-out loss by which the best checkpoint is chosen; `None` before
            the first evaluation.
        one_at_a_time: whether to wait for each held-out batch before starting the next one, as the CPU platform
            requires.
        metrics: functions of module and batch that are evaluated beside the loss, by name.
        held_out_loss: the held-out loss at the newest pause; `None` if that pause measured none.
    """

    experiment: Experiment
    step: Any
    data: Any
    sets: Mapping[str, Any]
    checkpoints: Checkpoints
    journal: Journal
    best_loss: float | None
    one_at_a_time: bool
    metrics: Mapping[str, Any]
    held_out_loss: float | None = None

    def __post_init__(self) -> None:
        self._last_save_time = time.monotonic()
        self._measure = measure_of(self.experiment, self.data, self.sets)

    def is_save_due(self) -> bool:
        """Return whether a checkpoint is due by the clock."""
        minutes = self.experiment.checkpoint.minutes
        return minutes is not None and time.monotonic() - self._last_save_time >= 60 * minutes

    def is_due(self, updates: int) -> bool:
        """Return whether one of the intervals in steps makes a pause due after this number of updates."""
        checkpoint_settings = self.experiment.checkpoint
        intervals = self.experiment.evaluation.every, self.experiment.samples.every, checkpoint_settings.every
        intervals += (checkpoint_settings.memory_every,)
        return any(_is_due(updates, interval) for interval in intervals)

    def __call__(
        self, updates: int, tokens: int, state: Any, data_state: Any, *, is_stopping: bool, is_save_due: bool
    ) -> None:
        """Evaluate, draw samples or save a checkpoint after a step, if these are due.

        Args:
            updates: number of updates so far; after the run's last update, evaluation, samples and checkpoint are due.
            tokens: number of target tokens so far.
            state: the train state.
            data_state: state of the iterator over batches after this step's batch.
            is_stopping: whether the run stops early, after this step; if so, this call waits for the checkpoint.
            is_save_due: whether a checkpoint is due by the clock.
        """
        is_last = updates == self.experiment.steps
        checkpoint_settings, is_best = self.experiment.checkpoint, False
        self.held_out_loss = None
        if is_last or _is_due(updates, self.experiment.evaluation.every):
            with heartbeat.in_phase("evaluating"):
                is_best = self._evaluate(updates, state)
        if is_last or _is_due(updates, self.experiment.samples.every):
            with heartbeat.in_phase("evaluating"):
                self._sample(updates, state)
        is_checkpoint_due = _is_due(updates, checkpoint_settings.every) or (is_best and checkpoint_settings.best)
        if is_last or is_stopping or is_save_due or is_checkpoint_due:
            with heartbeat.in_phase("saving"):
                self._save(updates, tokens, state, data_state, wait=is_last or is_stopping)
        if _is_due(updates, checkpoint_settings.memory_every) and not (is_last or is_stopping):
            with heartbeat.in_phase("saving"):
                self.journal.flush()
                description = self._description(updates, tokens, data_state)
                self.checkpoints.copy_to_hosts(self.step.to_canonical(state), description)

    def poll(self) -> None:
        """Log the checkpoint that has been committed since the last call, if there is one."""
        self._log_commit(self.checkpoints.poll())

    def evaluate_start(self, state: Any) -> None:
        """Measure and log the held-out loss before the first step; it is not a candidate for the best checkpoint."""
        with heartbeat.in_phase("evaluating"):
            means = self._held_out_means(state)
            if means is not None:
                self.journal.log_evaluation(0, means, is_best=False)

    def _held_out_means(self, state: Any) -> dict[str, float] | None:
        """Return the held-out loss and the other measurements; `None` if no data is held out."""
        batch_count = self.experiment.evaluation.batches
        settings: dict[str, Any] = {"one_at_a_time": self.one_at_a_time, "metrics": self.metrics}
        return all_means(self.step, self.data, self.sets, state, batch_count, **settings)

    def _evaluate(self, updates: int, state: Any) -> bool:
        """Measure and log the held-out loss, and return whether it is the lowest so far."""
        means = self._held_out_means(state)
        if means is None:
            return False
        self.held_out_loss = means[self.experiment.evaluation.best]
        is_best = self.best_loss is None or self.held_out_loss < self.best_loss
        if is_best:
            self.best_loss = self.held_out_loss
        self.journal.log_evaluation(updates, means, is_best=is_best)
        return is_best

    def _sample(self, updates: int, state: Any) -> None:
        """Draw the samples that the experiment specifies, and store and show them."""
        from jaxscale.generation.generator import Generator
        from jaxscale.training.generate import draw_samples

        template = getattr(self.data, "chat_template", None)
        get_generator = functools.partial(Generator.of_step, self.step, state)
        samples = draw_samples(self.experiment, self.data.tokenizer, get_generator, template)
        for prompt, continuation in samples:
            self.journal.log_sample(updates, prompt, continuation)

    def _save(self, updates: int, tokens: int, state: Any, data_state: Any, *, wait: bool) -> None:
        """Save a checkpoint in the background; with `wait`, return only after it is committed."""
        self._log_commit(self.checkpoints.wait())
        self._save_start_time = time.perf_counter()  # of the save that is running
        description = self._description(updates, tokens, data_state)
        self.journal.flush()  # the log of a run in a bucket is buffered, and must be written before the checkpoint
        self.checkpoints.save_arrays(self.step.to_canonical(state), description)
        self._last_save_time = time.monotonic()
        if wait:
            self._log_commit(self.checkpoints.wait())
            self.checkpoints.drop_host_copies()

    def _description(self, updates: int, tokens: int, data_state: Any) -> Description:
        """Return the description of the state after a step."""
        return Description(
            step=updates,
            tokens=tokens,
            data=data_state,
            experiment=self.experiment.name,
            loss=self.held_out_loss,
            best=self.best_loss,
            measure=self._measure,
            versions=versions(),
        )

    def _log_commit(self, description: Description | None) -> None:
        """Log that the checkpoint with this description was committed; do nothing for `None`."""
        if description is not None:
            save_seconds = time.perf_counter() - self._save_start_time
            self.journal.log_event(description.step, "checkpoint", seconds=save_seconds)
            self.journal.report("checkpoint", description.step, {"seconds": save_seconds})


def measure_of(experiment: Experiment, data: Any, sets: Mapping[str, Any]) -> str:
    """Return a text that identifies the loss by which the best checkpoint is chosen.

    The text is empty for the loss of the data's own held-out part.

    Args:
        experiment: the experiment.
        data: the opened data.
        sets: the opened held-out sets by name.
    """
    set_name = experiment.evaluation.best.rpartition("/")[0]
    if not set_name and (not sets or next(iter(data.evaluation()), None) is not None):
        return ""
    set_name = set_name or next(iter(sets))
    return f"{set_name} {getattr(sets[set_name], 'facts', {}).get('hash', '')}".strip()


def _is_due(step: int, interval: int) -> bool:
    """Return whether work is due after a step, given the work's interval in steps; 0 means that it is never due."""
    return interval > 0 and step % interval == 0
