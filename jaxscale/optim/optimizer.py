"""Optimizer: an optax optimizer and its schedule as a value that the command line, JSON and tests can name.

The update rules are optax's own. `custom` takes any other optax transformation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.values import check_types

Name = Literal["adamw", "sgd", "lion", "adafactor"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    r"""An optimizer, its learning-rate schedule, gradient clipping and weight decay.

    The learning rate of update n (from 0) is ``learning_rate * (n + 1) / (warmup + 1)`` for ``n < warmup``, then falls
    from ``learning_rate`` to ``final_learning_rate`` along the schedule until the last step. Gradients are first
    clipped to global norm ``clip``.

    Args:
        name: the update rule.
        learning_rate: its peak.
        final_learning_rate: at the end; `None` is a tenth of the peak.
        warmup: updates of linear warm-up.
        schedule: how the rate falls after the warm-up.
        b1: decay of the first moment (adamw, lion).
        b2: decay of the second moment (adamw, lion).
        eps: added to the root of the second moment (adamw).
        momentum: of sgd; 0 keeps no state.
        weight_decay: decoupled: every update takes this times the learning rate off a weight.
        decay: what is decayed: "matrices" spares norms, biases and other vectors; "all" spares nothing.
        clip: global norm that gradients are clipped to; `None` never clips.
        custom: a function of the schedule (step to learning rate) that returns any optax transformation; replaces
            `name` and its constants, and is clipped and scheduled as above.

    Example:
        >>> round(Optimizer(learning_rate=1e-3, warmup=99).learning_rate_at(0, steps=1000), 8)
        1e-05
    """

    name: Name = "adamw"
    learning_rate: float = 1e-3
    final_learning_rate: float | None = None
    warmup: int = 0
    schedule: Schedule = "cosine"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    clip: float | None = 1.0
    custom: Callable[[Callable[[Any], Any]], Any] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for field in ("learning_rate", "clip"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UserError(f"optimizer.{field}: got {value!r}, expected a number above 0")
        for field in ("final_learning_rate", "warmup", "weight_decay", "momentum", "eps"):
            value = getattr(self, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UserError(f"optimizer.{field}: got {value!r}, expected 0 or more")
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(
                    f"optimizer.{field}: got {getattr(self, field)!r}, expected a number from 0 up to, not including, 1"
                )

    def schedule_fn(self, steps: int) -> Callable[[Any], Any]:
        """Learning rate as an optax schedule: a function of the number of updates made."""
        import optax

        peak = self.learning_rate
        final = peak / 10 if self.final_learning_rate is None else self.final_learning_rate
        rest = max(steps - self.warmup, 1)
        if self.schedule == "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=final / peak)
        elif self.schedule == "linear":
            after = optax.linear_schedule(peak, final, rest)
        else:
            after = optax.constant_schedule(peak)
        if self.warmup == 0:
            return after
        start = optax.linear_schedule(peak / (self.warmup + 1), peak, self.warmup)
        return optax.join_schedules([start, after], [self.warmup])

    def learning_rate_at(self, update: int, steps: int) -> float:
        """Learning rate of update number `update`, counted from 0, in a run of `steps`."""
        return float(self.schedule_fn(steps)(update))

    def build(self, steps: int, decay_mask: Any) -> Any:
        """The optax transformation: clipping, then `rule`.

        Args:
            steps: updates of the run, for the schedule.
            decay_mask: tree like the parameters; true where `decay="matrices"` decays.
        """
        import optax

        rule = self.rule(steps, decay_mask)
        return rule if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), rule)

    def rule(self, steps: int, decay_mask: Any) -> Any:
        """The optax transformation without clipping.

        Args:
            steps: updates of the run, for the schedule.
            decay_mask: tree like the parameters; true where `decay="matrices"` decays.
        """
        import optax

        rate = self.schedule_fn(steps)
        mask = decay_mask if self.decay == "matrices" else None
        if self.custom is not None:
            return self.custom(rate)
        if self.name == "adamw":
            return optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=mask)
        if self.name == "lion":
            return optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=mask)
        if self.name == "adafactor":
            return optax.chain(optax.adafactor(rate), decoupled_decay(rate, self.weight_decay, mask))
        sgd = optax.sgd(rate, momentum=self.momentum or None)
        return optax.chain(sgd, decoupled_decay(rate, self.weight_decay, mask))


def decoupled_decay(rate: Callable[[Any], Any], decay: float, mask: Any) -> Any:
    """Weight decay behind an update rule: takes `rate * decay` of each weight off its update.

    Args:
        rate: learning rate by the number of updates made.
        decay: share of a weight, in units of the learning rate.
        mask: tree of bools like the parameters; `None` decays all.
    """
    import jax
    import jax.numpy as jnp
    import optax

    if not decay:
        return optax.identity()

    def init(params: Any) -> Any:
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        share = decay * rate(state.count)
        chosen = jax.tree.map(lambda _: True, params) if mask is None else mask
        after = jax.tree.map(lambda u, p, on: u - share * p if on else u, updates, params, chosen)
        return after, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
