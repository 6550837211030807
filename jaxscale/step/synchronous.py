"""SynchronousStep: gradients at the newest weights, their exchange, a check that the step is good, and the update.

A step is judged twice: by its loss and gradients, and by its update (`optim/update_guard.py`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxscale.optim.step_loss import step_loss
from jaxscale.recipe.experiment import Guard
from jaxscale.state.train_state import Metrics, TrainState
from jaxscale.step.exchange import Exchange, ExchangeResult
from jaxscale.step.gradients import LossAndGradients
from jaxscale.step.planned_model import positive
from jaxscale.typing import Array, Batch, Bool

GradientFn = Callable[[TrainState, Batch], LossAndGradients]
"""A function from a state and a global batch to (sums of the loss, gradients, the model's other state)."""
UpdateFn = Callable[[ExchangeResult, TrainState, Bool[Array, ""]], tuple[TrainState, Bool[Array, ""]]]
"""A function from the exchanged gradients, the state, and whether the step is good so far.

It returns the state with new weights, and whether the step is good and its update was applied."""


@dataclasses.dataclass(frozen=True, eq=False)
class SynchronousStep:
    """A function from a state and a global batch to the next state and the metrics of the step.

    Args:
        gradient_fn: function that computes mean gradients, or each replica's gradients.
        exchange: function that exchanges gradients between replicas.
        update_fn: function that updates weights and optimizer state, in the memory where they lie.
        guard: the conditions that make a step bad; a bad step is not applied.
        rate_fn: the learning rate of an update, given the number of updates made, by which a step is judged whose
            update `update_fn` does not judge; `None` if `update_fn` does.
    """

    gradient_fn: GradientFn
    exchange: Exchange
    update_fn: UpdateFn
    guard: Guard
    rate_fn: Callable[[Array], Array] | None = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the next state, and the metrics: `loss`, `grad_norm`, `weight`, and the metrics of the exchange."""
        loss_sums, gradients, new_model_state = self.gradient_fn(state, batch)
        result = self.exchange(gradients, state)
        mean_loss = loss_sums.total / positive(loss_sums.weight)
        rate = None if self.rate_fn is None else jnp.asarray(self.rate_fn(state.watch.good), jnp.float32)
        is_good_so_far = state.watch.judge(mean_loss, result.norm, self.guard, rate)
        # a bad step leaves parameters, optimizer, extras and batch statistics unchanged
        with step_loss(mean_loss):
            updated_state, is_good = self.update_fn(result, state, is_good_so_far)
        watch = state.watch.after(result.norm, is_good)
        old_extra = {name: state.extra[name] for name in result.extra}
        model_state, extra = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old), (new_model_state, result.extra), (state.rest, old_extra)
        )
        next_state = dataclasses.replace(
            updated_state, step=state.step + 1, rest=model_state, watch=watch, extra={**updated_state.extra, **extra}
        )
        step_metrics: Metrics = {"loss": mean_loss, "grad_norm": result.norm, "weight": loss_sums.weight}
        return next_state, {**step_metrics, **result.metrics}
