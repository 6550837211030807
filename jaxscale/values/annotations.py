"""The meaning of a field's declared type (its *hint*, as Python calls it), and its description in messages."""

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
    """Return the declared type of each field that `__init__` takes, by name."""
    if not dataclasses.is_dataclass(cls):
        return {}
    field_names = [field.name for field in dataclasses.fields(cls) if field.init]
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a name that is imported for type checkers only: the class is not checked
        hints = {}
    return {name: hints.get(name, Any) for name in field_names}


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass that is written to JSON field by field."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not has_text_form(type(value))


def has_text_form(cls: Any) -> bool:
    """Return whether `cls` is a class with a `parse` that inverts its `__str__`."""
    return isinstance(cls, type) and callable(getattr(cls, "parse", None)) and cls.__str__ is not object.__str__


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; any other type is its only alternative."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def accepts_none(hint: Any) -> bool:
    """Return whether `None` is one of the alternatives of the type."""
    return types.NoneType in members(hint)


def _is_open(hint: Any) -> bool:
    """Return whether the annotation alone does not determine the class to build."""
    return hint is Any or hint is object or isinstance(hint, TypeVar) or getattr(hint, "_is_protocol", False)


def names_its_class(hint: Any) -> bool:
    """Return whether the JSON of a dataclass in a field of this type names its class."""
    record_types = [member for member in members(hint) if dataclasses.is_dataclass(member)]
    return _is_open(hint) or any(map(_is_open, members(hint))) or len(record_types) > 1


def item_hints(hint: Any, count: int) -> Sequence[Any]:
    """Return the declared type of each item of a tuple or list of `count` items."""
    type_arguments = get_args(hint)
    if not type_arguments:
        return [Any] * count
    if get_origin(hint) is tuple and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
        return type_arguments
    return [type_arguments[0]] * count


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "none",
    Any: "a value",
}


def describe(hint: Any) -> str:
    """Describe a type for a message."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if len(members(hint)) > 1:
        return ", or ".join(map(describe, members(hint)))
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "a path"
    origin = get_origin(hint) or hint
    if origin in (tuple, list):
        item_texts = ", ".join("..." if item is Ellipsis else describe(item) for item in get_args(hint))
        return f"a list ({item_texts})" if item_texts else "a list"
    if origin in (dict, Mapping):
        return "a table"
    if origin in (Callable, typing.Callable):
        return "a function"
    name = getattr(origin, "__name__", str(origin))
    return f"a {name}" + (" (text such as its str())" if has_text_form(origin) else "")


def wrong(path: str, value: Any, hint: Any, suggestion: str = "") -> UserError:
    """Return the error for the value at `path`, which is not of its declared type; `suggestion` ends its message."""
    if isinstance(value, type):
        value_text = f"the class {value.__qualname__}"
    else:
        full_text = repr(value)
        value_text = full_text if len(full_text) <= 60 else f"{full_text[:57]}..."
        if not isinstance(value, bool | int | float | str | types.NoneType):
            value_text += f" ({type(value).__name__})"
    return UserError(f"{path or 'value'}: got {value_text}, expected {describe(hint)}{suggestion}")


def literal_near(word: Any, hint: Any) -> str:
    """Return a suggestion to append to a message: the literal of a type that is nearest to a word, if any is near."""
    options = [str(option) for member in members(hint) if get_origin(member) is Literal for option in get_args(member)]
    return near_miss(str(word), options) if options else ""


def located(error: UserError, path: str, names: Sequence[str]) -> UserError:
    """Put the path of a nested value in front of its error: "zero: got 7" becomes "plan.zero: got 7".

    Args:
        error: the error that the nested value raised.
        path: dotted path of the nested value; "" for the outermost value.
        names: names of the nested value's fields.
    """
    message = str(error)
    if not path:
        return error
    message = message.removeprefix(f"{path.rpartition('.')[2]}.")  # some errors already have the name
    first_word = message.split(":")[0].split(" ")[0]
    return UserError(f"{path}.{message}" if first_word in names else f"{path}: {message}")
