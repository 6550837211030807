"""JSON of an earlier program compared with a value of now: new fields and moved files are no change, all else is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxscale.errors import UserError
from jaxscale.values import ABSENT, changes, check_types, to_json


@dataclasses.dataclass(frozen=True)
class Part:
    file: str | Path | tuple[str, ...] = dataclasses.field(default="byte", metadata={"place": "content"})
    folder: str = dataclasses.field(default="/models/small", metadata={"place": "name"})
    rate: float = 1.0
    word: str = "  Plain "

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "word", self.word.strip().lower())
        if self.rate > 9:
            raise UserError(f"rate: got {self.rate}, expected at most 9")


@dataclasses.dataclass(frozen=True)
class Whole:
    name: str
    part: Any = Part()
    parts: tuple[Part, ...] = ()
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = dataclasses.field(default_factory=lambda: (1, 2))


WHOLE = Whole("w", Part(rate=2), (Part(word="a"), Part(word="b")), {"x": Part(rate=3)})


def written(value: Any) -> Any:
    return json.loads(json.dumps(to_json(value)))


def records(data: Any) -> list[dict[str, Any]]:
    """Every object in JSON."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return ([data] if isinstance(data, dict) else []) + [found for item in inner for found in records(item)]


def test_its_own_json_is_no_change():
    assert changes(WHOLE, written(WHOLE)) == []


def test_a_field_that_is_lacking_has_its_default_wherever_it_lies():
    value = Whole("w", parts=(Part(),), table={"x": Part()})
    for index, record in enumerate(records(written(value))):
        for name in record:
            data = written(value)
            there = records(data)[index]
            del there[name]
            found = changes(value, data)
            if name in ("name", "type", "x") or (name in ("parts", "table") and there["name"] == "w"):
                assert found, name
            else:
                assert found == [], name


def test_a_lacking_field_that_is_not_at_its_default_is_a_change():
    data = written(WHOLE)
    del data["part"]["rate"], data["parts"][1]["word"]
    rate, parts = changes(WHOLE, data)
    assert tuple(rate) == ("part.rate", 2.0, 1.0)
    assert parts.path == "parts"
    assert [part["word"] for part in parts.first] == ["a", "b"]
    assert [part["word"] for part in parts.second] == ["a", "plain"]


def test_a_field_without_default_or_of_another_class_or_too_many_is_a_change():
    data = written(WHOLE)
    del data["name"]
    data["part"]["type"] = "elsewhere:Part"
    data["part"]["more"] = 1
    found = {change.path: change.second for change in changes(WHOLE, data)}
    assert found == {"name": ABSENT, "part.type": "elsewhere:Part", "part.more": 1}


def test_defaults_that_the_class_refuses_leave_the_difference():
    @dataclasses.dataclass(frozen=True)
    class Fussy:
        low: int = 0
        high: int = 9

        def __post_init__(self) -> None:
            if self.low >= self.high:
                raise RuntimeError("a foreign class raises what it likes")

    assert [found.path for found in changes(Fussy(20, 30), {"low": 20})] == ["high"]


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        ({"file": "/a/x.txt"}, {"file": "/b/y.txt"}, True),
        ({"file": ("/a/x.txt", "gs://b/y")}, {"file": "/b/y.txt"}, True),
        ({"file": "/a/x.txt"}, {"file": "byte"}, False),
        ({"file": "char"}, {"file": "byte"}, False),
        ({"folder": "/a/small"}, {"folder": "/b/c/small"}, True),
        ({"folder": "/a/small"}, {"folder": "/a/large"}, False),
        ({"word": "/a/x"}, {"word": "/b/x"}, False),
    ],
)
def test_places(here, there, same):
    assert (changes(Part(**here), written(Part(**there))) == []) == same
    nested = changes(Whole("w", parts=(Part(**here),)), written(Whole("w", parts=(Part(**there),))))
    assert (nested == []) == same


@pytest.mark.parametrize("data", [[], 3, None, {"name": []}])
def test_what_is_no_record_is_a_change(data):
    assert changes(WHOLE, data)
