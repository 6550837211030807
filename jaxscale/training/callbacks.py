"""A user's own functions, which a run calls after its steps, evaluations and saves, and which may stop it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
            `skipped` and `skipped_in_row`; an evaluation has `loss`, `targets` and, of a classifier, `accuracy`, and
            those of each held-out set by names such as `news/loss`; a checkpoint has the `seconds` of the save.
        folder: the run directory.
    """

    kind: EventKind
    step: int
    values: Mapping[str, float]
    folder: Any


Callback = Callable[[Event], Any]
"""A function of an event. If it returns True, the run saves a checkpoint after the next step and ends.

Each process calls it with the same values, so that all processes stop together; to write somewhere once, write only if
`jax.process_index() == 0`. A callback that raises an exception is reported and not called again.
"""


@dataclasses.dataclass
class EarlyStopping:
    """Stop a run whose held-out metric has not improved in several evaluations in a row.

    Args:
        metric: name of the metric in `Event.values` of an evaluation, such as "loss" or "news/loss". "eval/" may stand
            before it, as in TensorBoard.
        patience: number of evaluations in a row without an improvement after which the run ends.
        least_change: smallest change that counts as an improvement.
        mode: "min" if lower values are better, "max" if higher values are.

    Raises:
        UserError: `patience` is below 1, or the evaluation has no such metric.

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
        self._best, self._worse_count = math.inf, 0

    def __call__(self, event: Event) -> bool:
        """Return whether the run is to stop."""
        if event.kind != "evaluation":
            return False
        name = self.metric.removeprefix("eval/")
        if name not in event.values:
            raise UserError(
                f"metric: got {self.metric!r}, but an evaluation reports {', '.join(event.values)}"
                f"{near_miss(name, event.values)}"
            )
        value = event.values[name] * (1 if self.mode == "min" else -1)
        is_better = value < self._best - self.least_change
        self._best, self._worse_count = (value, 0) if is_better else (self._best, self._worse_count + 1)
        return self._worse_count >= self.patience


class Callbacks:
    """The callbacks of one run.

    Args:
        callbacks: functions of an event.
        report_failure: called with the step, the name of a callback that failed, the text of its error, and the user's
            line as "FILE:LINE: ".

    Attributes:
        stop_cause: name of the callback that asked the run to stop; `None` if none did.

    Raises:
        UserError: one of them cannot be called with an event.
    """

    def __init__(self, callbacks: Sequence[Any], report_failure: Callable[[int, str, str, str], None]) -> None:
        for callback in callbacks:
            if not callable(callback):
                raise UserError(f"callbacks: got {callback!r}, expected functions of an Event")
            check_parameters(callback, f"{place_of(callback)}callbacks", 1, "lambda event: print(event.step)")
        self._callbacks, self._report_failure = list(callbacks), report_failure
        self.stop_cause: str | None = None

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
