"""Every example in a docstring runs, and prints what it says.

Docstrings are found in the source, not on the objects: doctest passes over functions that the run-time check wraps.
"""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path.relative_to(ROOT)
    for package in ("jaxscale", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>>" in path.read_text()
]
LONG = {"explain": pytest.mark.slow}
"""Modules whose examples trace a step under every memory plan."""


def examples(source: str) -> Iterator[tuple[str, str, int]]:
    """(name, docstring, its line) of everything that has one with an example."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and ">>>" in text:
                yield getattr(node, "name", "module"), text, node.body[0].lineno - 1


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path), marks=LONG.get(path.stem, ())) for path in SOURCES])
def test_the_examples_of_a_module_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / path).read_text()
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    monkeypatch.chdir(tmp_path)
    parser, runner, said = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False), []
    ran = 0
    for name, text, line in examples(source):
        test = parser.get_doctest(text, dict(vars(module)), name, str(ROOT / path), line)
        ran += len(test.examples)
        runner.run(test, out=said.append)
    assert not said, "".join(said)
    assert ran == source.count(">>> "), "an example that no docstring holds"
