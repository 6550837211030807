"""The run-time check of a value against a declared type."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxscale.errors import UserError
from jaxscale.values.annotations import (
    alternatives,
    field_types,
    is_record,
    item_hints,
    literal_suggestion,
    wrong_type_error,
)
from jaxscale.values.limits import MAX_INT_BITS


def check(value: Any, hint: Any, path: str) -> None:
    """Raise UserError if a value, or an item inside it, is not of its declared type.

    Args:
        value: the value.
        hint: the declared type.
        path: dotted path of the value, for messages.
    """
    if len(alternatives(hint)) > 1:
        # skip alternatives that clearly do not match, because creating an error is slow
        for alternative in alternatives(hint):
            if isinstance(alternative, type) and not isinstance(
                value, (alternative, int) if alternative is float else alternative
            ):
                continue
            if get_origin(alternative) is Literal and not _is_literal(value, alternative):
                continue
            try:
                return check(value, alternative, path)
            except UserError:
                continue
        raise wrong_type_error(path, value, hint, literal_suggestion(value, hint))
    origin = get_origin(hint) or hint
    is_valid = True
    if hint is Any or isinstance(hint, TypeVar):
        pass
    elif origin is Literal:
        is_valid = _is_literal(value, hint)
    elif hint is int:
        is_valid = isinstance(value, int) and not isinstance(value, bool)
        if is_valid and value.bit_length() > MAX_INT_BITS:
            raise wrong_type_error(path, value, hint, f" of at most {MAX_INT_BITS:,} bits")
    elif hint is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and _is_float(value)
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
        raise wrong_type_error(path, value, hint, literal_suggestion(value, hint))
    return None


def _is_literal(value: Any, hint: Any) -> bool:
    """Return whether a value equals one of a `Literal` and has its type. Arrays are therefore never compared."""
    return any(type(value) is type(literal) and value == literal for literal in get_args(hint))


def _is_float(number: int | float) -> bool:
    """Return whether a number can be represented as a float and is not NaN."""
    try:
        return not math.isnan(number)
    except OverflowError:
        return False
