r"""PipeMare's two remedies against stale weights: smaller steps where the delay is long, and corrected weights.

On stage s, $d_s$ updates happen between a forward and the update with the gradient of its microbatch. So that update is
the $\tau_s$-th update since the forward read the weights, with $\tau_s = d_s + 1$.

- Rescheduling: update k of stage s is scaled by $\tau_s^{-p_k}$ with $p_k = 1 - \min(k/K, 1)$, so all stages
  have the same rate after K updates.
- Correction: a backward differentiates the stage at $w - d_s \delta$, near the weights that its forward read, instead
  of the newest weights w. Here $\delta \leftarrow \gamma_s \delta + (1 - \gamma_s)(w' - w)$ is a moving average of the
  weights' changes, and $\gamma_s = D^{1/d_s}$.

The delay in the paper is 2(P-i)+1, because the paper counts slots in which a stage runs both a forward and a backward.
Here an update follows each backward of 1F1B. The paper's third remedy is left to the caller: to start training with a
synchronous schedule.

References:
    Yang, Zhang, Li, Ré, Aberger, De Sa, "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021
    (https://arxiv.org/abs/1910.05124), section 3.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class Remedies:
    """PipeMare's remedies and their strengths.

    Args:
        anneal: K, number of updates over which rescheduling fades; 0: no rescheduling.
        correction: D, the share of a weight change that is left in the moving average after the delay of the stage,
            above 0 and below 1; `None`: no correction. The paper derives exp(-2) = 0.135.

    Example:
        >>> [round(float(Remedies(anneal=100).scale(3, update)), 3) for update in (0, 50, 100, 500)]
        [0.25, 0.5, 1.0, 1.0]
    """

    anneal: int = 0
    correction: float | None = None

    def __post_init__(self) -> None:
        if self.anneal < 0:
            raise UserError(f"anneal: got {self.anneal} updates, expected 0 (no rescheduling) or more")
        if self.correction is not None and not 0 < self.correction < 1:
            raise UserError(f"correction: got {self.correction}, expected more than 0 and less than 1")

    def scale(self, delay: Any, update: Any) -> Any:
        """Return the float32 factor by which rescheduling scales an update.

        Args:
            delay: $d_s$ of the stage, int32.
            update: k, the number of earlier updates of the stage, int32.
        """
        if not self.anneal:
            return jnp.float32(1)
        exponent = 1 - jnp.minimum(jnp.float32(update) / self.anneal, 1)
        return jnp.float32(1 + delay) ** -exponent

    def rescheduled(self, old: Any, new: Any, delay: Any, update: Any) -> Any:
        """Return the weights after rescheduling: `old` plus `scale` times the change from `old` to `new`.

        Args:
            old: weights before the update.
            new: weights after the update without rescheduling.
            delay: $d_s$ of the stage, int32.
            update: k, the number of earlier updates of the stage, int32.
        """
        if not self.anneal:
            return new
        scale = self.scale(delay, update)
        return jax.tree.map(lambda a, b: (a + scale * (b.astype(jnp.float32) - a)).astype(b.dtype), old, new)

    def followed(self, change: Any, old: Any, new: Any, delay: Any) -> Any:
        """Return the moving average of the weights' changes after an update.

        Args:
            change: the moving average before the update, float32.
            old: weights before the update.
            new: weights after the update.
            delay: $d_s$ of the stage, int32.
        """
        assert self.correction is not None
        decay = jnp.exp(math.log(self.correction) / jnp.maximum(jnp.float32(delay), 1))
        return jax.tree.map(lambda c, a, b: decay * c + (1 - decay) * (b.astype(jnp.float32) - a), change, old, new)

    def corrected(self, weights: Any, change: Any, delay: Any) -> Any:
        """Return the corrected weights, at which a backward differentiates its stage.

        Args:
            weights: the newest weights.
            change: the moving average of the weights' changes, float32.
            delay: $d_s$ of the stage, int32.
        """
        return jax.tree.map(lambda w, c: (w - jnp.float32(delay) * c).astype(w.dtype), weights, change)


def delay_of(delays: Sequence[int], stage: Any) -> Any:
    """Return the delay of a stage, int32. The index `stage` may be traced."""
    return jnp.asarray(delays, jnp.int32)[stage]
