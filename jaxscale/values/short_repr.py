"""The text of a value in a notebook: its class, and the fields that differ from their defaults."""

import dataclasses
from typing import Any


def short_repr(self: Any) -> str:
    """Return the constructor call that makes a dataclass value. Fields with their default values are left out.

    A class uses this function as `__repr__ = short_repr`. A value with a text form is shown as its text, which the
    constructor accepts.

    Example:
        >>> from jaxscale.recipe.plan import Plan
        >>> Plan(mesh="fsdp:4", zero=3)
        Plan(mesh='fsdp:4', zero=3)
        >>> Plan()
        Plan()
    """
    argument_texts = []
    is_keyword = False
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if _is_default(value, field):
            is_keyword = True
            continue
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        is_keyword = is_keyword or has_default
        argument_texts.append(f"{field.name}={_source_text(value)}" if is_keyword else _source_text(value))
    return f"{type(self).__qualname__}({', '.join(argument_texts)})"


def _is_default(value: Any, field: "dataclasses.Field[Any]") -> bool:
    """Return whether a field has its default value. For a value that cannot be compared (an array), return False."""
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is dataclasses.MISSING or type(value) is not type(default):
        return False
    try:
        return bool(value == default)
    except (TypeError, ValueError):
        return False


def _source_text(value: Any) -> str:
    """Return a field's value as source text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_source_text(item)}" for key, item in value.items()) + "}"
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if hasattr(type(value), "parse") and dataclasses.is_dataclass(value):  # a text form
        return repr(str(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return repr(value)
