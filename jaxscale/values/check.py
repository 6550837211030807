"""The run-time check of field types: a value of the wrong type cannot be created."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxscale.errors import UserError
from jaxscale.values.annotations import field_types, is_record, item_hints, literal_near, members, wrong


def check_types(value: Any) -> None:
    """Check that every field of a frozen dataclass holds its declared type; call it first in `__post_init__`.

    A float field accepts an int, which is converted, but not NaN. Neither an int field nor a float field accepts a
    bool. A field whose annotation cannot be checked accepts any value.

    Raises:
        UserError: a field does not hold its declared type; the message has the field, its value and the type.

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
        check(field_value, hint, name)
        if type(field_value) is int and float in members(hint) and int not in members(hint):
            object.__setattr__(value, name, float(field_value))


def check(value: Any, hint: Any, path: str) -> None:
    """Check the value at a dotted path, and the values inside it, against a declared type."""
    if len(members(hint)) > 1:
        # alternatives that clearly do not match are skipped, because building an error takes long
        for member in members(hint):
            if isinstance(member, type) and not isinstance(value, (member, int) if member is float else member):
                continue
            if get_origin(member) is Literal and value not in get_args(member):
                continue
            try:
                return check(value, member, path)
            except UserError:
                continue
        raise wrong(path, value, hint, literal_near(value, hint))
    origin = get_origin(hint) or hint
    is_valid = True
    if hint is Any or isinstance(hint, TypeVar):
        pass
    elif origin is Literal:
        is_valid = any(value == option and type(value) is type(option) for option in get_args(hint))
    elif hint is int:
        is_valid = isinstance(value, int) and not isinstance(value, bool)
    elif hint is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    elif origin in (tuple, list):
        is_valid = isinstance(value, origin) and len(item_hints(hint, len(value))) == len(value)
        for index, (item, item_hint) in enumerate(
            zip(value, item_hints(hint, len(value)), strict=False) if is_valid else ()
        ):
            check(item, item_hint, f"{path}[{index}]")
    elif origin in (dict, Mapping):
        is_valid = isinstance(value, Mapping)
        key_hint, item_hint = get_args(hint) or (Any, Any)
        for key, item in value.items() if is_valid else ():
            check(key, key_hint, f"{path} key")
            check(item, item_hint, f"{path}.{key}")
    elif getattr(hint, "_is_protocol", False):
        is_valid = not isinstance(value, type) and (
            not getattr(hint, "_is_runtime_protocol", False) or isinstance(value, hint)
        )
    elif isinstance(origin, type):
        is_valid = isinstance(value, origin)
        if is_valid and is_record(value):
            for name, field_hint in field_types(type(value)).items():
                check(getattr(value, name), field_hint, f"{path}.{name}")
    if not is_valid:
        raise wrong(path, value, hint, literal_near(value, hint))
    return None
