"""Find whether a loss couples the rows of a batch, so that it is not the sum of the losses of the rows.

A sum over rows has no second difference over two sets of rows: with sets I and J of a batch, and L(J, I) the loss of
the batch in which I is replaced by J, and J by I,

    L(J, I) - L(J, J) - L(I, I) + L(I, J) = 0.

A contrastive loss, a ranking or inputs that are standardized over the batch do not have this property. Such a loss is
another one in microbatches, in replicas that compute gradients of their own rows, and in a batch that is filled up with
rows of weight 0. A coupling that the batch does not excite, such as a capacity of experts that is not reached, is not
found. Batch statistics in training, which are documented, are not looked at: the model is evaluated.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxscale.blocks import Loss
from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.models.scores import RowParts, rows_in_parts
from jaxscale.recipe.combinations import cut_of_batch
from jaxscale.recipe.requests import Facts
from jaxscale.state.layout import REPLICA_AXIS
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
        if cut_text is None or self._over == "rows":
            return
        if self._over == "batch":
            self._check_parts(make_module(), batch, cut_text)
            return
        if not self.is_found(make_module(), batch):
            return
        raise UserError(
            f"{cut_text}: the loss of this model couples the rows of a batch (its second difference over sets of rows "
            f"is {self._difference:.2g} of the loss), so parts of a batch have another loss than the whole; remove "
            'this setting, or declare ForeignModel(over="rows") to accept that'
            f"{self._gathering_text()}",
            page="start/own_model",
        )

    def _gathering_text(self) -> str:
        """Return the advice for a codec, whose replicas can gather what the module returns."""
        plan = self._planned.plan
        if plan.microbatches > 1 or plan.diloco is not None:
            return ""
        return (
            ', or ForeignModel(over="batch") if the score alone couples rows: replicas then gather what the module '
            "returns"
        )

    def _check_parts(self, module: nnx.Module, batch: Batch, cut_text: str) -> None:
        """Refuse a codec if the module itself couples rows, so that replicas cannot compute it on rows of their own.

        Args:
            module: the module with its weights.
            batch: device arrays of the first batch.
            cut_text: the text of the codec.
        """
        graphdef, variables = nnx.split(module)
        planned, replica_count = self._planned, self._planned.layout.mesh.shape[REPLICA_AXIS]

        @functools.partial(jax.jit, static_argnames="count")
        def loss_of_parts(variables: Params, batch: Batch, count: int) -> Loss:
            with rows_in_parts(RowParts(None, count)):
                return planned.loss(nnx.merge(graphdef, variables), batch, planned.context(None))

        whole, parts = (float(loss_of_parts(variables, batch, count).total) for count in (1, replica_count))
        difference = abs(parts - whole) / max(abs(whole), 1e-30)
        if difference > TOLERANCE:
            raise UserError(
                f"{cut_text}: the module itself couples the rows of a batch (called with the rows of each replica, it "
                f"gives a loss that differs by {difference:.2g}), so replicas cannot compute it on rows of their own; "
                "let the module return numbers for each row, such as embeddings, and couple them in the score, or "
                "remove this setting",
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
