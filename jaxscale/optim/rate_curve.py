"""The learning rates of a whole run as NumPy arrays, to be drawn without JAX."""

import numpy as np

from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rules import RULES


def rate_curve(optimizer: Optimizer, steps: int, max_points: int = 241) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the learning rates of evenly spread updates, by the schedule of `optimizer`; its `groups` are ignored.

    Args:
        optimizer: the optimizer.
        steps: number of updates in the run.
        max_points: largest number of evenly spread updates. The last update of the warm-up and the update after it are
            added to these.

    Returns:
        The pair (indices of the updates, ascending, int (n,); their learning rates, float (n,)). `None` if the schedule
        is a user's function, which is not called for a picture.

    Example:
        >>> updates, rates = rate_curve(Optimizer(learning_rate=1.0, warmup=1, schedule="linear"), 11)
        >>> updates[:3].tolist(), rates[:3].round(2).tolist(), round(float(rates[-1]), 2)
        ([0, 1, 2], [0.5, 1.0, 0.91], 0.19)
    """
    if callable(optimizer.schedule):
        return None
    warmup, peak_rate = optimizer.warmup, optimizer.learning_rate
    final_rate = peak_rate / 10 if optimizer.final_learning_rate is None else optimizer.final_learning_rate
    schedule_name = optimizer.schedule or ("cosine" if optimizer.custom is not None else RULES[optimizer.name].schedule)
    spread_updates = np.linspace(0, steps - 1, min(steps, max_points)).astype(int)
    updates = np.unique([*spread_updates, *(update for update in (warmup - 1, warmup) if 0 <= update < steps)])
    decay_shares = np.clip((updates - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    if schedule_name == "constant":
        falling_rates = np.full(len(updates), peak_rate)
    else:
        fallen_shares = decay_shares if schedule_name == "linear" else (1 - np.cos(np.pi * decay_shares)) / 2
        falling_rates = peak_rate + (final_rate - peak_rate) * fallen_shares
    return updates, np.where(updates < warmup, peak_rate * (updates + 1) / (warmup + 1), falling_rates)
