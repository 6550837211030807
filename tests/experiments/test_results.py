"""The results file of the benchmarks, and the page that is written from it; nothing is measured here."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "benchmarks"
SCRIPT = str(FOLDER / "chain.py")


@pytest.fixture
def benchmarks(monkeypatch):
    """The modules `figures`, `page` and `results` of the benchmarks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("figures", "page", "results")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import figures
    import page
    import results

    yield figures, page, results
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def appending(benchmarks, monkeypatch, tmp_path):
    """A function that shows figures with given arguments and returns the lines of the results file."""
    figures, _, results = benchmarks
    file = tmp_path / "results.jsonl"
    monkeypatch.setattr(results, "FILE", file)
    monkeypatch.setenv("BENCHMARK_RESULTS", "append")

    def show(*arguments):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
        figures.show([figures.Figure("peak", 1.5, "x", 1.0), figures.Figure("seconds", 2.0, "s")], "Chains")
        return file.read_text().splitlines()

    return show


def test_a_run_appends_a_line(appending):
    (line,) = appending(
        "--seeds", "0 1", f"--text={ROOT}/README.md", str(Path(ROOT.anchor, "elsewhere", "english.txt"))
    )
    entry = json.loads(line)
    assert set(entry) == {"command", "title", "date", "machine", "versions", "figures"}
    assert entry["command"] == (
        "python experiments/benchmarks/chain.py --seeds '0 1' --text=README.md english.txt"  # no path of the machine
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
    assert re.fullmatch(r"\d+ cores? of \S.*, (no accelerator|\d+ x .+)", entry["machine"])
    assert {"python", "jax", "jaxlib"} <= set(entry["versions"])
    assert entry["figures"] == [
        {"name": "peak", "value": 1.5, "unit": "x", "bar": 1.0, "compare": "<=", "holds": False},
        {"name": "seconds", "value": 2.0, "unit": "s", "bar": None, "compare": "<=", "holds": True},
    ]
    assert appending()[0] == line
    assert len(appending()) == 3


@pytest.mark.parametrize("flag", ["--tiny", "--ti"])
def test_a_run_at_the_small_size_appends_nothing(appending, flag):
    before = appending()
    with pytest.raises(ValueError, match="no results: leave out --tiny"):
        appending("--rows", "8", flag)
    assert appending()[:-1] == before


def test_nothing_is_appended_unless_asked(appending, monkeypatch):
    before = appending()
    monkeypatch.delenv("BENCHMARK_RESULTS")
    assert appending() == before
    monkeypatch.setenv("BENCHMARK_RESULTS", "yes")
    with pytest.raises(ValueError, match="'yes'; set it to 'append'"):
        appending()


def test_the_newest_entry_of_a_command_is_shown(benchmarks, tmp_path):
    figures, page, _ = benchmarks

    def entry(command, date, value):
        figure = dataclasses.asdict(figures.Figure("peak|bytes", value, "x", 1.0))
        versions = {"python": "3.11.7", "jax": "0.10.2"}
        machine = "2 cores of CPU, no accelerator"
        return {
            "command": command,
            "title": "Chains",
            "date": date,
            "machine": machine,
            "versions": versions,
            "figures": [figure],
        }

    file = tmp_path / "page.md"
    file.write_text(f"by hand\n{page.START}\nold\n{page.END}\nbelow\n")
    page.write(file, [entry("b", "2026-01-02", 1.5), entry("b", "2026-01-01", 1.25), entry("a", "2026-01-01", 0.5)])
    assert file.read_text() == (
        f"""by hand
{page.START}

### `a`

Chains: 1 of 1 bars hold.
Measured on 2026-01-01, 2 cores of CPU, no accelerator; python 3.11.7, jax 0.10.2.

| figure | value | unit | bar | holds |
|---|---:|---|---|---|
| peak\\|bytes | 0.5 | x | <= 1 | yes |

### `b`

Chains: 0 of 1 bars hold, **1 fail**.
Measured on 2026-01-02, 2 cores of CPU, no accelerator; python 3.11.7, jax 0.10.2.

| figure | value | unit | bar | holds |
|---|---:|---|---|---|
| peak\\|bytes | 1.5 | x | <= 1 | **FAILS** |

{page.END}
below
"""
    )


def test_a_page_without_the_comments_is_refused(benchmarks, tmp_path):
    _, page, _ = benchmarks
    file = tmp_path / "page.md"
    file.write_text(f"{page.END}{page.START}")
    with pytest.raises(ValueError, match=r"page\.md has no <!-- results --> with"):
        page.write(file, [])


def test_the_page_shows_the_results_file(benchmarks, tmp_path):
    _, page, results = benchmarks
    written = tmp_path / "benchmarks.md"
    written.write_text(page.PAGE.read_text())
    page.write(written, results.read(results.FILE))
    assert page.PAGE.read_text() == written.read_text(), "run python experiments/benchmarks/page.py"


def test_the_results_file_has_no_run_at_the_small_size_and_no_path_of_a_machine(benchmarks):
    _, _, results = benchmarks
    for entry in results.read(results.FILE):
        words = entry["command"].split()
        assert words[0] == "python"
        assert (ROOT / words[1]).is_file()
        assert "--tiny" not in words
        assert not re.search(r"(^|[\s=])/", entry["command"])
        assert all(figure["holds"] in (True, False) for figure in entry["figures"])
