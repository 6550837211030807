"""The meaning of a field's declared type (Python's *type hint*), and the description of a type in messages."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from jaxscale.errors import UserError, near_miss


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the declared type of each field that a dataclass's `__init__` takes, by name; `{}` for other classes."""
    if not dataclasses.is_dataclass(cls):
        return {}
    field_names = [field.name for field in dataclasses.fields(cls) if field.init]
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a name that is imported only for type checkers: the class's fields are not checked
        hints = {}
    return {name: hints.get(name, Any) for name in field_names}


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass that is written to JSON field by field."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not has_text_form(type(value))


def has_text_form(cls: Any) -> bool:
    """Return whether `cls` is a class with a text form: its `parse` inverts its `__str__`."""
    return isinstance(cls, type) and callable(getattr(cls, "parse", None)) and cls.__str__ is not object.__str__


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; for any other type, that type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_optional(hint: Any) -> bool:
    """Return whether `None` is one of the alternatives of a type."""
    return types.NoneType in alternatives(hint)


def _is_open(hint: Any) -> bool:
    """Return whether a type does not determine the class of a value, such as `Any` or a protocol."""
    return hint is Any or hint is object or isinstance(hint, TypeVar) or getattr(hint, "_is_protocol", False)


def has_class_in_json(hint: Any) -> bool:
    """Return whether the JSON of a dataclass value names its class under the key "type", in a field of this type."""
    record_types = [alternative for alternative in alternatives(hint) if dataclasses.is_dataclass(alternative)]
    return _is_open(hint) or any(map(_is_open, alternatives(hint))) or len(record_types) > 1


def item_hints(hint: Any, item_count: int) -> Sequence[Any]:
    """Return the declared type of each item of a tuple or list with `item_count` items.

    The number of returned types differs from `item_count` if `hint` is a tuple of another length.
    """
    type_arguments = get_args(hint)
    if not type_arguments:
        return [Any] * item_count
    if get_origin(hint) is tuple and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
        return type_arguments
    return [type_arguments[0]] * item_count


_DESCRIPTIONS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "none",
    Any: "a value",
}


def describe(hint: Any) -> str:
    """Return the description of a type in messages, such as "a whole number"."""
    if hint in _DESCRIPTIONS:
        return _DESCRIPTIONS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if len(alternatives(hint)) > 1:
        return ", or ".join(map(describe, alternatives(hint)))
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "a path"
    origin = get_origin(hint) or hint
    if origin in (tuple, list):
        item_texts = ", ".join("..." if item_hint is Ellipsis else describe(item_hint) for item_hint in get_args(hint))
        return f"a list ({item_texts})" if item_texts else "a list"
    if origin in (dict, Mapping):
        return "a dict"
    if origin in (Callable, typing.Callable):
        return "a function"
    class_name = getattr(origin, "__name__", str(origin))
    article = "an" if class_name[:1] in "AEIO" else "a"
    return f"{article} {class_name}" + (" (text such as its str())" if has_text_form(origin) else "")


def wrong_type_error(path: str, value: Any, hint: Any, suggestion: str = "") -> UserError:
    """Return the error for a value that is not of its declared type.

    Args:
        path: dotted path of the value.
        value: the value.
        hint: the declared type.
        suggestion: end of the message, such as "; did you mean 'full'?".
    """
    if isinstance(value, type):
        value_text = f"the class {value.__qualname__}"
    else:
        try:
            full_text = " ".join(repr(value).split())  # the text of an array has several lines
        except ValueError:  # Python cannot print a number of more than 4,300 digits
            full_text = "a number of more than 4,300 digits"
        except RecursionError:
            full_text = "a value that is nested too deeply"
        value_text = full_text if len(full_text) <= 60 else f"{full_text[:57]}..."
        if not isinstance(value, bool | int | float | str | types.NoneType):
            value_text += f" ({type(value).__name__})"
    return UserError(f"{path or 'value'}: got {value_text}, expected {describe(hint)}{suggestion}")


def literal_suggestion(value: Any, hint: Any) -> str:
    """Return the end of a message that suggests the literal most similar to a value; "" if no literal is similar."""
    literals = [
        str(literal)
        for alternative in alternatives(hint)
        if get_origin(alternative) is Literal
        for literal in get_args(alternative)
    ]
    return near_miss(value, literals) if literals and isinstance(value, str) else ""


def error_at_path(error: UserError, path: str, field_names: Sequence[str]) -> UserError:
    """Return the error of a nested value with the value's path added: "zero: got 7" becomes "plan.zero: got 7".

    Args:
        error: the error that the nested value raised.
        path: dotted path of the nested value; "" for the outermost value.
        field_names: names of the nested value's fields.
    """
    if not path:
        return error
    message = str(error).removeprefix(f"{path.rpartition('.')[2]}.")  # some errors already begin with the value's name
    first_word = message.split(":")[0].split(" ")[0]
    return UserError(f"{path}.{message}" if first_word.split(".")[0] in field_names else f"{path}: {message}")
