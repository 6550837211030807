"""The check of the types of a dataclass's fields when a value is created."""

from typing import Any

from jaxscale.values.annotations import alternatives, field_types, has_text_form
from jaxscale.values.as_text import parse
from jaxscale.values.check import check


def check_types(value: Any) -> None:
    """Check that every field of a frozen dataclass has its declared type. Call this first in `__post_init__`.

    If a field's type has a text form, the field also accepts a text, which is parsed: `Plan(mesh="fsdp:4")`. A float
    field accepts an int, which is converted, but not NaN. An int or float field does not accept a bool. If an
    annotation cannot be checked, its field accepts any value.

    Raises:
        UserError: a field does not have its declared type; the message names the field, its value and the type.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Size:
        ...     width: int = 1
        ...     def __post_init__(self) -> None:
        ...         check_types(self)
        >>> Size(width="wide")
        Traceback (most recent call last):
        jaxscale.errors.UserError: width: got 'wide', expected a whole number
    """
    for name, hint in field_types(type(value)).items():
        field_value = getattr(value, name)
        if (
            isinstance(field_value, str)
            and str not in alternatives(hint)
            and any(map(has_text_form, alternatives(hint)))
        ):
            object.__setattr__(value, name, parse(field_value, hint, name))
            field_value = getattr(value, name)
        check(field_value, hint, name)
        if type(field_value) is int and float in alternatives(hint) and int not in alternatives(hint):
            object.__setattr__(value, name, float(field_value))
