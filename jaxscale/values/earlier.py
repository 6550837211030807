"""Where a value differs from the JSON that an earlier program wrote of one like it: what resuming a run has to know.

What need not be told apart is made equal first. A field that the earlier JSON lacks, because its class had none, has
the default. Of a field whose metadata say `{"place": "content"}`, where files lie is left out, for something else holds
a hash of their content; of one that says `{"place": "name"}`, the folder is left out and the last name counts.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxscale.values.annotations import field_types, is_record
from jaxscale.values.as_json import to_json
from jaxscale.values.difference import Difference, difference


def changes(value: Any, earlier: Any) -> list[Difference]:
    """Where the JSON of a value differs from earlier JSON, leaf by leaf, but for new fields and for places.

    Args:
        value: a frozen dataclass.
        earlier: what `json.loads` gave.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Corpus:
        ...     file: str = dataclasses.field(metadata={"place": "content"})
        ...     rows: int = 8
        ...     shuffled: bool = False
        >>> [str(found) for found in changes(Corpus("/new/a.txt", rows=9), {"file": "/old/a.txt", "rows": 8})]
        ['rows (9 here, 8 there)']
    """
    return difference(*_aligned(value, json.loads(json.dumps(to_json(value))), earlier))


def _aligned(value: Any, here: Any, there: Any) -> tuple[Any, Any]:
    """The JSON of a value and the earlier one, with what need not be told apart made equal."""
    if isinstance(here, dict) and isinstance(there, dict):
        here, there = dict(here), dict(there)
        upgraded = getattr(type(value), "upgraded_json", None)
        there = there if upgraded is None else dict(upgraded(there))
        if is_record(value) and here.get("type") == there.get("type"):
            there |= _defaults(value, there)
            for field in dataclasses.fields(value):
                name, place = field.name, field.metadata.get("place")
                if place is not None and _is_place(here.get(name)) and _is_place(there.get(name)):
                    here[name], there[name] = (_without_place(data[name], place) for data in (here, there))
        for name, inner in _items(value).items():
            if name in here and name in there:
                here[name], there[name] = _aligned(inner, here[name], there[name])
    elif isinstance(value, tuple | list) and isinstance(there, list) and len(value) == len(there):
        pairs = [_aligned(*items) for items in zip(value, here, there, strict=True)]
        here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return here, there


def _items(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    return {name: getattr(value, name) for name in field_types(type(value))} if is_record(value) else {}


def _defaults(value: Any, there: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of the fields that the earlier record lacks; empty where they have no defaults that go with the others."""
    names = field_types(type(value))
    lacking = [name for name in names if name not in there]
    if not lacking:
        return {}
    try:
        plain = type(value)(**{name: getattr(value, name) for name in names if name in there})
    except Exception:  # whatever the class says of it; the fields then show as different
        return {}
    data = json.loads(json.dumps(to_json(plain)))
    return {name: data[name] for name in lacking}


def _is_place(data: Any) -> bool:
    """Whether JSON is a path with a folder, or several; a plain word in such a field ("byte") is a choice."""
    if isinstance(data, list):
        return bool(data) and all(map(_is_place, data))
    return isinstance(data, str) and ("/" in data or "\\" in data)


def _without_place(data: Any, place: str) -> Any:
    if place == "content":
        return "a place"
    return [_without_place(item, place) for item in data] if isinstance(data, list) else PurePath(data).name
