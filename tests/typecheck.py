"""The run-time check of annotations that the tests switch on.

Left out are constructors of values, for what a user gives them is checked by the values themselves, whose errors are
tested. Functions inside functions are checked where CHECK_NESTED is set, as `.ci/run --nightly` does: their check is
written anew each time the outer one runs, which is a sixth of the suite's time. jaxtyping's check that dims agree binds
the arguments of each call, which doubled the suite's time: only functions whose annotations have dims get it.
"""

import builtins
import inspect
import os
import re
import typing
import warnings
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

NESTED = bool(os.environ.get("CHECK_NESTED"))
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_check_dims = jaxtyping.jaxtyped
_DIMS_IN_TEXT = re.compile(r"\b(Float|Int|Bool|Shaped|UInt32|PyTree)\[")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__qualname__.endswith("__init__") or ("<locals>" in function.__qualname__ and not NESTED):
        return function
    with warnings.catch_warnings():  # optax's types are of the old kind
        warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
        return _beartype(function)


def check_dims_where_given(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """The decorator that takes the place of `jaxtyping.jaxtyped` in what the import hook writes."""

    def decorate(checked: Any) -> Any:
        if inspect.isclass(checked):
            return checked  # a class has only its constructor checked
        if isinstance(checked, classmethod | staticmethod):
            return type(checked)(decorate(checked.__func__))
        needs_dims = not inspect.isfunction(checked) or any(
            _has_dims(annotation, checked) for annotation in checked.__annotations__.values()
        )
        return _check_dims(typechecker=typechecker)(checked) if needs_dims else typechecker(checked)

    return decorate


def _has_dims(annotation: Any, function: Callable[..., Any]) -> bool:
    """Whether an annotation holds one of jaxtyping's types, or may do so: a text with names that are not there yet."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        known = {*function.__globals__, *vars(builtins), function.__qualname__.partition(".")[0]}
        names = re.findall(r"(?<![.\w])[A-Za-z_]\w*", annotation)
        return _DIMS_IN_TEXT.search(annotation) is not None or not known.issuperset(names)
    is_shaped = inspect.isclass(annotation) and annotation.__module__.startswith("jaxtyping")
    return (is_shaped and annotation is not jaxtyping.PyTree) or any(
        _has_dims(argument, function) for argument in typing.get_args(annotation)
    )
