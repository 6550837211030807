"""Find whether a loss couples the rows of a batch, so that it is not the sum of the losses of the rows.

A sum over rows has no second difference over two sets of rows: with sets I and J of a batch, and L(J, I) the loss of
the batch in which I is replaced by J, and J by I,

    L(J, I) - L(J, J) - L(I, I) + L(I, J) = 0.

A contrastive loss, a ranking or inputs that are standardized over the batch do not have this property. Such a loss is
another one in microbatches, in replicas that compute gradients of their own rows, and in a batch that is filled up with
rows of weight 0. A coupling that the batch does not excite, such as a capacity of experts that is not reached, is not
found. Batch statistics in training, which are documented, are not looked at: the model is evaluated.
"""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxscale.blocks import Loss
from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.recipe.combinations import cut_of_batch
from jaxscale.recipe.requests import Facts
from jaxscale.step.planned_model import PlannedModel
from jaxscale.typing import Array, Batch, Params

TOLERANCE = 1e-4
"""Second difference, relative to the loss, above which rows count as coupled."""


def second_difference(loss_of_rows: Callable[[np.ndarray], Loss], row_count: int) -> float:
    """Return the second difference of a loss over two sets of rows of a batch, relative to the loss.

    Args:
        loss_of_rows: function from the indices of the rows to compute on, [B] int32, to the sums of their loss.
        row_count: number B of rows of the batch.

    Returns:
        The largest difference, of total and weight, over the two halves, the even and odd rows, and the first two
        quarters; 0 if the batch has one row, or if a loss is not finite.

    Example:
        >>> values = np.array([1.0, 2.0, 4.0, 7.0])
        >>> second_difference(lambda rows: Loss(values[rows].sum(), 4.0), 4)
        0.0
        >>> round(second_difference(lambda rows: Loss(values[rows].sum() ** 2, 4.0), 4), 2)
        0.26
    """
    rows = np.arange(row_count, dtype=np.int32)
    half, quarter = row_count // 2, row_count // 4
    set_pairs = (rows[:half], rows[half : 2 * half]), (rows[0 : 2 * half : 2], rows[1 : 2 * half : 2])
    set_pairs = (*set_pairs, (rows[:quarter], rows[quarter : 2 * quarter]))
    return max(_second_difference(loss_of_rows, rows, *pair) for pair in set_pairs)


def _second_difference(
    loss_of_rows: Callable[[np.ndarray], Loss], rows: np.ndarray, first: np.ndarray, second: np.ndarray
) -> float:
    """Return the relative second difference over two sets of rows, which have equally many indices."""
    sums = []
    for first_source, second_source in ((second, first), (second, second), (first, first), (first, second)):
        chosen_rows = rows.copy()
        chosen_rows[first], chosen_rows[second] = first_source, second_source
        loss = loss_of_rows(chosen_rows)
        sums.append((float(loss.total), float(loss.weight)))
    corners = np.array(sums)
    if not np.isfinite(corners).all():
        return 0.0
    differences = np.abs(np.array([1, -1, -1, 1]) @ corners)
    return float((differences / np.maximum(np.abs(corners).max(0), 1e-30)).max())


class Coupling:
    """Whether the loss of a model couples the rows of a batch: declared, or measured once if it is not declared.

    Args:
        planned: the model under its plan.
    """

    def __init__(self, planned: PlannedModel) -> None:
        self._planned = planned
        model, traits = planned.experiment.model, ModelTraits.of(planned.experiment.model)
        is_ours = type(model).__module__.startswith("jaxscale.") and not traits.foreign
        self._over = "rows" if is_ours else traits.over
        self._difference: float | None = None

    def check(self, make_module: Callable[[], nnx.Module], batch: Batch) -> None:
        """Refuse a plan that computes the loss of parts of a batch if the loss couples rows.

        Args:
            make_module: function that returns the module with the weights before the first step.
            batch: device arrays of the first batch.
        """
        cut_text = cut_of_batch(Facts(self._planned.plan, self._planned.experiment))
        if cut_text is None or self._over == "rows" or not self.is_found(make_module(), batch):
            return
        raise UserError(
            f"{cut_text}: the loss of this model couples the rows of a batch (its second difference over sets of rows "
            f"is {self._difference:.2g} of the loss), so parts of a batch have another loss than the whole; remove "
            'this setting, or declare ForeignModel(over="rows") to accept that',
            page="start/own_model",
        )

    def is_found(self, module: nnx.Module, batch: Batch) -> bool:
        """Return whether the loss couples rows; four to twelve forward passes of a batch measure it, the first time.

        Args:
            module: the module with its weights.
            batch: device arrays of a batch.
        """
        if self._over is not None:
            return self._over == "batch"
        if self._difference is None:
            graphdef, variables = nnx.split(module)
            planned = self._planned

            @jax.jit
            def loss_of_rows(variables: Params, batch: Batch, rows: Array) -> Loss:
                chosen_rows = {name: array[rows] for name, array in batch.items()}
                return planned.loss(nnx.merge(graphdef, variables), chosen_rows, planned.context(None))

            row_count = len(next(iter(batch.values())))
            self._difference = second_difference(lambda rows: loss_of_rows(variables, batch, rows), row_count)
        return self._difference > TOLERANCE
