"""The house stays easy to find one's way in: small rooms, short modules, one meaning for the name of a type."""

import ast
import builtins
import collections
import importlib
import inspect
import re
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


def public_types(module: Path) -> set[str]:
    """Names of the public classes and type aliases that a module defines."""
    body = ast.parse(module.read_text()).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    aliases = {
        target.id for target in targets if isinstance(target, ast.Name) and re.fullmatch("[A-Z][a-z]\\w*", target.id)
    }
    return {name for name in classes | aliases if not name.startswith("_")}


def test_at_most_5_names_are_those_of_two_public_types():
    places = collections.defaultdict(list)
    for module in MODULES:
        for name in public_types(module):
            places[name].append(module.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert len(twice) <= 5, twice


STEP = sorted((ROOT / "step").rglob("*.py"))
TYPED = [*STEP, *sorted((ROOT / "state").rglob("*.py"))]


def functions(module: Path) -> list[ast.FunctionDef]:
    """Functions and methods of a module, nested ones too."""
    return [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.FunctionDef)]


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*named, *filter(None, (arguments.vararg, arguments.kwarg))]


@pytest.mark.parametrize("module", TYPED, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_functions_of_the_step_and_of_its_state_have_real_types(module: Path):
    """Neither `Any`, also nested or in quotes, nor `object` in its place."""
    untyped = []
    for function in functions(module):
        annotations = [parameter.annotation for parameter in parameters(function)] + [function.returns]
        words = re.findall(r"\w+", " ".join(ast.unparse(annotation) for annotation in annotations if annotation))
        untyped += [function.name] if {"Any", "object"} & {*words} else []
    assert untyped == []


def test_aliases_of_the_step_and_of_its_state_are_not_any_by_another_name():
    aliases = collections.defaultdict(list)
    for module in TYPED:
        for node in ast.parse(module.read_text()).body:
            aliased = isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            if aliased and ast.unparse(node.value) in ("Any", "object", "typing.Any"):
                aliases[module.relative_to(ROOT).as_posix()].append(ast.unparse(node))
    assert aliases == {}


def test_functions_of_the_step_take_at_most_8_parameters():
    longer = {
        f"{module.relative_to(ROOT).as_posix()} {function.name}": len(parameters(function))
        for module in STEP
        for function in functions(module)
        if len(parameters(function)) > 8
    }
    assert longer == {}


def test_no_class_of_the_step_derives_from_a_concrete_one():
    """But from protocols, tuples of fields, and exceptions of Python."""
    exceptions = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    allowed = {"Protocol", "NamedTuple", *exceptions}
    derived = {
        node.name: bases
        for module in STEP
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef) and (bases := [ast.unparse(base) for base in node.bases])
    }
    assert {name: bases for name, bases in derived.items() if not {*bases} <= allowed} == {}


def test_at_most_50_imports_join_the_modules_of_the_step():
    """Modules that each imports, inside functions and for types alone too."""
    names = {".".join(("jaxscale", *module.relative_to(ROOT).with_suffix("").parts)): module for module in STEP}
    arrows = set()
    for name, module in names.items():
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            arrows |= {(name, other) for other in imported if other in names}
    assert len(arrows) <= 50, sorted(arrows)


@pytest.mark.parametrize("package", ["jaxscale", *(f"jaxscale.{name}" for name in sorted(jaxscale._WINGS))])
def test_no_name_of_a_package_is_one_of_its_modules(package: str):
    """An import of the module would bind it to the package, in place of the name."""
    face = importlib.import_module(package)
    folder = Path(str(face.__file__)).parent
    names = {name for name in face.__all__ if not inspect.ismodule(getattr(face, name))}
    assert names & {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")} == set()


def test_the_readme_fits_a_screen():
    """A row of a table counts without the addresses of its links."""
    lines = (ROOT.parent / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    shown = [re.sub(r"\]\([^)]*\)", "]", line) if line.startswith("|") else line for line in lines]
    assert [line for line in shown if len(line) > (110 if line.startswith("|") else 120)] == []
