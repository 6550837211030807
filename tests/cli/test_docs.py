"""`jaxscale docs`: its pages, its search, and the pages that messages name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.cli.docs import page_files
from jaxscale.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_page_with_its_title(capsys: pytest.CaptureFixture[str]):
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]
    files = [file for file in files if file.parts[0] not in ("api", "build")]
    assert len(lines) == len(files)
    assert "choosing/memory                      When memory runs out" in lines


def test_a_page_is_printed_by_its_name_and_by_a_part_of_it(capsys: pytest.CaptureFixture[str]):
    assert main(["docs", "techniques/revolve"]) == main(["docs", "revolve"]) == 0
    text = (ROOT / "docs" / "techniques" / "revolve.md").read_text()
    assert capsys.readouterr().out == text * 2


def test_a_word_finds_the_pages_that_contain_it(capsys: pytest.CaptureFixture[str]):
    assert main(["docs", "Griewank"]) == 0
    assert "techniques/revolve" in capsys.readouterr().out


def test_an_unknown_page_is_reported_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["docs", "choosing/memry"]) == 2
    assert "did you mean 'choosing/memory'?" in capsys.readouterr().err


def test_the_pages_that_messages_name_exist():
    named = set()
    for file in (ROOT / "jaxscale").rglob("*.py"):
        named |= set(re.findall(r"\bpage=\"([\w/]+)\"", file.read_text()))
    assert named
    assert named <= set(page_files())


def test_a_reader_that_ends_early_is_no_error():
    command = f"{sys.executable} -m jaxscale docs | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.stderr, len(ended.stdout.splitlines())) == ("", 1)
    assert ended.returncode in (0, 141)
