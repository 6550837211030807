"""What a run does between steps: it evaluates, samples and saves, each when it is due."""

import time
from typing import Any

from jaxscale.step.experiment import Experiment
from jaxscale.training.checkpoint import Checkpoints, Description
from jaxscale.training.evaluate import Evaluator
from jaxscale.training.journal import Journal
from jaxscale.training.source import versions


class Pauses:
    """Those of one run, from its first step on.

    Args:
        experiment: says what is due when.
        step: the train step.
        data: the opened data.
        checkpoints: of the run.
        journal: what it tells.
        best: the least held-out loss before.
        one_at_a_time: wait for each batch of the held-out data, as the CPU platform needs.
    """

    held_out: float | None = None
    """Loss of the last pause, where it measured one."""

    def __init__(
        self,
        experiment: Experiment,
        step: Any,
        data: Any,
        checkpoints: Checkpoints,
        journal: Journal,
        *,
        best: float | None,
        one_at_a_time: bool,
    ) -> None:
        self._experiment, self._step, self._data = experiment, step, data
        self._checkpoints, self._journal, self.best = checkpoints, journal, best
        self._evaluator = Evaluator(step, data, one_at_a_time=one_at_a_time)
        self._saved_at = time.monotonic()

    def late(self) -> bool:
        """Whether a checkpoint is due by the clock."""
        minutes = self._experiment.checkpoint.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def due(self, n: int) -> bool:
        """Whether something is due after step `n` by its number."""
        wanted = self._experiment.evaluation.every, self._experiment.samples.every, self._experiment.checkpoint.every
        return any(_every(n, every) for every in wanted)

    def __call__(self, n: int, tokens: int, state: Any, data_state: Any, *, stopping: bool, save_now: bool) -> None:
        """Evaluate, sample and save after step `n`, whatever of it is due.

        Args:
            n: updates so far; all is due after the last.
            tokens: so far.
            state: the train state.
            data_state: of the batches.
            stopping: the run ends here before its time.
            save_now: a checkpoint is due by the clock.
        """
        last = n == self._experiment.steps
        checkpoint, better = self._experiment.checkpoint, False
        self.held_out = None
        if last or _every(n, self._experiment.evaluation.every):
            better = self._evaluate(n, state)
        if last or _every(n, self._experiment.samples.every):
            self._sample(n, state)
        if last or stopping or save_now or _every(n, checkpoint.every) or (better and checkpoint.best):
            self._save(n, tokens, state, data_state, wait=last or stopping)

    def poll(self) -> None:
        """Log a checkpoint that has been written since."""
        self._log(self._checkpoints.poll())

    def _evaluate(self, n: int, state: Any) -> bool:
        """Whether no loss was less before."""
        found = self._evaluator(state, self._experiment.evaluation.batches)
        if found is None:
            return False
        self.held_out = found["loss"]
        better = self.best is None or found["loss"] < self.best
        if better:
            self.best = found["loss"]
        self._journal.evaluated(n, found, better=better)
        return better

    def _sample(self, n: int, state: Any) -> None:
        from jaxscale.training.generate import draw_samples

        for prompt, text in draw_samples(self._experiment, self._data.tokenizer, lambda: self._step.module(state)):
            self._journal.sampled(n, prompt, text)

    def _save(self, n: int, tokens: int, state: Any, data_state: Any, *, wait: bool) -> None:
        self._log(self._checkpoints.wait())
        self._save_began = time.perf_counter()
        description = Description(
            step=n,
            tokens=tokens,
            data=data_state,
            experiment=self._experiment.name,
            loss=self.held_out,
            best=self.best,
            versions=versions(),
        )
        self._journal.flush()  # in a bucket lines wait, and those up to here must come before the checkpoint
        self._checkpoints.save(self._step.to_canonical(state), description)
        self._saved_at = time.monotonic()
        if wait:
            self._log(self._checkpoints.wait())

    def _log(self, done: Description | None) -> None:
        if done is not None:
            self._journal.event(done.step, "checkpoint", seconds=time.perf_counter() - self._save_began)


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
