"""The user's own functions, which a run calls after its steps, evaluations and saves, and which may stop the run."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxscale.errors import UserError, near_miss
from jaxscale.values.functions import check_parameters
from jaxscale.values.user_frames import place_in, place_of

EventKind = Literal["step", "evaluation", "checkpoint"]


@dataclasses.dataclass(frozen=True)
class Event:
    """What a run reports to its callbacks.

    Args:
        kind: "step" after a step, "evaluation" after held-out batches were scored, "checkpoint" after a completed save.
        step: number of updates made.
        values: numbers by name. A step has `loss` (nats per target), `grad_norm`, `learning_rate`, `weight` (targets),
            `skipped` and `skipped_in_row`. An evaluation has `loss`, `targets` and, for a classifier, `accuracy`; the
            values of a held-out set have names such as `news/loss`. A checkpoint has `seconds`, the time of the save.
        folder: the run directory.
    """

    kind: EventKind
    step: int
    values: Mapping[str, float]
    folder: Any


Callback = Callable[[Event], Any]
"""A function of an event. If it returns True, the run saves a checkpoint after the next step and ends.

Each process calls it with the same values, so all processes stop together. To write something only once, write it only
if `jax.process_index() == 0`. A callback that raises an exception is reported and not called again.
"""


@dataclasses.dataclass
class EarlyStopping:
    """Stop a run whose held-out metric has not improved in several evaluations in a row.

    Args:
        metric: name of the metric in `Event.values` of an evaluation, such as "loss" or "news/loss". The name may have
            the prefix "eval/", as in TensorBoard.
        patience: number of evaluations in a row without an improvement after which the run ends.
        least_change: smallest change that counts as an improvement.
        mode: "min" if lower values are better, "max" if higher values are.

    Raises:
        UserError: `patience` is below 1, or `mode` is "min" for an accuracy; or, before the first step of a run, no
            evaluation reports such a metric.

    Example:
        >>> stop = EarlyStopping(patience=2)
        >>> [stop(Event("evaluation", 1, {"loss": loss}, "runs/a")) for loss in (3.0, 2.0, 2.5, 2.2)]
        [False, False, False, True]
    """

    metric: str = "loss"
    patience: int = 3
    least_change: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UserError(f"patience: got {self.patience}, expected 1 or more evaluations")
        if self.mode not in ("min", "max"):
            raise UserError(f"mode: got {self.mode!r}, expected min or max")
        if self.mode == "min" and self.metric.rpartition("/")[2] == "accuracy":
            raise UserError(
                f"mode: got min for {self.metric}, which is better if it is higher, so that the run would stop as it "
                "improves: set mode='max'"
            )
        self._best_value, self._worse_count = math.inf, 0

    def __call__(self, event: Event) -> bool:
        """Return whether the run is to stop."""
        if event.kind != "evaluation":
            return False
        name = self.metric.removeprefix("eval/")
        self._check_name(event.values)
        signed_value = event.values[name] * (1 if self.mode == "min" else -1)
        is_better = signed_value < self._best_value - self.least_change
        self._best_value, self._worse_count = (
            (signed_value, 0) if is_better else (self._best_value, self._worse_count + 1)
        )
        return self._worse_count >= self.patience

    def check(self, names: Sequence[str], every: int, steps: int) -> None:
        """Check that a run's evaluations report the metric; warn if they come too late to stop the run.

        The run calls this before its first step.

        Args:
            names: names of the metrics that an evaluation reports.
            every: number of steps between evaluations; 0 for a single evaluation, at the end.
            steps: number of steps of the run.

        Raises:
            UserError: no evaluation reports the metric.
        """
        self._check_name(names)
        if every == 0 or every >= steps:
            warnings.warn(
                f"EarlyStopping({self.metric!r}) cannot stop a run of {steps} steps with evaluation.every {every}, "
                "since the only evaluation comes after the last step: set evaluation.every to a smaller number",
                stacklevel=2,
            )

    def _check_name(self, names: Iterable[str]) -> None:
        """Raise UserError if the metric is not among these names."""
        name = self.metric.removeprefix("eval/")
        if name not in names:
            raise UserError(
                f"metric: got {self.metric!r}, but an evaluation reports {', '.join(names)}{near_miss(name, names)}; "
                "set EarlyStopping(metric=...) to one of these, or add a metric of your own to train(metrics=...)"
            )


class Callbacks:
    """The callbacks of one run.

    Args:
        callbacks: functions of an event.
        report_failure: function that is called if a callback fails. Its arguments are the step, the callback's name,
            the error as text, and the user's line as "FILE:LINE: ".

    Attributes:
        stop_cause: name of the callback that asked the run to stop; `None` if none did.
        early_stopping: the callbacks that are an `EarlyStopping`.

    Raises:
        UserError: `callbacks` is not a list, or a callback cannot be called with an event.
    """

    def __init__(self, callbacks: Sequence[Any], report_failure: Callable[[int, str, str, str], None]) -> None:
        if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
            raise UserError(
                f"callbacks: got {callbacks!r}, expected a list of functions of an Event, such as [function]"
            )
        for callback in callbacks:
            _check_callable(callback)
            check_parameters(callback, f"{place_of(callback)}callbacks", 1, "lambda event: print(event.step)")
        self._callbacks, self._report_failure = list(callbacks), report_failure
        self.stop_cause: str | None = None
        self.early_stopping = [callback for callback in callbacks if isinstance(callback, EarlyStopping)]

    def report(self, event: Event) -> None:
        """Call every callback with an event, and drop those that fail."""
        for callback in tuple(self._callbacks):
            name = getattr(callback, "__name__", type(callback).__name__)
            try:
                if callback(event) is True:
                    self.stop_cause = name
            except Exception as error:
                self._callbacks.remove(callback)
                self._report_failure(event.step, name, f"{type(error).__name__}: {error}", place_in(error))


def _check_callable(callback: Any) -> None:
    """Raise UserError for a callback that cannot be called, or is a class instead of an instance."""
    if isinstance(callback, type):
        name = callback.__name__
        raise UserError(f"{place_of(callback.__init__)}callbacks: got the class {name}, expected an instance: {name}()")
    if callable(callback):
        return
    method_names = [name for name, method in vars(type(callback)).items() if place_of(method)]
    if not method_names:
        raise UserError(f"callbacks: got {callback!r:.80}, expected functions of an Event")
    raise UserError(
        f"{place_of(getattr(type(callback), method_names[0]))}callbacks: got a {type(callback).__name__}, which cannot "
        f"be called, expected functions of an Event: instead of {method_names[-1]}, define __call__(self, event), and "
        "choose by event.kind"
    )
