"""The house stays easy to find one's way in: small rooms, short modules, one meaning for the name of a type."""

import ast
import collections
from pathlib import Path

import pytest

import jaxscale

ROOT = Path(jaxscale.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


def test_no_room_has_more_than_22_modules():
    sizes = collections.Counter(module.parent.relative_to(ROOT).as_posix() for module in MODULES)
    assert {room: size for room, size in sizes.items() if size > 22} == {}


@pytest.mark.parametrize("room", sorted({module.parent for module in MODULES} - {ROOT}), ids=lambda room: room.name)
def test_every_room_describes_what_it_holds(room: Path):
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))


def test_no_module_has_more_than_500_lines():
    lengths = {module.relative_to(ROOT).as_posix(): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_at_most_5_names_are_those_of_two_public_classes():
    places = collections.defaultdict(list)
    for module in MODULES:
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert len(twice) <= 5, twice
