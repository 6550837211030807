"""The check of a value's fields when it is created: a value with a field of the wrong type cannot exist."""

from typing import Any

from jaxscale.values.annotations import field_types, has_text_form, members
from jaxscale.values.as_text import parse
from jaxscale.values.check import check


def check_types(value: Any) -> None:
    """Check that every field of a frozen dataclass holds its declared type; call it first in `__post_init__`.

    A field whose type has a text form accepts that text, which is parsed: `Plan(mesh="fsdp:4")`. A float field accepts
    an int, which is converted, but not NaN. Neither an int field nor a float field accepts a bool. A field whose
    annotation cannot be checked accepts any value.

    Raises:
        UserError: the message has the field, its value and the expected type.

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
        if isinstance(field_value, str) and str not in members(hint) and any(map(has_text_form, members(hint))):
            field_value = parse(field_value, hint, name)
            object.__setattr__(value, name, field_value)
        check(field_value, hint, name)
        if type(field_value) is int and float in members(hint) and int not in members(hint):
            object.__setattr__(value, name, float(field_value))
