"""The check that a user's function can be called as jaxscale calls it, before anything is traced."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxscale.errors import UserError


def check_parameters(
    function: Callable[..., Any], name: str, argument_count: int, example: str, keyword: str | None = None
) -> None:
    """Raise UserError if a function cannot be called with `argument_count` positional arguments.

    The check passes for functions in C that do not specify their parameters.

    Args:
        function: the function.
        name: name of the field that holds the function, for messages.
        argument_count: number of positional arguments.
        example: source code of a valid function, for messages.
        keyword: name of a further parameter that the function may have; its argument is passed by keyword.

    Example:
        >>> check_parameters(lambda: 1, "make", 1, "lambda rngs: nnx.Linear(2, 3, rngs=rngs)")
        Traceback (most recent call last):
        jaxscale.errors.UserError: make: got a function with the parameters (), expected one that takes 1 argument, \
such as lambda rngs: nnx.Linear(2, 3, rngs=rngs)
    """
    try:
        signature = inspect.signature(function)
        if isinstance(function, type):  # the metaclass of Flax's modules takes any arguments
            parameters = list(inspect.signature(function.__init__).parameters.values())[1:]
            signature = signature.replace(parameters=parameters)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * argument_count, **{name: None for name in signature.parameters if name == keyword})
    except TypeError:
        plural = "" if argument_count == 1 else "s"
        keyword_text = f" and, if it is random, a {keyword}," if keyword else ""
        raise UserError(
            f"{name}: got a function with the parameters {signature}, expected one that takes "
            f"{argument_count or 'no'} argument{plural}{keyword_text or ','} such as {example}"
        ) from None


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name.

    Example:
        >>> has_parameter(lambda module, batch, key: 0.0, "key"), has_parameter(lambda module, batch: 0.0, "key")
        (True, False)
    """
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions in C that do not specify their parameters
        return False
