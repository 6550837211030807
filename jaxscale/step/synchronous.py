"""SynchronousStep: gradients at the newest weights, their exchange, a check that the step is good, and the update.

A step is judged twice: by its loss and gradients, and by its update (`optim/update_guard.py`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxscale.optim.step_loss import step_loss
from jaxscale.recipe.experiment import Guard
from jaxscale.state.train_state import Metrics, RateVerdict, TrainState
from jaxscale.step.exchange import Exchange, ExchangeResult
from jaxscale.step.gradients import LossAndGradients
from jaxscale.step.planned_model import positive_divisor
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Batch, Bool, Params

GradientFn = Callable[[TrainState, Batch], LossAndGradients]
"""A function from a state and a global batch to (sums of the loss, gradients, the model's other state)."""
UpdateFn = Callable[[ExchangeResult, TrainState, Bool[Array, ""]], tuple[TrainState, Bool[Array, ""]]]
"""A function from the exchanged gradients, the state, and whether the step is good so far.

It returns the state with new weights, and whether the step is good and its update was applied."""


@dataclasses.dataclass(frozen=True, eq=False)
class SynchronousStep:
    """A function from a state and a global batch to the next state and the metrics of the step.

    Args:
        gradient_fn: function that computes the mean gradients, or each replica's gradients.
        exchange: function that exchanges gradients between replicas.
        update_fn: function that updates weights and optimizer state, on the device or on the host.
        guard: the conditions that make a step bad; a bad step is not applied.
        rate_verdict: function from the state and the gradients' norm to whether the learning rate allows the next
            update; `None` if `update_fn` judges the update itself.
        frozen_names: names of the parameters that no step changes; they are a part of the model's other state.
    """

    gradient_fn: GradientFn
    exchange: Exchange
    update_fn: UpdateFn
    guard: Guard
    rate_verdict: RateVerdict | None = None
    frozen_names: frozenset[str] = frozenset()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the next state, and the metrics: `loss`, `grad_norm`, `weight`, and the metrics of the exchange."""
        loss_sums, gradients, new_model_state = self.gradient_fn(state, batch)
        exchange_result = self.exchange(gradients, state)
        mean_loss = loss_sums.total / positive_divisor(loss_sums.weight)
        is_good_so_far = state.watch.judge(mean_loss, exchange_result.norm, self.guard)
        is_good_so_far &= self._has_finite_statistics(new_model_state, state.rest)
        if self.rate_verdict is not None:
            is_good_so_far &= self.rate_verdict(state, exchange_result.norm)
        # a bad step leaves parameters, optimizer, extras and batch statistics unchanged
        with step_loss(mean_loss):
            updated_state, is_good = self.update_fn(exchange_result, state, is_good_so_far)
        watch = state.watch.after(exchange_result.norm, is_good)
        old_extra = {name: state.extra[name] for name in exchange_result.extra}
        model_state, extra = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (new_model_state, exchange_result.extra),
            (state.rest, old_extra),
        )
        next_state = dataclasses.replace(
            updated_state, step=state.step + 1, rest=model_state, watch=watch, extra={**updated_state.extra, **extra}
        )
        step_metrics: Metrics = {"loss": mean_loss, "grad_norm": exchange_result.norm, "weight": loss_sums.weight}
        return next_state, {**step_metrics, **exchange_result.metrics}

    def _has_finite_statistics(self, new_model_state: Params, model_state: Params) -> Bool[Array, ""]:
        """Return whether all values of the model's other state (batch statistics) that were finite are still finite."""
        old_leaves = named_leaves(model_state)
        leaf_verdicts = [
            jnp.all(jnp.isfinite(leaf) | ~jnp.isfinite(old_leaves[name]))
            for name, leaf in named_leaves(new_model_state).items()
            if name not in self.frozen_names and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        return jnp.all(jnp.stack(leaf_verdicts)) if leaf_verdicts else jnp.array(True)
