"""Set fields of nested dataclasses from dotted paths and texts, as in `--plan.mesh fsdp:4`."""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxscale.errors import MAX_WORD_CHARACTERS, UserError, abbreviates, near_miss
from jaxscale.values.annotations import (
    alternatives,
    describe,
    error_at_path,
    field_types,
    has_text_form,
    is_optional,
    is_record,
    item_hints,
    literal_suggestion,
    wrong_type_error,
)
from jaxscale.values.as_json import load, load_union, parse_text_form
from jaxscale.values.read_files import parse_json

T = TypeVar("T")


def override(value: T, changes: Mapping[str, str]) -> T:
    """Return a copy of a value in which the fields at some dotted paths have new values. These are given as texts.

    Each dataclass on a path is replaced once, with all its changes. So its checks never see a part of the changes.

    Args:
        value: a frozen dataclass.
        changes: texts by dotted path: `{"model.embed": "256", "plan.mesh": "fsdp:4"}`. In a path, `-` may replace `_`.

    Raises:
        UserError: a path is unknown (the message suggests a similar one), or a text is not of the field's type.

    Example:
        >>> from jaxscale.recipe.plan import Plan
        >>> str(override(Plan(), {"mesh": "fsdp:4", "zero": "3"}).mesh)
        'fsdp:4'
        >>> override(Plan(), {"zeor": "3"})
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown field 'zeor'; did you mean 'zero'?
    """
    nested_changes: dict[str, Any] = {}  # by field name: a text, or a dict of the changes in a nested dataclass
    for user_path, text in changes.items():
        path = user_path.replace("-", "_")
        _check_path(value, path, user_path)
        parent_changes = nested_changes
        *parent_names, field_name = path.split(".")
        for index, parent_name in enumerate(parent_names):
            parent_changes = parent_changes.setdefault(parent_name, {})
            if isinstance(parent_changes, str):
                parent_path = ".".join(parent_names[: index + 1])
                raise UserError(f"{parent_path} and {path} are both given: set one of them")
        if field_name in parent_changes:
            raise UserError(f"{path} and one of its fields are both given, or {path} is given twice: set one of them")
        parent_changes[field_name] = text
    return _replace(value, nested_changes, "")


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field that `override` can set, in the order in which the fields are declared."""
    for name, hint in field_types(type(value)).items():
        field_value, path = getattr(value, name), f"{prefix}{name}"
        if is_record(field_value):
            yield from paths(field_value, f"{path}.")
            if not is_optional(hint):
                continue
        yield path


def parse(text: str, hint: Any, path: str) -> Any:
    """Return the value of a declared type from its text.

    Args:
        text: the text, as on a command line.
        hint: the declared type.
        path: dotted path of the value, for messages.

    Example:
        >>> parse("1e4", int, "steps"), parse("none", int | None, "loss_chunk"), parse("a, b", tuple[str, ...], "axes")
        (10000, None, ('a', 'b'))
    """
    if len(alternatives(hint)) > 1:
        return load_union(lambda alternative: parse(text, alternative, path), hint, path, text)
    origin = get_origin(hint) or hint
    if origin is Literal:
        for literal in get_args(hint):
            if str(literal) == text:
                return literal
        raise wrong_type_error(path, text, hint, literal_suggestion(text, hint))
    if hint is bool:
        bool_by_word = {"true": True, "yes": True, "false": False, "no": False}
        if text.lower() not in bool_by_word:
            raise wrong_type_error(path, text, hint, near_miss(text.lower(), bool_by_word))
        return bool_by_word[text.lower()]
    if hint in (int, float):
        return _number(text, hint, path)
    if hint is str:
        return text
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return hint(text)
    if has_text_form(hint):
        return parse_text_form(text, hint, path)
    if text.strip()[:1] in ("[", "{"):
        return load(parse_json(text, f"{path}: got {text[:60]!r}, which"), hint, path)
    if origin in (tuple, list):
        item_texts = [] if text.strip() in ("", "()") else [item_text.strip() for item_text in text.split(",")]
        hints = item_hints(hint, len(item_texts))
        if len(hints) != len(item_texts):
            raise wrong_type_error(path, text, hint)
        return origin(
            parse(item_text, item_hint, f"{path}[{index}]")
            for index, (item_text, item_hint) in enumerate(zip(item_texts, hints, strict=True))
        )
    if hint is Any:
        return text
    raise UserError(
        f"{path}: got {text!r}; {describe(hint)} cannot be written as text: set it in the experiment file, or give JSON"
    )


def spell(value: Any) -> str:
    """Return the text from which `parse` returns an equal value.

    Example:
        >>> spell(None), spell(True), spell(("a", "b")), spell(0.5)
        ('none', 'true', 'a, b', '0.5')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(spell, value)) or "()"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def _number(text: str, hint: type, path: str) -> int | float:
    """Return the number in a text as `hint`, int or float. A text such as "1e4" is also a valid int."""
    number = math.nan
    for number_type in (float, hint):
        with contextlib.suppress(ValueError):
            number = number_type(text)
    if isinstance(number, float) and (math.isnan(number) or (hint is int and not number.is_integer())):
        raise wrong_type_error(path, text, hint)
    try:
        return hint(number)
    except OverflowError:  # a whole number beyond the range of floats
        raise wrong_type_error(path, text, hint) from None


def _check_path(value: Any, path: str, user_path: str) -> None:
    """Raise UserError if a dotted path does not lead to a field that a text can set.

    Args:
        value: the dataclass at which the path starts.
        path: the path, with underscores.
        user_path: the path as the user wrote it, for messages.
    """
    record, hint = value, Any
    field_names = path.split(".")
    for index, field_name in enumerate(field_names):
        hint_by_field = field_types(type(record)) if is_record(record) else {}
        if field_name not in hint_by_field or (
            field_name in getattr(type(record), "moved", {}) and index == len(field_names) - 1
        ):
            new_path = getattr(type(record), "moved", {}).get(field_name)
            if new_path is not None:
                raise UserError(f"{user_path} has moved: set {'.'.join([*field_names[:index], ''])}{new_path}")
            if index and record is None:
                raise UserError(f"{user_path}: {'.'.join(field_names[:index])} is none, so its fields cannot be set")
            if index and isinstance(record, Mapping):
                raise UserError(
                    f"{user_path}: {'.'.join(field_names[:index])} is a table, set as a whole: give JSON, such as "
                    f"""--{".".join(field_names[:index])} '{{"NAME": {{"FIELD": VALUE}}}}', or in the experiment file"""
                )
            raise UserError(f"unknown field {user_path!r}{_near_path(path, list(paths(value)))}")
        hint, record = hint_by_field[field_name], getattr(record, field_name)
    if is_record(record) and not is_optional(hint):
        raise UserError(f"{user_path} consists of fields: set one of {', '.join(paths(record, path + '.'))}")


def _near_path(path: str, known_paths: Sequence[str]) -> str:
    """Return the end of a message that suggests a similar known path or, if none is similar, lists all known paths."""
    if len(path) > MAX_WORD_CHARACTERS:
        return f"; expected one of {', '.join(known_paths)}"
    path_by_field_name = {known_path.rpartition(".")[2]: known_path for known_path in reversed(known_paths)}
    field_name = path.rpartition(".")[2]
    same_field_paths = [path_by_field_name[field_name]] if field_name in path_by_field_name else []
    siblings = [known_path for known_path in known_paths if known_path.rpartition(".")[0] == path.rpartition(".")[0]]
    short_paths = [known_path for known_path in siblings if abbreviates(path, known_path)]
    similar_paths = short_paths or difflib.get_close_matches(path, known_paths, n=1)
    if similar_paths and same_field_paths and difflib.SequenceMatcher(None, path, similar_paths[0]).ratio() < 0.8:
        similar_paths = same_field_paths
    suggestions = similar_paths or same_field_paths or difflib.get_close_matches(field_name, known_paths, n=1)
    if not suggestions:
        similar_field_names = difflib.get_close_matches(field_name, path_by_field_name, n=1, cutoff=0.75)
        suggestions = [path_by_field_name[similar_field_name] for similar_field_name in similar_field_names]
    return f"; did you mean {suggestions[0]!r}?" if suggestions else f"; expected one of {', '.join(known_paths)}"


def _narrow_type(hint: Any, value: Any) -> Any:
    """Return a field's declared type; if that is `Any` and the value is a bool, number or path, the value's type."""
    return type(value) if hint is Any and isinstance(value, bool | int | float | PurePath) else hint


def _replace(value: Any, changes: Mapping[str, Any], path: str) -> Any:
    """Return a copy of a value with some fields replaced.

    Args:
        value: a frozen dataclass.
        changes: the field's new text, by field name; for a nested dataclass, a dict of the same form instead.
        path: dotted path of the value, for messages.
    """
    hint_by_field = field_types(type(value))
    field_values = {}
    for name, change in changes.items():
        field_path = f"{path}.{name}" if path else name
        field_values[name] = (
            parse(change, _narrow_type(hint_by_field[name], getattr(value, name)), field_path)
            if isinstance(change, str)
            else _replace(getattr(value, name), change, field_path)
        )
    try:
        return dataclasses.replace(value, **field_values)
    except UserError as error:
        raise error_at_path(error, path, list(hint_by_field)) from None
