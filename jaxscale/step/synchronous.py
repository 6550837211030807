"""SynchronousStep: gradients at the newest weights, their exchange, a check that the step is good, and the update."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxscale.recipe.experiment import Guard
from jaxscale.state.train_state import Metrics, TrainState
from jaxscale.step.exchange import Exchange, ExchangeResult
from jaxscale.step.gradients import LossAndGradients
from jaxscale.step.planned_model import positive
from jaxscale.typing import Array, Batch, Bool

GradientFn = Callable[[TrainState, Batch], LossAndGradients]
"""From a state and a global batch to sums of the loss, gradients, and the model's other state."""
UpdateFn = Callable[[ExchangeResult, TrainState, Bool[Array, ""]], TrainState]
"""From exchanged gradients, the state, and whether the step is good, to the state with new weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class SynchronousStep:
    """A function from a state and a global batch to the next state and its metrics.

    Args:
        gradients: computes mean gradients, or each replica's gradients.
        exchange: exchanges gradients between replicas.
        update: updates weights and optimizer state, in the memory where they lie.
        guard: what makes a step bad; a bad step is not applied.
    """

    gradients: GradientFn
    exchange: Exchange
    update: UpdateFn
    guard: Guard

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the next state, and as metrics `loss`, `grad_norm`, `weight` and those of the exchange."""
        loss, gradients, rest = self.gradients(state, batch)
        exchanged = self.exchange(gradients, state)
        mean_loss = loss.total / positive(loss.weight)
        good, watch = state.watch.judge(mean_loss, exchanged.norm, self.guard)
        # a bad step leaves parameters, optimizer, extras and batch statistics as they were
        next_state = self.update(exchanged, state, good)
        old_extra = {name: state.extra[name] for name in exchanged.extra}
        rest, extra = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), (rest, exchanged.extra), (state.rest, old_extra)
        )
        extra = {**next_state.extra, **extra}
        next_state = dataclasses.replace(next_state, step=state.step + 1, rest=rest, watch=watch, extra=extra)
        return next_state, {"loss": mean_loss, "grad_norm": exchanged.norm, "weight": loss.weight, **exchanged.metrics}
