r"""Large batches: scaling of the learning rate, growing batches, and rules that scale each layer separately.

For a batch k times as large, SGD's learning rate is multiplied by k (Goyal et al. 2017, arXiv 1706.02677) after a
warm-up, and Adam's by sqrt(k) (Malladi et al. 2022, arXiv 2205.10287). If training diverges at these rates, LARS (You
et al. 2017, arXiv 1708.03888) or LAMB (You et al. 2020, arXiv 1904.00962) helps: both scale each layer's update by the
norm of the layer's weights. Both are chains of optax's transformations, but they scale stacked layers one by one. As in
the papers' code, they do not scale gains and biases by norms. LARS multiplies the gradients of gains and biases by the
trust coefficient, so that these parameters stay stable at learning rates above 1. `experiments/large_batch_digits.py`
shows these effects.

Training with a growing batch (Smith et al. 2018, arXiv 1711.00489) takes several runs, each of which resumes the run
before it. `ramp_up` computes these runs.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import optax

from jaxscale.errors import UserError, unknown
from jaxscale.optim.per_layer import UpdateRule, by_kind, per_layer

if TYPE_CHECKING:
    from jaxscale.optim.optimizer import Optimizer

Scaling = Literal["linear", "sqrt"]
_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}
"""Power of the batch ratio that multiplies the learning rate, by the name of the scaling rule."""


def scaled(
    optimizer: "Optimizer", ratio: float, rule: Scaling | str = "linear", *, warmup: int | None = None
) -> "Optimizer":
    """Return an optimizer for a batch size other than the one that `optimizer` was tuned for.

    Args:
        optimizer: the tuned optimizer.
        ratio: size of the new batch divided by the size of the old batch.
        rule: factor of the learning rate: the ratio ("linear", for SGD) or its square root ("sqrt", for Adam).
        warmup: number of updates of linear warm-up; `None` keeps the optimizer's warm-up.

    Raises:
        UserError: the rule is unknown, the ratio is not a number above 0, or the schedule is a function.

    Example:
        >>> from jaxscale.optim.optimizer import Optimizer
        >>> large = scaled(Optimizer(name="sgd", learning_rate=0.05), 32, warmup=17)
        >>> large.learning_rate, large.warmup
        (1.6, 17)
    """
    if rule not in _EXPONENTS:
        raise unknown("scaling rule", rule, _EXPONENTS)
    if not (ratio > 0 and math.isfinite(ratio)):
        raise UserError(f"ratio: got {ratio!r}, expected a number above 0: the new batch size divided by the old one")
    if callable(optimizer.schedule):
        raise UserError(
            "schedule: got a function, expected a learning rate to scale; in the function, multiply the learning rate "
            f"by the {'' if rule == 'linear' else 'square root of the '}ratio"
        )
    rate_factor = ratio ** _EXPONENTS[rule]
    final_rate = optimizer.final_learning_rate
    return dataclasses.replace(
        optimizer,
        learning_rate=optimizer.learning_rate * rate_factor,
        final_learning_rate=None if final_rate is None else final_rate * rate_factor,
        warmup=optimizer.warmup if warmup is None else warmup,
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run in which the batch size is constant.

    Args:
        steps: number of updates in the phase.
        batch: number of rows in the global batch.
    """

    steps: int
    batch: int


def ramp_up(rows: int, start: int, end: int, over: int, *, factor: int = 2) -> tuple[Phase, ...]:
    """Return the phases of a run whose batch size is multiplied by `factor` from phase to phase.

    All phases but the last train on equal shares of the first `over` rows.

    Args:
        rows: number of training rows of the whole run.
        start, end: numbers of rows in the first and the last batch; `end` is `start` times a power of `factor`.
        over: number of training rows before the last phase; a phase whose share is less than one batch is left out.
        factor: batch size of a phase divided by the batch size of the phase before it.

    Example:
        >>> ramp_up(10_000, 32, 128, over=2_048)
        (Phase(steps=32, batch=32), Phase(steps=16, batch=64), Phase(steps=62, batch=128))
    """
    if start < 1 or factor < 2 or rows < 1:
        numbers_text = f"rows={rows}, start={start} and factor={factor}"
        raise UserError(
            f"ramp_up: got {numbers_text}, expected rows and start of at least 1, and a factor of at least 2"
        )
    batch_sizes = list(
        itertools.takewhile(
            lambda batch_size: batch_size <= end, (start * factor**phase_index for phase_index in itertools.count())
        )
    )
    if not batch_sizes or batch_sizes[-1] != end:
        raise UserError(f"ramp_up: got start={start}, end={end}, expected end to be start times a power of {factor}")
    if not 0 <= over < rows:
        raise UserError(f"ramp_up: got over={over} of {rows} rows, expected 0 or more, and fewer than all rows")
    phases = [
        Phase(steps, batch_size)
        for batch_size in batch_sizes[:-1]
        if (steps := over // (len(batch_sizes) - 1) // batch_size)
    ]
    remaining_rows = rows - sum(phase.steps * phase.batch for phase in phases)
    return (*phases, Phase(max(remaining_rows // end, 1), end))


def lars(
    rate: float | Callable[[Any], Any],
    *,
    momentum: float = 0.9,
    trust: float = 0.02,
    weight_decay: float = 1e-4,
    leaves: Any = None,
    mask: Any = None,
) -> UpdateRule:
    r"""LARS, layer-wise adaptive rate scaling; the layers of an array may be stacked.

    .. math:: m \leftarrow \mu m - \eta \tau \frac{|w|}{|g + \lambda w|} (g + \lambda w), \quad w \leftarrow w + m

    Args:
        rate: learning rate, or a schedule.
        momentum: mu, the decay of the momentum.
        trust: tau, the trust coefficient. The paper's 0.001 is for learning rates 20 times as large; only the
            product of the coefficient and the learning rate matters.
        weight_decay: lambda, the factor of weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    References:
        You et al. 2017, arXiv 1708.03888.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.array([[3.0, 4.0]])}
        >>> rule = lars(1.0, trust=0.1, weight_decay=0.0)
        >>> update, _ = rule.update({"w": jnp.array([[0.0, 2.0]])}, rule.init(params), params)
        >>> update["w"].tolist()
        [[0.0, -0.5]]
    """
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=mask),
        _scale_by_trust(trust, leaves),
        optax.scale_by_learning_rate(rate),
        optax.trace(decay=momentum),
    )


def lamb(
    rate: float | Callable[[Any], Any],
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    leaves: Any = None,
    mask: Any = None,
) -> UpdateRule:
    r"""LAMB: Adam with each layer's update scaled to the norm of the layer's weights; layers may be stacked.

    .. math:: u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \quad w \leftarrow w - \eta \frac{|w|}{|u|} u

    `optax.lamb` takes one norm over all layers of a stacked array, and scales gains and biases too.

    Args:
        rate: learning rate, or a schedule.
        b1, b2, eps: Adam's constants.
        weight_decay: lambda, the factor of weight decay.
        leaves: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.array([[3.0, 4.0]])}
        >>> rule = lamb(0.1, eps=0.0, weight_decay=0.0)
        >>> update, _ = rule.update({"w": jnp.array([[1.0, 2.0]])}, rule.init(params), params)
        >>> round(float(jnp.linalg.norm(update["w"])), 3)  # a tenth of the norm of the weights
        0.5

    References:
        You et al. 2020, arXiv 1904.00962.
    """
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask=mask),
        _scale_by_trust(1.0, leaves),
        optax.scale_by_learning_rate(rate),
    )


def _scale_by_trust(trust: float, param_info_tree: Any) -> UpdateRule:
    """Return a rule that scales a layer's update to the norm `trust * |weights|`, and a vector's update by `trust`."""
    ratio_rule = per_layer(optax.scale_by_trust_ratio(trust_coefficient=trust), param_info_tree)
    rules = {"scaled": ratio_rule, "plain": optax.scale(trust)}
    return by_kind(rules, lambda param_info: "plain" if param_info.kind == "vector" else "scaled", param_info_tree)
