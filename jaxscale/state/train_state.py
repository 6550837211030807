"""TrainState: the state that one step passes on to the next, and the watch that recognizes bad steps."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.recipe.experiment import Guard
from jaxscale.typing import Array, Bool, Float, Int, Params, PyTree

Metrics: TypeAlias = dict[str, Array | np.float32]
"""Scalars of a step, by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watch:
    """A record of past steps, to recognize a bad step, such as one with a spike in its gradient norm.

    Args:
        norm: running mean of the gradient norms of good steps.
        good: number of good steps so far.
        skipped: number of bad steps so far.
        in_row: number of bad steps since the last good step.
    """

    norm: Float[Array, ""]
    good: Int[Array, ""]
    skipped: Int[Array, ""]
    in_row: Int[Array, ""]

    @classmethod
    def start(cls) -> "Watch":
        """Return the record of a run that has made no step."""
        return cls(jnp.zeros((), jnp.float32), *(jnp.zeros((), jnp.int32) for _ in range(3)))

    def judge(self, loss: Float[Array, ""], norm: Float[Array, ""], guard: Guard) -> Bool[Array, ""]:
        """Return whether a step is good, judged by its loss and the norm of its gradients.

        Args:
            loss: mean loss of the step.
            norm: global norm of the step's gradients.
            guard: the conditions that make a step bad.
        """
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if guard.spike > 0:
            is_good &= (self.good < guard.warmup) | (norm <= guard.spike * self.norm)
        return is_good

    def after(self, norm: Float[Array, ""], is_good: Bool[Array, ""]) -> "Watch":
        """Return the watch after a step; a bad step leaves the running mean unchanged.

        Args:
            norm: global norm of the step's gradients.
            is_good: whether the step was applied.
        """
        # the plain mean of the first hundred norms, and then an exponential mean
        norm_weight = 1.0 / jnp.minimum(self.good + 1, 100).astype(jnp.float32)
        return Watch(
            norm=jnp.where(is_good, self.norm + norm_weight * (norm - self.norm), self.norm),
            good=self.good + is_good.astype(jnp.int32),
            skipped=self.skipped + (~is_good).astype(jnp.int32),
            in_row=jnp.where(is_good, 0, self.in_row + 1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a train step receives and returns.

    Args:
        step: number of steps so far, skipped ones included.
        params: float32 master weights, a nested dict by attribute name.
        optimizer: the optimizer's state, from optax.
        rest: the model's other state (batch statistics, generators of dropout), a nested dict.
        watch: record of past gradient norms and bad steps.
        extra: the value of each extra that a technique adds (`StateExtra`), by the extra's name: microbatches in
            flight, residuals of a codec, or weights of replicas that train alone.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: optax.OptState
    rest: Params
    watch: Watch
    extra: dict[str, PyTree] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        param_leaves = jax.tree.leaves(self.params)
        number_count = sum(math.prod(getattr(leaf, "shape", ())) for leaf in param_leaves)
        extra_text = f", extra {', '.join(self.extra)}" if self.extra else ""
        return f"<TrainState: {number_count:,} parameters in {len(param_leaves)} arrays{extra_text}>"


RateVerdict: TypeAlias = Callable[[TrainState, Array], Bool[Array, ""]]
"""A function from the state and the gradients' norm to whether the learning rate allows the next update."""
