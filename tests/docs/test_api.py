"""The pages of the API are what `docs/make_api.py` writes from `__all__`: they have every public name and no other."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
assert SPEC is not None
assert SPEC.loader is not None
make_api = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_api)


def test_there_is_a_page_for_each_public_package():
    assert {file.name for file in (DOCS / "api").iterdir()} == set(make_api.pages())


@pytest.mark.parametrize("package", make_api.PACKAGES)
def test_a_page_is_what_the_script_writes(package: str):
    written = (DOCS / "api" / f"{package}.md").read_text("utf-8")
    assert written == make_api.page(package), "run: python docs/make_api.py"
