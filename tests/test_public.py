"""The public names and their parameters are those of `public_names.txt`: a change there is a change for users.

A line that has to change is written anew by `PUBLIC_NAMES=write pytest tests/test_public.py`; state the change in
CHANGELOG.md.
"""

import dataclasses
import enum
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxscale

WINGS = jaxscale._WINGS
MODULES = ("jaxscale", *(f"jaxscale.{wing}" for wing in WINGS))
SNAPSHOT = Path(__file__).with_name("public_names.txt")
ROOT = Path(__file__).parents[1]


def parameters(value: object) -> str:
    """The parameters of a function or a class, with their defaults, without annotations."""
    try:
        signature = inspect.signature(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return ""
    names = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    text = str(signature.replace(parameters=names, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def lines_of(name: str, value: object) -> Iterator[str]:
    """The line of a name, and below that of a class those of its public methods and properties."""
    if not inspect.isclass(value):
        yield name + (parameters(value) if callable(value) else f": {type(value).__name__}")
        return
    if issubclass(value, enum.Enum):
        yield f"class {name}: {', '.join(value.__members__)}"
        return
    yield f"class {name}{parameters(value)}"
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for member, definition in sorted(vars(value).items()):
        if (member.startswith("_") and member != "__call__") or member in fields:
            continue
        function = getattr(definition, "__func__", definition)
        yield f"    {member}" + (parameters(function) if inspect.isfunction(function) else "")


def snapshot() -> str:
    """The public names of every module, a line each."""
    lines: list[str] = []
    for module in map(importlib.import_module, MODULES):
        lines.append(f"# {module.__name__}")
        for name in sorted(set(module.__all__) - {"__version__"} - set(WINGS)):
            lines += lines_of(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def test_public_names_and_parameters_are_those_of_the_snapshot():
    text = snapshot()
    if os.environ.get("PUBLIC_NAMES") == "write":
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_the_names_of_a_module_are_what_it_defines(name: str):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for public_name in module.__all__:
        if public_name != "__version__":
            assert inspect.getdoc(getattr(module, public_name)), f"{name}.{public_name} has no docstring"


def test_every_public_function_has_an_example_that_runs():
    """In its docstring, or on a page, whose examples `tests/docs/test_pages.py` runs."""
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if "api" not in path.parts]
    code = "\n".join(
        block for page in pages for block in re.findall(r"^```python.*?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    )
    functions = {
        public_name: getattr(module, public_name)
        for module in map(importlib.import_module, MODULES)
        for public_name in module.__all__
        if inspect.isfunction(getattr(module, public_name))
    }
    assert len(functions) > 90
    assert [
        public_name
        for public_name, function in functions.items()
        if ">>> " not in inspect.getdoc(function) and not re.search(rf"\b{public_name}\(", code)
    ] == []


def test_an_unknown_name_is_reported_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'train'"):
        jaxscale.trian  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == jaxscale.__version__
