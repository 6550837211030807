"""Optimizer: an optax optimizer and its schedule as a value that the command line, JSON and tests can name.

The update rules are optax's own. `custom` takes any other optax transformation.
"""

import dataclasses
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
        final_learning_rate: at the last step; `None` is a tenth of the peak.
        warmup: updates of linear warm-up.
        schedule: how the rate falls after the warm-up.
        b1: decay of the first moment (adamw, lion).
        b2: decay of the second moment (adamw, lion).
        eps: added to the root of the second moment (adamw).
        momentum: of sgd; 0 keeps no state.
        weight_decay: decoupled, times the learning rate.
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
        for field in ("learning_rate", "final_learning_rate", "clip"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise UserError(f"optimizer.{field}: got {value!r}, expected a number above 0")
        for field in ("warmup", "weight_decay", "momentum"):
            if not getattr(self, field) >= 0:
                raise UserError(f"optimizer.{field}: got {getattr(self, field)!r}, expected 0 or more")
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
        """The optax transformation.

        Args:
            steps: updates of the run, for the schedule.
            decay_mask: tree like the parameters; true where `decay="matrices"` decays.
        """
        import optax

        rate = self.schedule_fn(steps)
        mask = decay_mask if self.decay == "matrices" else None
        if self.custom is not None:
            rule = self.custom(rate)
        elif self.name == "adamw":
            rule = optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=mask)
        elif self.name == "lion":
            rule = optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=mask)
        elif self.name == "adafactor":
            rule = optax.adafactor(rate, weight_decay_rate=self.weight_decay or None, weight_decay_mask=mask)
        else:
            decay = optax.add_decayed_weights(self.weight_decay, mask) if self.weight_decay else optax.identity()
            rule = optax.chain(decay, optax.sgd(rate, momentum=self.momentum or None))
        return rule if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), rule)
