"""Conversion of values to and from JSON, for experiment.json and plan.json."""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxscale.errors import UserError, near_miss
from jaxscale.values.annotations import (
    alternatives,
    describe,
    error_at_path,
    field_types,
    has_class_in_json,
    has_text_form,
    is_optional,
    is_record,
    item_hints,
    literal_suggestion,
    wrong_type_error,
)
from jaxscale.values.check import check
from jaxscale.values.read_files import parse_json, read_bytes
from jaxscale.values.type_names import type_name, type_of

T = TypeVar("T")


_TYPE = "type"


_ONE_WAY_KEYS = ("callable", "object")
"""JSON keys for functions, classes and other objects, which are written to JSON but cannot be read."""


def to_json(value: Any) -> Any:
    """Convert a value to JSON values: dicts, lists, texts and numbers.

    Example:
        >>> import dataclasses
        >>> from jaxscale.sharding.mesh import MeshSpec
        >>> @dataclasses.dataclass(frozen=True)
        ... class Layout:
        ...     mesh: MeshSpec | None = None
        ...     ratio: float = 0.5
        >>> to_json(Layout(MeshSpec(fsdp=4)))
        {'mesh': 'fsdp:4', 'ratio': 0.5}
    """
    return _json_of(value, type(value))


def from_json(cls: type[T], data: Any, source_name: str = "the JSON") -> T:
    """Return the value of type `cls` from the JSON that `to_json` returned. Missing fields get their defaults.

    Args:
        cls: a dataclass, or any other supported type.
        data: JSON values, as `json.loads` returns them.
        source_name: name of the JSON's file, for messages.

    Raises:
        UserError: a field is unknown, or a value is invalid or of a wrong type; the message gives `source_name` and the
            dotted path.
    """
    try:
        return load(data, cls, "")
    except UserError as error:
        raise UserError(f"{source_name}: {error}") from None


def has_code(data: Any) -> bool:
    """Return whether JSON from `to_json` contains a function, class or other object that cannot be read."""
    if isinstance(data, dict):
        return any(key in data for key in _ONE_WAY_KEYS) or any(map(has_code, data.values()))
    return isinstance(data, list) and any(map(has_code, data))


def read_json(path: Any) -> Any:
    """Return the content of a JSON file, local or in a bucket.

    Raises:
        UserError: the file does not exist, is not JSON (for example, because it is truncated or binary), or is larger
            or nested more deeply than any file that jaxscale writes.
    """
    return parse_json(read_bytes(path), str(path))


def _json_of(value: Any, hint: Any) -> Any:
    """Return the JSON of a value in a field of the declared type `hint`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, type) or (callable(value) and not is_record(value)):
        return {"callable": _code_name(value)}
    if has_text_form(type(value)) and not has_class_in_json(hint):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {
            name: _json_of(getattr(value, name), item_hint) for name, item_hint in field_types(type(value)).items()
        }
        return {_TYPE: type_name(_code_name(type(value))), **fields} if has_class_in_json(hint) else fields
    if isinstance(value, tuple | list):
        sequence_hints = [
            alternative
            for alternative in alternatives(hint)
            if (get_origin(alternative) or alternative) in (tuple, list)
        ]
        hints = item_hints((*sequence_hints, Any)[0], len(value))
        return [_json_of(item, item_hint) for item, item_hint in zip(value, hints, strict=True)]
    if isinstance(value, Mapping):
        item_hint = (
            [get_args(alternative)[1] for alternative in alternatives(hint) if len(get_args(alternative)) == 2] or [Any]
        )[0]
        return {str(key): _json_of(item, item_hint) for key, item in value.items()}
    untyped_value: Any = value  # may be an array of rank 0
    if getattr(untyped_value, "shape", None) == ():
        return untyped_value.item()
    return {"object": _code_name(type(value))}


def _code_name(code: Any) -> str:
    """Return MODULE:NAME of a function or class; for another object, of its class. The text is the same in all runs.

    Example:
        >>> import json
        >>> _code_name(functools.partial(json.dumps, default=len, indent=2))
        'json:dumps(default=builtins:len, indent=2)'
    """
    if isinstance(code, functools.partial):
        return f"{_code_name(code.func)}({', '.join(_argument_texts(code.args, code.keywords))})"
    name = getattr(code, "__qualname__", None) or getattr(code, "__name__", None)
    if not isinstance(name, str):
        return _code_name(type(code))
    return f"{getattr(code, '__module__', None) or type(code).__module__}:{name}"


def _argument_texts(positional: Iterable[Any], named: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a call as texts: first the positional arguments, then the named arguments."""
    return [*map(_argument_text, positional), *(f"{name}={_argument_text(value)}" for name, value in named.items())]


def _argument_text(value: Any) -> str:
    """Return an argument of a call as text, without memory addresses."""
    if isinstance(value, type | functools.partial) or (callable(value) and not is_record(value)):
        return _code_name(value)
    if is_record(value):
        value_by_field = {name: getattr(value, name) for name in field_types(type(value))}
        return f"{_code_name(type(value))}({', '.join(_argument_texts((), value_by_field))})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_argument_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument_text(item)}' for key, item in value.items())}}}"
    value_text = repr(value)
    return _code_name(type(value)) if re.search(r" at 0x[0-9a-fA-F]+", value_text) else value_text


def load(data: Any, hint: Any, path: str) -> Any:
    """Return the value of a declared type from its JSON.

    Args:
        data: the value's JSON.
        hint: the declared type.
        path: dotted path of the value, for messages.
    """
    if isinstance(data, dict) and any(key in data for key in _ONE_WAY_KEYS):
        code_name = next(data[key] for key in _ONE_WAY_KEYS if key in data)
        raise UserError(
            f"{path}: {code_name} is code, which cannot be read from JSON: rebuild the value from the file that "
            "defines it"
        )
    if isinstance(data, dict) and _TYPE in data and has_class_in_json(hint):
        json_by_field = {key: item for key, item in data.items() if key != _TYPE}
        return _load_record(json_by_field, _class_in_json(str(data[_TYPE]), hint, path), path)
    if len(alternatives(hint)) > 1:
        return load_union(lambda alternative: load(data, alternative, path), hint, path, data)
    origin = get_origin(hint) or hint
    if hint is float and isinstance(data, str) and data in ("inf", "-inf"):
        return float(data)
    if isinstance(data, str):
        if isinstance(hint, type) and issubclass(hint, PurePath):
            return hint(data)
        if has_text_form(hint):
            return parse_text_form(data, hint, path)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _load_record(data, hint, path)
    if origin in (tuple, list) and isinstance(data, list):
        hints = item_hints(hint, len(data))
        if len(hints) != len(data):
            raise wrong_type_error(path, data, hint)
        return origin(
            load(item, item_hint, f"{path}[{index}]")
            for index, (item, item_hint) in enumerate(zip(data, hints, strict=True))
        )
    if origin in (dict, Mapping) and isinstance(data, dict):
        item_hint = (*get_args(hint), Any, Any)[1]
        return {key: load(item, item_hint, f"{path}.{key}") for key, item in data.items()}
    if hint is Any:
        return tuple(load(item, Any, path) for item in data) if isinstance(data, list) else data
    check(data, hint, path)
    scalar: Any = data
    return float(scalar) if hint is float else scalar


def _class_in_json(name: str, hint: Any, path: str) -> type:
    """Return the dataclass that the JSON key "type" names, for a field declared as `hint`.

    Classes that `hint` lists are found without an import.
    """
    for cls in alternatives(hint):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and type_name(_code_name(cls)) == type_name(name):
            return cls
    return type_of(name, path)


def _load_record(data: Any, cls: type, path: str) -> Any:
    """Return the value of the dataclass `cls` from a JSON object; `path` is the value's path, for messages."""
    hint_by_field = field_types(cls)
    upgrade = getattr(cls, "upgraded_json", None)  # for classes that had other fields in earlier versions
    json_by_field = data if upgrade is None else upgrade(data)
    if not isinstance(json_by_field, dict):
        raise wrong_type_error(path, json_by_field, cls)
    for name in json_by_field:
        if name not in hint_by_field:
            field_path = f"{path}.{name}" if path else name
            fields_text = f"{cls.__name__} has {', '.join(hint_by_field)}"
            raise UserError(f"unknown field {field_path!r}: {fields_text}{near_miss(name, hint_by_field)}")
    field_values = {
        name: load(item, hint_by_field[name], f"{path}.{name}" if path else name)
        for name, item in json_by_field.items()
    }
    for field in dataclasses.fields(cls):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.init and not has_default and field.name not in field_values:
            raise UserError(f"{path}.{field.name}".lstrip(".") + " is missing, and has no default")
    try:
        return cls(**field_values)
    except UserError as error:
        raise error_at_path(error, path, list(hint_by_field)) from None


def load_union(load_as: Callable[[Any], Any], hint: Any, path: str, data: Any) -> Any:
    """Return the value of a union type from its JSON or text. The first alternative that accepts it determines it.

    Args:
        load_as: function that loads the JSON or text as the alternative that it is passed, or raises UserError.
        hint: the union.
        path: dotted path of the value, for messages.
        data: the JSON or text of the value.

    Raises:
        UserError: no alternative accepts the JSON or text. If the union is one type or `None`, the message is based on
            the error of that type.
    """
    non_none_types = [alternative for alternative in alternatives(hint) if alternative is not types.NoneType]
    non_none_types.sort(key=lambda alternative: alternative is str)  # str is the last, because it accepts any text
    if is_optional(hint):
        if data is None or (isinstance(data, str) and data.strip().lower() == "none"):
            return None
        if len(non_none_types) == 1:
            try:
                return load_as(non_none_types[0])
            except UserError as error:
                message = str(error)
                message_start, expected_text, message_end = message.partition(
                    f", expected {describe(non_none_types[0])}"
                )
                raise UserError(
                    f"{message_start}{expected_text}, or none{message_end}" if expected_text else message
                ) from None
    text_form_error: UserError | None = None
    for alternative in non_none_types:
        try:
            return load_as(alternative)
        except UserError as error:
            # if a text is given, the error of a class with a text form is the most specific
            if has_text_form(alternative) and isinstance(data, str):
                text_form_error = error
    suggestion = literal_suggestion(data, hint)
    if text_form_error is None or suggestion:
        raise wrong_type_error(path, data, hint, suggestion)
    literal_text = ", or ".join(
        describe(alternative) for alternative in non_none_types if get_origin(alternative) is Literal
    )
    is_word = isinstance(data, str) and data.strip().isalnum()
    raise UserError(f"{text_form_error}; or set {literal_text}") if is_word and literal_text else text_form_error


def parse_text_form(text: str, cls: Any, path: str) -> Any:
    """Parse the text form of a value of class `cls`. Error messages begin with `path`, the value's path."""
    try:
        return cls.parse(text)
    except UserError as error:
        raise UserError(f"{path}: {error}" if path else str(error)) from None
