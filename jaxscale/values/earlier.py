"""Differences between a value and the JSON that an earlier program wrote of such a value, for resuming a run.

Irrelevant differences are removed first. A field that the earlier JSON lacks, because the class did not have it yet,
gets the default value. Paths in a field with the metadata `{"place": "content"}` are ignored, because
another field holds a hash of the content; in a field with `{"place": "name"}` only the last name of a path counts.
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
    """Return the differences between the JSON of a value and earlier JSON, without new fields and folders of files.

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
    """Return the JSON of a value and the earlier JSON, both without irrelevant differences."""
    if isinstance(new_json, dict) and isinstance(old_json, dict):
        new_json = dict(new_json)
        upgrade = getattr(type(value), "upgraded_json", dict)
        old_json = dict(upgrade(old_json))
        if isinstance(old_json.get("type"), str):
            old_json["type"] = type_name(old_json["type"])
        if is_record(value) and new_json.get("type") == old_json.get("type"):
            old_json |= _defaults(value, old_json)
            for field in dataclasses.fields(value):
                name, place = field.name, field.metadata.get("place")
                if place is not None and _is_path(new_json.get(name)) and _is_path(old_json.get(name)):
                    new_json[name], old_json[name] = (
                        _without_place(json_record[name], place) for json_record in (new_json, old_json)
                    )
        for name, inner_value in _inner_values(value).items():
            if name in new_json and name in old_json:
                new_json[name], old_json[name] = _align(inner_value, new_json[name], old_json[name])
    elif isinstance(value, tuple | list) and isinstance(old_json, list) and len(value) == len(old_json):
        json_pairs = [_align(*values_and_jsons) for values_and_jsons in zip(value, new_json, old_json, strict=True)]
        new_json, old_json = [pair[0] for pair in json_pairs], [pair[1] for pair in json_pairs]
    return new_json, old_json


def _inner_values(value: Any) -> dict[str, Any]:
    """Return the values inside a mapping or a dataclass, by their names in JSON."""
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    return {name: getattr(value, name) for name in field_types(type(value))} if is_record(value) else {}


def _defaults(value: Any, old_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of the default of each field that earlier JSON lacks; {} if the class rejects the defaults."""
    hints = field_types(type(value))
    missing_names = [name for name in hints if name not in old_json]
    if not missing_names:
        return {}
    try:
        default_value = type(value)(**{name: getattr(value, name) for name in hints if name in old_json})
    except Exception:  # the class may raise any error; the fields then count as different
        return {}
    default_json = json.loads(json.dumps(to_json(default_value)))
    return {name: default_json[name] for name in missing_names}


def _is_path(value: Any) -> bool:
    """Return whether a JSON value is one or several paths with a folder; a plain word ("byte") is no path."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_path, value))
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _without_place(paths: Any, place: str) -> Any:
    """Return one or several paths without their folders if `place` is "name", a constant text if it is "content"."""
    if place == "content":
        return "a place"
    return [_without_place(path, place) for path in paths] if isinstance(paths, list) else PurePath(paths).name
