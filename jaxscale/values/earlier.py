"""Differences between a value and the JSON of an earlier value, which an earlier version may have written.

The differences decide whether a run can be resumed, so irrelevant differences are removed first. If the earlier JSON
lacks a field that was added to the class later, the field gets its default value. Paths in a field with the metadata
`{"place": "content"}` are ignored, because another field holds a hash of the content. In a field with the metadata
`{"place": "name"}`, only the last part of a path is compared.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxscale.values.annotations import field_types, is_record
from jaxscale.values.as_json import to_json
from jaxscale.values.difference import Difference, difference
from jaxscale.values.type_names import type_name


def changes(value: Any, earlier: Any) -> list[Difference]:
    """Return the differences between the JSON of a value and earlier JSON. New fields and folders of files are ignored.

    Args:
        value: a frozen dataclass.
        earlier: JSON of an earlier value, as `json.loads` returns it.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Corpus:
        ...     file: str = dataclasses.field(metadata={"place": "content"})
        ...     rows: int = 8
        ...     shuffled: bool = False
        >>> [str(change) for change in changes(Corpus("/new/a.txt", rows=9), {"file": "/old/a.txt", "rows": 8})]
        ['rows (9 here, 8 there)']
    """
    return difference(*_align(value, json.loads(json.dumps(to_json(value))), earlier))


def _align(value: Any, new_json: Any, old_json: Any) -> tuple[Any, Any]:
    """Return the JSON of a value and the earlier JSON, both without irrelevant differences.

    Args:
        value: the value.
        new_json: JSON of the value.
        old_json: JSON of the earlier value.
    """
    if isinstance(new_json, dict) and isinstance(old_json, dict):
        new_fields = dict(new_json)
        upgrade = getattr(type(value), "upgraded_json", dict)
        old_fields = dict(upgrade(old_json))
        if isinstance(old_fields.get("type"), str):
            old_fields["type"] = type_name(old_fields["type"])
        if is_record(value) and new_fields.get("type") == old_fields.get("type"):
            old_fields |= _missing_defaults(value, old_fields)
            for field in dataclasses.fields(value):
                name, place_kind = field.name, field.metadata.get("place")
                if place_kind is not None and _is_path(new_fields.get(name)) and _is_path(old_fields.get(name)):
                    new_fields[name] = _without_place(new_fields[name], place_kind)
                    old_fields[name] = _without_place(old_fields[name], place_kind)
        for name, inner_value in _inner_values(value).items():
            if name in new_fields and name in old_fields:
                new_fields[name], old_fields[name] = _align(inner_value, new_fields[name], old_fields[name])
        return new_fields, old_fields
    if isinstance(value, tuple | list) and isinstance(old_json, list) and len(value) == len(old_json):
        new_and_old_items = [
            _align(item, new_item, old_item) for item, new_item, old_item in zip(value, new_json, old_json, strict=True)
        ]
        return [new_item for new_item, _ in new_and_old_items], [old_item for _, old_item in new_and_old_items]
    return new_json, old_json


def _inner_values(value: Any) -> dict[str, Any]:
    """Return the items of a mapping, or the field values of a dataclass, by their names in JSON; `{}` for others."""
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    return {name: getattr(value, name) for name in field_types(type(value))} if is_record(value) else {}


def _missing_defaults(value: Any, old_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of the default of each field that earlier JSON lacks; `{}` if the class rejects the defaults."""
    field_names = list(field_types(type(value)))
    missing_names = [name for name in field_names if name not in old_fields]
    if not missing_names:
        return {}
    try:
        default_value = type(value)(**{name: getattr(value, name) for name in field_names if name in old_fields})
    except Exception:  # the class may raise any error; the fields then count as different
        return {}
    default_json = json.loads(json.dumps(to_json(default_value)))
    return {name: default_json[name] for name in missing_names}


def _is_path(value: Any) -> bool:
    """Return whether a JSON value is a path that contains a separator, or a list of such paths."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_path, value))
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _without_place(path_or_paths: Any, place_kind: str) -> Any:
    """Return paths without their folders if `place_kind` is "name"; return a constant text if it is "content"."""
    if place_kind == "content":
        return "a place"
    if isinstance(path_or_paths, list):
        return [_without_place(path, place_kind) for path in path_or_paths]
    return PurePath(path_or_paths).name
