"""Values to and from JSON, the content of experiment.json and plan.json."""

import dataclasses
import functools
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxscale.errors import UserError, near_miss
from jaxscale.values.annotations import (
    accepts_none,
    describe,
    field_types,
    has_text_form,
    is_record,
    item_hints,
    literal_near,
    located,
    members,
    names_its_class,
    wrong,
)
from jaxscale.values.check import check
from jaxscale.values.type_names import type_name, type_of

T = TypeVar("T")


_TYPE = "type"


_ONE_WAY = ("callable", "object")
"""Keys of values that are written to JSON and not read."""


def to_json(value: Any) -> Any:
    """Return a value as JSON values: dicts, lists, text, numbers.

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
    return _dump(value, type(value))


def from_json(cls: type[T], data: Any, source_name: str = "the JSON") -> T:
    """Return the value of class `cls` from JSON of `to_json`; missing fields get their defaults.

    Args:
        cls: a dataclass, or any other supported type.
        data: JSON data, as `json.loads` returns it.
        source_name: name of the file, for messages.

    Raises:
        UserError: an unknown field, a wrong type, or an invalid value; the message has the file and dotted path.
    """
    try:
        return load(data, cls, "")
    except UserError as error:
        raise UserError(f"{source_name}: {error}") from None


def has_code(data: Any) -> bool:
    """Return whether JSON of `to_json` contains a function, class or other object that cannot be read back."""
    if isinstance(data, dict):
        return any(key in data for key in _ONE_WAY) or any(map(has_code, data.values()))
    return isinstance(data, list) and any(map(has_code, data))


def read_json(path: Any) -> Any:
    """Read the JSON file at `path` (local, or in a bucket); return its content.

    Raises:
        UserError: there is no such file, or it is not JSON (cut short, binary).
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, IsADirectoryError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _dump(value: Any, hint: Any) -> Any:
    """Return the JSON of a value in a field of this declared type."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, type) or (callable(value) and not is_record(value)):
        return {"callable": _code_name(value)}
    if has_text_form(type(value)) and not names_its_class(hint):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {name: _dump(getattr(value, name), item_hint) for name, item_hint in field_types(type(value)).items()}
        return {_TYPE: type_name(_code_name(type(value))), **fields} if names_its_class(hint) else fields
    if isinstance(value, tuple | list):
        sequence_hints = [member for member in members(hint) if (get_origin(member) or member) in (tuple, list)]
        hints = item_hints((*sequence_hints, Any)[0], len(value))
        return [_dump(item, item_hint) for item, item_hint in zip(value, hints, strict=True)]
    if isinstance(value, Mapping):
        item_hint = ([get_args(member)[1] for member in members(hint) if len(get_args(member)) == 2] or [Any])[0]
        return {str(key): _dump(item, item_hint) for key, item in value.items()}
    scalar: Any = value  # possibly an array of rank 0
    if getattr(scalar, "shape", None) == ():
        return scalar.item()
    return {"object": _code_name(type(value))}


def _code_name(code: Any) -> str:
    """Return the module and the name of a function, class or object, which do not change between runs.

    Example:
        >>> _code_name(functools.partial(json.dumps, default=len, indent=2))
        'json:dumps(default=builtins:len, indent=2)'
    """
    if isinstance(code, functools.partial):
        return f"{_code_name(code.func)}({', '.join(_arguments(code.args, code.keywords))})"
    name = getattr(code, "__qualname__", None) or getattr(code, "__name__", None)
    if not isinstance(name, str):
        return _code_name(type(code))
    return f"{getattr(code, '__module__', None) or type(code).__module__}:{name}"


def _arguments(positional: Iterable[Any], named: Mapping[str, Any]) -> list[str]:
    """Return the positional arguments of a call, then its named ones, each as text."""
    return [*map(_argument, positional), *(f"{name}={_argument(value)}" for name, value in named.items())]


def _argument(value: Any) -> str:
    """Return an argument as text, without memory addresses."""
    if isinstance(value, type | functools.partial) or (callable(value) and not is_record(value)):
        return _code_name(value)
    if is_record(value):
        value_by_field = {name: getattr(value, name) for name in field_types(type(value))}
        return f"{_code_name(type(value))}({', '.join(_arguments((), value_by_field))})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_argument, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_argument(item)}' for key, item in value.items())}}}"
    argument_text = repr(value)
    return _code_name(type(value)) if re.search(r" at 0x[0-9a-fA-F]+", argument_text) else argument_text


def load(data: Any, hint: Any, path: str) -> Any:
    """Return the value of a declared type from JSON data; `path` is its dotted path, for messages."""
    if isinstance(data, dict) and any(key in data for key in _ONE_WAY):
        code = next(data[key] for key in _ONE_WAY if key in data)
        raise UserError(
            f"{path}: {code} is code, which cannot be read from JSON: rebuild the value from the file that defines it"
        )
    if isinstance(data, dict) and _TYPE in data and names_its_class(hint):
        json_by_field = {key: item for key, item in data.items() if key != _TYPE}
        return _load_record(json_by_field, type_of(str(data[_TYPE]), path), path)
    if len(members(hint)) > 1:
        return first_that_accepts(lambda member: load(data, member, path), hint, path, data)
    origin = get_origin(hint) or hint
    if hint is float and isinstance(data, str) and data in ("inf", "-inf"):
        return float(data)
    if isinstance(data, str):
        if isinstance(hint, type) and issubclass(hint, PurePath):
            return hint(data)
        if has_text_form(hint):
            return parse_form(data, hint, path)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _load_record(data, hint, path)
    if origin in (tuple, list) and isinstance(data, list):
        hints = item_hints(hint, len(data))
        if len(hints) != len(data):
            raise wrong(path, data, hint)
        return origin(
            load(item, item_hint, f"{path}[{i}]") for i, (item, item_hint) in enumerate(zip(data, hints, strict=True))
        )
    if origin in (dict, Mapping) and isinstance(data, dict):
        item_hint = (*get_args(hint), Any, Any)[1]
        return {key: load(item, item_hint, f"{path}.{key}") for key, item in data.items()}
    if hint is Any:
        return tuple(load(item, Any, path) for item in data) if isinstance(data, list) else data
    check(data, hint, path)
    number: Any = data
    return float(number) if hint is float else number


def _load_record(data: Any, cls: type, path: str) -> Any:
    """Return the value of a dataclass from a JSON object; `path` is its dotted path, for messages."""
    hints = field_types(cls)
    upgrade = getattr(cls, "upgraded_json", None)  # for classes whose earlier versions had other fields
    data = data if upgrade is None else upgrade(data)
    if not isinstance(data, dict):
        raise wrong(path, data, cls)
    for name in data:
        if name not in hints:
            user_path = f"{path}.{name}" if path else name
            fields_text = f"{cls.__name__} has {', '.join(hints)}"
            raise UserError(f"unknown field {user_path!r}: {fields_text}{near_miss(name, hints)}")
    field_values = {name: load(item, hints[name], f"{path}.{name}" if path else name) for name, item in data.items()}
    for field in dataclasses.fields(cls):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.init and not has_default and field.name not in field_values:
            raise UserError(f"{path}.{field.name}".lstrip(".") + " is missing, and has no default")
    try:
        return cls(**field_values)
    except UserError as error:
        raise located(error, path, list(hints)) from None


def first_that_accepts(load_as: Callable[[Any], Any], hint: Any, path: str, data: Any) -> Any:
    """Load data as the first alternative of a union that accepts it; return the value.

    Args:
        load_as: returns the value of the data as the given alternative, or raises a `UserError`.
        hint: the union.
        path: dotted path of the value, for messages.
        data: JSON data, or text.

    Raises:
        UserError: no alternative accepts the data; if only one alternative is not `None`, the error is the one that
            this alternative raised.
    """
    alternatives = [member for member in members(hint) if member is not types.NoneType]
    alternatives.sort(key=lambda member: member is str)  # last, because a field of text accepts any text
    if accepts_none(hint):
        if data is None or (isinstance(data, str) and data.strip().lower() == "none"):
            return None
        if len(alternatives) == 1:
            try:
                return load_as(alternatives[0])
            except UserError as error:
                message = str(error)
                start, middle, end = message.partition(f", expected {describe(alternatives[0])}")
                raise UserError(f"{start}{middle}, or none{end}" if middle else message) from None
    form_error: UserError | None = None
    for member in alternatives:
        try:
            return load_as(member)
        except UserError as error:
            # the error of a class with a text form is the most specific for a text
            if has_text_form(member) and isinstance(data, str):
                form_error = error
    suggestion = literal_near(data, hint)
    if form_error is None or suggestion:
        raise wrong(path, data, hint, suggestion)
    literal_text = ", or ".join(describe(member) for member in alternatives if get_origin(member) is Literal)
    is_word = isinstance(data, str) and data.strip().isalnum()
    raise UserError(f"{form_error}; or set {literal_text}") if is_word and literal_text else form_error


def parse_form(text: str, cls: Any, path: str) -> Any:
    """Return the value of a class that has a text form; `path` is its dotted path, for messages."""
    try:
        return cls.parse(text)
    except UserError as error:
        raise UserError(f"{path}: {error}" if path else str(error)) from None
