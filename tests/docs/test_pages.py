"""The pages of `docs/`: their examples run, their flags are fields of a plan or an experiment, their paths exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxscale
from jaxscale.errors import UserError
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline import METHODS
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import CODECS
from jaxscale.values import override
from tests.tiers import variants
from tests.trackers import install

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TECHNIQUES = [page for page in PAGES if page.parent.name == "techniques"]
BLOCK = re.compile(r"^```python( \{ \.slow \})?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC_NAMES = {f"jaxscale.{name}" for name in jaxscale.__all__} | {
    f"jaxscale.{wing}.{name}" for wing in jaxscale._WINGS for name in getattr(jaxscale, wing).__all__
}
PARTS = ("## Mathematics", "## When to use it", "## Picture")


def named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.relative_to(ROOT / "docs").as_posix()) for page in pages]


def run_blocks(page: Path, *, slow: bool) -> None:
    """Run a page's examples in order, the slow ones too if asked; a comment behind a `print` is its output."""
    namespace: dict[str, object] = {}
    for is_slow, source in BLOCK.findall(page.read_text()):
        if slow or not is_slow:
            printed: list[str] = []
            namespace["print"] = lambda *values, lines=printed: lines.append(" ".join(map(str, values)))
            exec(compile(source, str(page), "exec"), namespace)
            expected = re.findall(r"^(?:print\(.*\)|\))  # (.*)$", source, re.MULTILINE)
            assert not expected or printed == expected


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Stand in for a tracking service, and forget the codecs and schedules that a page registers."""
    registries = (CODECS, METHODS)
    copies = [dict(registry) for registry in registries]
    with pytest.MonkeyPatch.context() as patch:
        install("wandb", patch)
        yield
    for registry, copy in zip(registries, copies, strict=True):
        registry.clear()
        registry.update(copy)


LONGER = ("start/one_technique.md", "start/own_data.md", "choosing/plan.md")
EXAMPLES = named([page for page in PAGES if BLOCK.search(page.read_text())])


@pytest.mark.parametrize("page", variants(EXAMPLES, default={one.id for one in EXAMPLES} - set(LONGER)))
def test_the_examples_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    run_blocks(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", named([page for page in PAGES if "{ .slow }" in page.read_text()]))
def test_the_long_examples_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for folder in ("experiments", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    run_blocks(page, slow=True)


def pages_of(items: list[object]) -> Iterator[str]:
    """The files of a navigation."""
    for item in items:
        assert isinstance(item, dict)
        for entry in item.values():
            if isinstance(entry, str):
                yield entry
            else:
                yield from pages_of(entry)


def test_the_navigation_has_every_page():
    navigation = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(pages_of(navigation)) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


@pytest.mark.parametrize("page", named(PAGES))
def test_the_files_that_a_page_names_exist(page: Path):
    names = re.findall(r"`((?:jaxscale|pallas_kernels|experiments|tests|docs)/[\w./-]+)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", named(TECHNIQUES))
def test_a_technique_has_its_parts(page: Path):
    text = page.read_text()
    assert [part for part in PARTS if part not in text] == []
    rows = dict(re.findall(r"^\| (flag|function|code|proof|paper) \| (.+) \|$", text, re.MULTILINE))
    assert {"flag", "function", "code", "proof"} <= set(rows)
    for name in re.findall(r"`(jaxscale[\w.]*)", rows["function"]):
        assert name in PUBLIC_NAMES, name


@pytest.mark.parametrize("page", named(TECHNIQUES))
def test_the_flags_of_a_page_are_those_of_a_plan(page: Path):
    for flags in re.findall(r"`((?:--(?:plan|optimizer)[\w.-]* [^`]+))`", page.read_text()):
        fields: dict[str, dict[str, object]] = {"plan": {}, "optimizer": {}}
        for flag, text in re.findall(r"--([\w.-]+) (\S+)", flags):
            group, _, name = flag.replace("-", "_").partition(".")
            fields[group][name or "name"] = text
        try:
            override(Plan(), fields["plan"])
            override(Optimizer(), fields["optimizer"])
        except UserError as error:
            pytest.fail(f"{page.name}: `{flags}`: {error}")
