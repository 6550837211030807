"""Experiments, notebooks and pages import public names alone; benchmarks and the composition harness look inside."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = ("composition.py", "same_programs.py")
FILES = [file for file in sorted((ROOT / "experiments").glob("*.py")) if file.name not in INSIDE]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
PAGES = [file for file in sorted((ROOT / "docs").rglob("*.md")) if "build" not in file.relative_to(ROOT).parts]


def sources(file: Path) -> list[str]:
    """The Python of a file: a module, the cells of a notebook, or the examples of a page."""
    text = file.read_text("utf-8")
    if file.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [re.sub(r"^(\s*)[%!].*$", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE) for cell in cells]
    return (
        re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if file.suffix == ".md" else [text]
    )


@pytest.mark.parametrize("file", [*FILES, *NOTEBOOKS, *PAGES, ROOT / "README.md"], ids=lambda file: file.name)
def test_imports_are_of_public_names(file: Path):
    imports = [node for source in sources(file) for node in ast.walk(ast.parse(source))]
    names = [
        (node.module or "", alias.name) for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    modules = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    assert [module for module in modules if module.startswith("jaxscale.")] == []
    private = []
    for module, name in names:
        if module.split(".")[0] != "jaxscale":
            continue
        is_wing = module == "jaxscale" or module.removeprefix("jaxscale.") in importlib.import_module("jaxscale")._WINGS
        if not is_wing or name not in importlib.import_module(module).__all__:
            private.append(f"{module}.{name}")
    assert private == []
