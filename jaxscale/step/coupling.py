"""Find whether a loss couples the rows of a batch, so that it is not the sum of the losses of the rows.

A sum over rows has a second difference of 0 over any two sets of rows: with sets I and J of a batch, and L(J, I) the
loss of the batch in which I is replaced by J, and J by I,

    L(J, I) - L(J, J) - L(I, I) + L(I, J) = 0.

A contrastive loss, a ranking or inputs that are standardized over the batch do not have this property. Such a loss
changes in microbatches, in replicas that compute gradients of their own rows, and in a batch that is padded with rows
of weight 0. A coupling that does not show in the batch is not detected, such as a capacity of experts that is not
reached. Batch statistics in training are not measured, because the model runs as in evaluation.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxscale.blocks import Context, Loss
from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.models.scores import RowParts, rows_in_parts
from jaxscale.recipe.combinations import batch_cut_text
from jaxscale.recipe.requests import Facts
from jaxscale.state.layout import REPLICA_AXIS
from jaxscale.step.planned_model import PlannedModel
from jaxscale.typing import Array, Batch, Params

TOLERANCE = 1e-4
"""Second difference, relative to the loss, above which rows count as coupled."""


def second_difference(loss_of_rows: Callable[[np.ndarray], Loss], row_count: int) -> float:
    """Return the second difference of a loss over two sets of rows of a batch, relative to the loss.

    Args:
        loss_of_rows: function from the indices of rows, int32 [B], to the sums of the loss of these rows.
        row_count: number B of rows of the batch.

    Returns:
        The largest second difference of the loss's total or weight, over three pairs of sets: the two halves, the even
        and the odd rows, and the first two quarters. It is 0 if the batch has one row, or if a loss is not finite.

    Example:
        >>> values = np.array([1.0, 2.0, 4.0, 7.0])
        >>> second_difference(lambda rows: Loss(values[rows].sum(), 4.0), 4)
        0.0
        >>> round(second_difference(lambda rows: Loss(values[rows].sum() ** 2, 4.0), 4), 2)
        0.26
    """
    row_indices = np.arange(row_count, dtype=np.int32)
    half_count, quarter_count = row_count // 2, row_count // 4
    set_pairs = (
        (row_indices[:half_count], row_indices[half_count : 2 * half_count]),
        (row_indices[0 : 2 * half_count : 2], row_indices[1 : 2 * half_count : 2]),
    )
    set_pairs = (*set_pairs, (row_indices[:quarter_count], row_indices[quarter_count : 2 * quarter_count]))
    return max(_second_difference(loss_of_rows, row_indices, *pair) for pair in set_pairs)


def _second_difference(
    loss_of_rows: Callable[[np.ndarray], Loss], row_indices: np.ndarray, first_set: np.ndarray, second_set: np.ndarray
) -> float:
    """Return the relative second difference over two sets of rows. The sets have equally many indices."""
    totals_and_weights = []
    for first_source, second_source in (
        (second_set, first_set),
        (second_set, second_set),
        (first_set, first_set),
        (first_set, second_set),
    ):
        chosen_indices = row_indices.copy()
        chosen_indices[first_set], chosen_indices[second_set] = first_source, second_source
        loss = loss_of_rows(chosen_indices)
        totals_and_weights.append((float(loss.total), float(loss.weight)))
    terms = np.array(totals_and_weights)
    if not np.isfinite(terms).all():
        return 0.0
    differences = np.abs(np.array([1, -1, -1, 1]) @ terms)
    return float((differences / np.maximum(np.abs(terms).max(0), 1e-30)).max())


class Coupling:
    """Whether a model's loss couples the rows of a batch. The model declares it, or one measurement finds it.

    Args:
        planned: the model under its plan.
    """

    def __init__(self, planned: PlannedModel) -> None:
        self._planned = planned
        model, traits = planned.experiment.model, ModelTraits.of(planned.experiment.model)
        is_jaxscale_model = type(model).__module__.startswith("jaxscale.") and not traits.foreign
        self._declared_over = "rows" if is_jaxscale_model else traits.over
        self._measured_difference: float | None = None

    @property
    def _context(self) -> Context:
        """The settings of a measured pass: without low-bit products, whose scales all rows of an array share."""
        return dataclasses.replace(self._planned.context(None), matmul=None)

    def check(self, make_module: Callable[[], nnx.Module], batch: Batch) -> None:
        """Refuse a plan that computes the loss of parts of a batch if the loss couples rows.

        Args:
            make_module: function that returns the module with the weights before the first step.
            batch: device arrays of the first batch.
        """
        cut_text = batch_cut_text(Facts(self._planned.plan, self._planned.experiment))
        if cut_text is None or self._declared_over == "rows":
            return
        if self._declared_over == "batch":
            self._check_parts(make_module(), batch, cut_text)
            return
        if not self.couples_rows(make_module(), batch):
            return
        raise UserError(
            f"{cut_text}: the loss of this model couples the rows of a batch (its second difference over sets of rows "
            f"is {self._measured_difference:.2g} of the loss), so parts of a batch have another loss than the whole; "
            'remove this setting, or declare ForeignModel(over="rows") to accept that'
            f"{self._gathering_advice()}",
            page="start/own_model",
        )

    def _gathering_advice(self) -> str:
        """Return the advice that replicas gather the outputs of the module; "" with microbatches or DiLoCo."""
        plan = self._planned.plan
        if plan.microbatches > 1 or plan.diloco is not None:
            return ""
        return (
            ', or ForeignModel(over="batch") if the score alone couples rows: replicas then gather what the module '
            "returns"
        )

    def _check_parts(self, module: nnx.Module, batch: Batch, cut_text: str) -> None:
        """Refuse a codec if the module itself couples rows; no replica can then compute it on its rows alone.

        Args:
            module: the module with its weights.
            batch: device arrays of the first batch.
            cut_text: the text of the plan's codec, for the error message.
        """
        graphdef, variables = nnx.split(module)
        planned, replica_count = self._planned, self._planned.layout.mesh.shape[REPLICA_AXIS]

        @functools.partial(jax.jit, static_argnames="part_count")
        def loss_of_parts(variables: Params, batch: Batch, part_count: int) -> Loss:
            with rows_in_parts(RowParts(None, part_count)):
                return planned.loss(nnx.merge(graphdef, variables), batch, self._context)

        whole_loss, parts_loss = (
            float(loss_of_parts(variables, batch, part_count).total) for part_count in (1, replica_count)
        )
        relative_difference = abs(parts_loss - whole_loss) / max(abs(whole_loss), 1e-30)
        if relative_difference > TOLERANCE:
            raise UserError(
                f"{cut_text}: the module itself couples the rows of a batch (called with the rows of each replica, it "
                f"gives a loss that differs by {relative_difference:.2g}), so replicas cannot compute it on rows of "
                "their own; let the module return numbers for each row, such as embeddings, and couple them in the "
                "score, or remove this setting",
                page="start/own_model",
            )

    def couples_rows(self, module: nnx.Module, batch: Batch) -> bool:
        """Return whether the loss couples rows. If the model does not declare it, the first call measures it.

        The measurement takes four to twelve forward passes of a batch.

        Args:
            module: the module with its weights.
            batch: device arrays of a batch.
        """
        if self._declared_over is not None:
            return self._declared_over == "batch"
        if self._measured_difference is None:
            graphdef, variables = nnx.split(module)
            planned = self._planned

            @jax.jit
            def loss_of_rows(variables: Params, batch: Batch, row_indices: Array) -> Loss:
                chosen_batch = {name: array[row_indices] for name, array in batch.items()}
                return planned.loss(nnx.merge(graphdef, variables), chosen_batch, self._context)

            row_count = len(next(iter(batch.values())))
            self._measured_difference = second_difference(
                lambda row_indices: loss_of_rows(variables, batch, row_indices), row_count
            )
        return self._measured_difference > TOLERANCE
