"""The cause of a skipped step: an array of the batch, a parameter, or a line of the user's code that is not finite.

If the loss is NaN from the first step, no learning rate removes the cause: a label outside of the classes, weights that
are drawn as NaN, or a file with gaps. Running the forward pass of that batch operation by operation finds the cause.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.blocks import Context
from jaxscale.trees import named_leaves
from jaxscale.values.user_frames import frames_and_lines_of, place_in, place_of

MAX_BYTES = 2**28
"""The forward pass is run operation by operation only if the parameters have at most this many bytes."""


class Causes:
    """The causes of skipped steps of one run.

    Args:
        step_fn: the train step.

    Attributes:
        text: the cause of the first skipped step, for messages; "" if none was found, `None` if no step was skipped.
        advice: what to do about the cause; "" if the learning rate may be the cause.
    """

    def __init__(self, step_fn: Any) -> None:
        self._step_fn = step_fn
        self._batches: dict[int, Any] = {}
        self._state: Any = None
        self.text: str | None = None
        self.advice = ""

    def note(self, step: int, batch: Mapping[str, Any], state: Any) -> None:
        """Keep the batches of this step and of the previous step, and the state after this step."""
        self._batches = {
            other_step: other_batch for other_step, other_batch in self._batches.items() if other_step == step - 1
        } | {step: batch}
        self._state = state

    def cause_fields(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the field `cause` for the event of the first skipped step.

        For later skipped steps, or if the cause is unknown, return `{}`.

        Args:
            step: number of the skipped step.
            metrics: metrics of the skipped step.
        """
        import jax

        if self.text is not None:
            return {}
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        batch = self._batches.get(step)
        self.text = ""
        if not is_finite and metrics["skipped"] >= step:
            self.advice = (
                "no update had been applied before, so the learning rate is not the cause: mend the data, the initial "
                "weights or the score"
            )
        if not is_finite and batch is not None and jax.process_count() == 1:
            self.text = self._cause(step, batch, metrics["loss"])
        return {"cause": self.text} if self.text else {}

    def _cause(self, step: int, batch: Mapping[str, Any], loss: float) -> str:
        """Return a text about the values that are not finite in a step, and set `advice`; "" if none is found."""
        import jax.numpy as jnp

        def has_nonfinite(array: Any) -> bool:
            return jnp.issubdtype(array.dtype, jnp.floating) and not bool(jnp.isfinite(array).all())

        for name, array in batch.items():
            if has_nonfinite(array):
                self.advice = (
                    f"no learning rate changes that: leave out or repair such rows of {name}, which np.isfinite finds"
                )
                is_bad_row = ~np.isfinite(np.asarray(array)).reshape(len(array), -1).all(axis=1)
                bad_row_indices = np.flatnonzero(is_bad_row).tolist()
                rows_text = f"row{'s' * (len(bad_row_indices) > 1)} {', '.join(map(str, bad_row_indices[:3]))}"
                rows_text += f" and {len(bad_row_indices) - 3} more" if len(bad_row_indices) > 3 else ""
                return f"{name} of the batch of step {step} has numbers that are not finite, in {rows_text}"
        parameter_names = [name for name, array in named_leaves(self._state.params).items() if has_nonfinite(array)]
        if parameter_names:
            more_text = f" and {len(parameter_names) - 3} more" if len(parameter_names) > 3 else ""
            return f"the parameters {', '.join(parameter_names[:3])}{more_text} are not finite before step {step}"
        if math.isfinite(loss):
            return (
                f"the loss of step {step} is finite, but its gradient is not: the slope of a root, norm, logarithm or "
                "quotient at 0 is infinite, even where jnp.where selects another value"
            )
        return self._line_of_nan(step, batch, loss)

    def _line_of_nan(self, step: int, batch: Mapping[str, Any], loss: float) -> str:
        """Return a text about the user's line that makes the loss NaN or infinite; "" if no such line is found."""
        import jax

        leaves = jax.tree.leaves(self._state.params)
        if sum(leaf.nbytes for leaf in leaves) > MAX_BYTES:
            return ""
        model = self._step_fn.experiment.model
        try:
            with jax.debug_nans(True), jax.debug_infs(math.isinf(loss)):
                float(model.loss(self._step_fn.module(self._state), dict(batch), Context()).total)
        except FloatingPointError as error:
            frames_and_lines = frames_and_lines_of(error.__traceback__)
            if not frames_and_lines:
                return ""
            return (
                f"{place_in(error)}the first {loss} of step {step} arises here"
                f"{_labels_text(frames_and_lines[-1][0], batch)}"
            )
        except Exception:  # the model runs only under jit
            return ""
        return ""


def _labels_text(frame: Any, batch: Mapping[str, Any]) -> str:
    """Return the end of an error message if labels of a batch exceed the classes of an array in a frame, or else ""."""
    for array_name, array in frame.f_locals.items():
        if getattr(array, "ndim", 0) < 2 or getattr(array, "dtype", None) is None or array.dtype.kind == "i":
            continue
        for labels_name, labels in batch.items():
            if labels.dtype.kind not in "iu" or labels.shape != array.shape[:-1]:
                continue
            smallest_label, largest_label, class_count = int(labels.min()), int(labels.max()), array.shape[-1]
            if smallest_label < 0 or largest_label >= class_count:
                return (
                    f": {labels_name} has labels from {smallest_label} to {largest_label}, "
                    f"but {array_name} has {class_count} classes, expected labels from 0 to {class_count - 1}"
                )
    return ""


def warn_of_no_gradient(step: int, metrics: Mapping[str, float], model: Any) -> None:
    """Warn if the gradient of all parameters is exactly 0 in the first step, because then nothing is trained."""
    if step == 1 and metrics["grad_norm"] == 0 and metrics["weight"] > 0 and math.isfinite(metrics["loss"]):
        warnings.warn(
            f"{place_of(getattr(model, 'score', None))}the gradient of every parameter is 0 in step 1, so nothing is "
            "trained: does the loss depend on what the module returns, without stop_gradient, argmax or rounding?",
            stacklevel=2,
        )
