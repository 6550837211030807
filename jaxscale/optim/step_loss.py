"""The loss of a step as `value`, which some of optax's rules need: `contrib.reduce_on_plateau`, `polyak_sgd`."""

import contextlib
from contextvars import ContextVar
from typing import Any, NoReturn

import optax

from jaxscale.errors import UserError
from jaxscale.scoped import scoped

_OPERATOR_NAMES = (
    *("jax_array", "array", "float", "neg", "abs", "lt", "le", "gt", "ge"),
    *(f"{side}{name}" for name in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r")),
)
"""Names, without underscores, of the special methods by which code reads a number."""


def _refuse(*_: Any) -> NoReturn:
    """Raise the error for an unknown loss."""
    raise UserError(
        "optimizer.custom: this rule needs the loss of the step, which is unknown where a stage of an asynchronous "
        "pipeline updates, and where an update is run slice by slice; take a synchronous pipeline, offload.weights "
        "device, and offload.optimizer_state device or host"
    )


UNKNOWN: Any = type("Unknown", (), {f"__{name}__": _refuse for name in _OPERATOR_NAMES})()
"""The loss that a rule gets outside of a synchronous step; computing with it raises an error."""
_loss: ContextVar[Any] = ContextVar("step_loss", default=UNKNOWN)


def step_loss(loss: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which rules get this loss as `value`."""
    return scoped(_loss, loss)


def with_step_loss(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a rule whose update gets the loss of the step as `value`.

    Args:
        rule: any optax transformation; a rule that does not take `value` behaves as before.
    """
    extended_rule = optax.with_extra_args_support(rule)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return extended_rule.update(updates, state, params, **{"value": _loss.get(), **extra})

    return optax.GradientTransformationExtraArgs(rule.init, update)
