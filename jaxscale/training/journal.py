"""The journal of a run in progress: the run's output to the screen, metrics.jsonl, samples.txt and the report.

If there are several processes, only the first writes output.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import heartbeat
from jaxscale.errors import UserError
from jaxscale.records import directory as run_files
from jaxscale.records.metrics import MetricsLog, RowKind
from jaxscale.records.processes import is_first
from jaxscale.training.callbacks import Callbacks, Event, EventKind
from jaxscale.training.display import Display

_LOGGED_NAMES = ("loss", "grad_norm", "learning_rate", "residual_norm", "wire_bytes")
"""Metrics of a step in its row of metrics.jsonl; only a gradient codec reports the last two."""


def logged_metrics(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step that are logged in metrics.jsonl, with the learning rate of each group.

    Example:
        >>> logged_metrics({"learning_rate/head": 0.1, "loss": 2.0, "weight": 64.0})
        {'loss': 2.0, 'learning_rate/head': 0.1}
    """
    names = (*_LOGGED_NAMES, *(name for name in scalars if name.startswith("learning_rate/")))
    return {name: scalars[name] for name in names if name in scalars}


class Journal:
    """The output of one run.

    Args:
        folder: the run's folder.
        display: the run's output on the screen.
        callbacks: functions of an `Event` that the run calls.

    Attributes:
        callbacks: the callbacks, which are called in order.
    """

    def __init__(self, folder: Any, display: Display, callbacks: Sequence[Any] = ()) -> None:
        self.folder, self._display = folder, display
        self.callbacks = Callbacks(callbacks, self._report_failure)
        self._log: MetricsLog | None = None

    def open(self) -> None:
        """Open metrics.jsonl. Output before this call is shown on the screen but not logged."""
        with run_files.explain_write_errors(self.folder):
            self._log = MetricsLog(self.folder) if is_first() else None

    def close(self) -> None:
        """Close the display, write out the buffered lines of metrics.jsonl, and close that file."""
        self._display.close()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def say(self, text: str) -> None:
        """Show a line on the screen."""
        self._display.say(text)

    def _append(self, step: int, kind: RowKind, **fields: Any) -> None:
        """Append a row about a step to metrics.jsonl; `kind` is the row's kind."""
        if self._log is None:
            return
        try:
            self._log.append(step, kind, **fields)
        except OSError as error:
            raise run_files.write_error(error, self.folder) from error

    def log_event(self, step: int, name: str, **fields: Any) -> None:
        """Log an event that happened after a step, by its name and with further fields."""
        self._append(step, "event", name=name, **fields)

    def log_skip(self, step: int, scalars: Mapping[str, float], **causes: Any) -> None:
        """Log that a step was skipped, with its loss, gradient norm, the number of skipped steps, and its causes."""
        self.log_event(step, "skipped", **{name: scalars[name] for name in ("loss", "grad_norm", "skipped")}, **causes)

    def log_hours(self, step: int, moment: str) -> None:
        """Log the seconds that this process has spent in each phase; `moment` names this point of the run."""
        beat, start_time = heartbeat.own_heartbeat()
        seconds_by_phase = {phase: round(phase_seconds, 3) for phase, phase_seconds in beat.seconds_by_phase.items()}
        self.log_event(step, "hours", at=moment, process_start=round(start_time, 3), seconds_by_phase=seconds_by_phase)

    def _report_failure(self, step: int, callback_name: str, error_text: str, place: str) -> None:
        """Show and log that a callback failed after a step."""
        place_text = f" ({place.removesuffix(': ')})" if place else ""
        self.say(
            f"the callback {callback_name} failed after step {step} and is not called again: {error_text}{place_text}"
        )
        self.log_event(step, "callback_failed", callback=callback_name, error=error_text)

    def report(self, kind: EventKind, step: int, values: Mapping[str, float]) -> None:
        """Call the callbacks with an event of this kind, after a step."""
        self.callbacks.report(Event(kind, step, values, self.folder))

    def log_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Log and show the metrics of a step."""
        self._append(step, "train", **row)
        self._display.show(step, row)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_best: bool) -> None:
        """Log and show the held-out metrics after a step; `is_best` is whether the loss is the lowest so far."""
        self._append(step, "eval", **metrics)
        other_names = [name for name in metrics if name != "loss" and name.rpartition("/")[2] != "targets"]
        others_text = "".join(f", {name} {metrics[name]:.4f}" for name in other_names)
        self.say(f"step {step}: held-out loss {metrics['loss']:.4f}{others_text}{' (best)' if is_best else ''}")
        self.report("evaluation", step, metrics)

    def log_sample(self, step: int, prompt: str, continuation: str) -> None:
        """Store and show a prompt with the continuation that was drawn after a step."""
        from jaxscale.records.samples import append_sample

        if is_first():
            with run_files.explain_write_errors(self.folder):
                append_sample(self.folder, step, prompt, continuation)
        self.say(f"--- step {step}\n{prompt}{continuation}\n---")

    def flush(self) -> None:
        """Write out the buffered lines of metrics.jsonl; only a run in a bucket buffers lines."""
        if self._log is not None:
            with run_files.explain_write_errors(self.folder):
                self._log.flush()

    def write_report(self) -> None:
        """Write the run's report; if that fails, show the error in a line."""
        if not is_first():
            return
        from jaxscale.report import page

        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.flush()
        try:
            page.write_report(self.folder)
        except (OSError, UserError) as error:
            self.say(f"the report could not be written: {error}")

    def conclude(self) -> None:
        """Close the display, and show the summary of a run that has ended."""
        from jaxscale.report.summary import summary

        self._display.close()
        if is_first():
            self.say(summary(self.folder, color=self._display.is_live))
