"""Fields by dotted path, and their values by text: `--plan.mesh fsdp:4`."""

import contextlib
import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
    wrong,
)
from jaxscale.values.as_json import first_that_accepts, load, parse_form

T = TypeVar("T")


def override(value: T, changes: Mapping[str, str]) -> T:
    """Return a value with some fields replaced, which are specified by dotted path and text.

    Each dataclass on a path is replaced once, with all its changes together, so that its checks never see a
    mixture of old and new values.

    Args:
        value: a frozen dataclass.
        changes: text by dotted path: `{"model.embed": "256", "plan.mesh": "fsdp:4"}`; `-` may stand for `_` in a path.

    Raises:
        UserError: a path is unknown (the message suggests the nearest), or a text is not of the field's type.

    Example:
        >>> from jaxscale.recipe.plan import Plan
        >>> str(override(Plan(), {"mesh": "fsdp:4", "zero": "3"}).mesh)
        'fsdp:4'
        >>> override(Plan(), {"zeor": "3"})
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown field 'zeor'; did you mean 'zero'?
    """
    nested_changes: dict[str, Any] = {}
    for user_path, text in changes.items():
        path = user_path.replace("-", "_")
        _check_path(value, path, user_path)
        target_changes = nested_changes
        *parents, field_name = path.split(".")
        for index, parent in enumerate(parents):
            target_changes = target_changes.setdefault(parent, {})
            if isinstance(target_changes, str):
                parent_path = ".".join(parents[: index + 1])
                raise UserError(f"{parent_path} and {path} are both given: set one of them")
        if field_name in target_changes:
            raise UserError(f"{path} and one of its fields are both given, or it is given twice: set one of them")
        target_changes[field_name] = text
    return _replace(value, nested_changes, "")


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field that `override` takes, in the order they are declared."""
    for name, hint in field_types(type(value)).items():
        field_value, path = getattr(value, name), f"{prefix}{name}"
        if is_record(field_value):
            yield from paths(field_value, f"{path}.")
            if not accepts_none(hint):
                continue
        yield path


def parse(text: str, hint: Any, path: str) -> Any:
    """Read a value of type `hint` from its text form `text`; `path` is its dotted path, for messages.

    Example:
        >>> parse("1e4", int, "steps"), parse("none", int | None, "loss_chunk"), parse("a, b", tuple[str, ...], "axes")
        (10000, None, ('a', 'b'))
    """
    if len(members(hint)) > 1:
        return first_that_accepts(lambda member: parse(text, member, path), hint, path, text)
    origin = get_origin(hint) or hint
    if origin is Literal:
        for option in get_args(hint):
            if str(option) == text:
                return option
        raise wrong(path, text, hint, literal_near(text, hint))
    if hint is bool:
        bool_by_word = {"true": True, "yes": True, "false": False, "no": False}
        if text.lower() not in bool_by_word:
            raise wrong(path, text, hint, near_miss(text.lower(), bool_by_word))
        return bool_by_word[text.lower()]
    if hint in (int, float):
        return _number(text, hint, path)
    if hint is str:
        return text
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return hint(text)
    if has_text_form(hint):
        return parse_form(text, hint, path)
    if text.strip()[:1] in ("[", "{"):
        try:
            return load(json.loads(text), hint, path)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: got {text!r}, which is not JSON: {error}") from None
    if origin in (tuple, list):
        item_texts = [] if text.strip() in ("", "()") else [item_text.strip() for item_text in text.split(",")]
        hints = item_hints(hint, len(item_texts))
        if len(hints) != len(item_texts):
            raise wrong(path, text, hint)
        return origin(
            parse(item_text, item_hint, f"{path}[{i}]")
            for i, (item_text, item_hint) in enumerate(zip(item_texts, hints, strict=True))
        )
    if hint is Any:
        return text
    raise UserError(
        f"{path}: got {text!r}; {describe(hint)} cannot be written as text: set it in the experiment file, or give JSON"
    )


def spell(value: Any) -> str:
    """Return the text that `parse` reads back as the value.

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
    """Read a number of type `hint` (int or float) from a text; 1e4 is also a whole number."""
    number = math.nan
    for number_type in (float, hint):
        with contextlib.suppress(ValueError):
            number = number_type(text)
    if isinstance(number, float) and (math.isnan(number) or (hint is int and not number.is_integer())):
        raise wrong(path, text, hint)
    return hint(number)


def _check_path(value: Any, path: str, user_path: str) -> None:
    """Check that a dotted path leads to a field that text can set.

    Args:
        value: the dataclass at which the path starts.
        path: the path, with underscores.
        user_path: the path as the user wrote it, for messages.
    """
    record, hint = value, Any
    names = path.split(".")
    for index, name in enumerate(names):
        hints = field_types(type(record)) if is_record(record) else {}
        if name not in hints or (name in getattr(type(record), "moved", {}) and index == len(names) - 1):
            new_path = getattr(type(record), "moved", {}).get(name)
            if new_path is not None:
                raise UserError(f"{user_path} has moved: set {'.'.join([*names[:index], ''])}{new_path}")
            if index and record is None:
                raise UserError(f"{user_path}: {'.'.join(names[:index])} is none, so its fields cannot be set")
            raise UserError(f"unknown field {user_path!r}{_near_path(path, list(paths(value)))}")
        hint, record = hints[name], getattr(record, name)
    if is_record(record) and not accepts_none(hint):
        raise UserError(f"{user_path} has fields of its own: set one of {', '.join(paths(record, path + '.'))}")


def _near_path(path: str, known_paths: Sequence[str]) -> str:
    """Return a suggestion to append to a message: the known path that is nearest, or whose last part is nearest."""
    path_of_last_part = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known_paths)}
    last_part = path.rpartition(".")[2]
    matches_of_last_part = [path_of_last_part[last_part]] if last_part in path_of_last_part else []
    nearest_paths = difflib.get_close_matches(path, known_paths, n=1)
    if nearest_paths and matches_of_last_part and difflib.SequenceMatcher(None, path, nearest_paths[0]).ratio() < 0.8:
        nearest_paths = matches_of_last_part
    suggestions = nearest_paths or matches_of_last_part or difflib.get_close_matches(last_part, known_paths, n=1)
    if not suggestions:
        near_last_parts = difflib.get_close_matches(last_part, path_of_last_part, n=1, cutoff=0.75)
        suggestions = [path_of_last_part[near_last_part] for near_last_part in near_last_parts]
    return f"; did you mean {suggestions[0]!r}?" if suggestions else f"; expected one of {', '.join(known_paths)}"


def _narrowed(hint: Any, value: Any) -> Any:
    """Return the declared type of a field; for `Any`, the type of its value if that is a bool, a number or a path."""
    return type(value) if hint is Any and isinstance(value, bool | int | float | PurePath) else hint


def _replace(value: Any, changes: Mapping[str, Any], path: str) -> Any:
    """Return a value with some fields replaced.

    Args:
        value: a frozen dataclass.
        changes: by field name, the field's new text; for a nested dataclass, the changes of its fields.
        path: dotted path of the value, for messages.
    """
    hints = field_types(type(value))
    field_values = {}
    for name, change in changes.items():
        field_path = f"{path}.{name}" if path else name
        field_values[name] = (
            parse(change, _narrowed(hints[name], getattr(value, name)), field_path)
            if isinstance(change, str)
            else _replace(getattr(value, name), change, field_path)
        )
    try:
        return dataclasses.replace(value, **field_values)
    except UserError as error:
        raise located(error, path, list(hints)) from None
