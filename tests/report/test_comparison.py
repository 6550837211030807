"""Several runs on one page: the same axes, each run's figures, and what differs, against the files of the runs."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxscale.cli.main import main
from jaxscale.errors import UserError
from jaxscale.records.record import RunRecord
from jaxscale.records.source import Source, git_commit, host_text
from jaxscale.report.comparison import comparison_html, write_comparison
from jaxscale.report.page import report_html
from tests.report.test_page import Page, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: the second is shorter, has a larger batch, an accuracy, a commit, and seconds by phase."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = make_run(folder / "a", steps=80), make_run(folder / "b", steps=60, resumed=False, start=1e9)
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "eval":
            row |= {"accuracy": 1 - math.exp(-row["step"] / 30), "news/loss": row["loss"] + 0.5}
    moment = {"step": 60, "kind": "event", "name": "hours", "at": "end", "time": 1e9 + 60, "process_start": 1e9 - 9}
    rows.append({**moment, "seconds_by_phase": {"stepping": 40.0, "compiling": 12.0}})
    (second / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"experiment": {"name": "wider", "batch": 128}, "source/source": {"git": "0123abc with changes"}}
    for name, fields in changes.items():
        content = json.loads((second / f"{name}.json").read_text())
        (second / f"{name}.json").write_text(json.dumps({**content, **fields}))
    return first, second


def test_a_page_has_the_figures_of_every_run_and_needs_nothing_else(runs, tmp_path):
    write_comparison(runs, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text("utf-8")
    read = Page(html)
    words = read.words
    best = [RunRecord.read(run).best for run in runs]
    for expected in (
        *("2 runs", "Held-out accuracywider", "Held-out news/loss", "Target tokens", "Where the time went"),
        *("Stepping40.0 s", "Git commit0123abc with changes", "batch64128", "steps8060", "Training loss, smoothed"),
        "8 \N{MULTIPLICATION SIGN} cpu",
        *(f"({pair[0]})" for pair in best if pair),
    ):
        assert expected in words, expected
    assert not [each for each in read.attributes if each[1] in ("src", "href", "srcset", "data", "action")]
    assert not re.search(r"url\(|@import|https?://|fetch\(", html)
    labels = [each for each in read.attributes if each[:2] == ("label", "for")]
    assert [label[2] for label in labels] == ["axis0", "axis1", "axis2"]
    assert [each for each in read.attributes if each[:2] == ("input", "checked")] == [("input", "checked", "checked")]


def charts_of(html):
    """The JSON of the charts, by their axis."""
    charts = {}
    for text in re.findall(r'<script type="application/json">(.*?)</script>', html):
        chart = json.loads(text)
        charts.setdefault(chart.get("axis", "step"), []).append(chart)
    return charts


def test_both_runs_share_an_axis_of_steps_tokens_or_seconds(runs):
    charts = charts_of(comparison_html([RunRecord.read(run) for run in runs]))
    assert list(charts) == ["step", "target tokens", "seconds"]
    held_out = {axis: charts[axis][0] for axis in charts}
    for chart in held_out.values():
        assert [curve["label"] for curve in chart["curves"]] == ["shakespeare", "wider"]
        places = [place for curve in chart["curves"] for place in curve["steps"]]
        np.testing.assert_allclose([chart["left"], chart["right"]], [min(places), max(places)], atol=1e-3)
    steps = [curve["steps"] for curve in held_out["step"]["curves"]]
    assert [each[-1] for each in steps] == [80, 60]
    tokens = [curve["steps"] for curve in held_out["target tokens"]["curves"]]
    assert tokens == [[768 * step for step in each] for each in steps]
    # the rows of a run lie 31 ms apart, and the wait before the `resume` of a continued run does not count
    for run, curve in zip(runs, held_out["seconds"]["curves"], strict=True):
        rows = RunRecord.read(run).metrics
        seconds = np.cumsum([0.0 if row.get("name") == "resume" else 0.031 for row in rows]) - 0.031
        expected = [second for row, second in zip(rows, seconds, strict=True) if row["kind"] == "eval"]
        np.testing.assert_allclose(curve["steps"], expected, atol=3e-3)


def test_runs_of_one_name_are_named_by_their_folders_and_empty_ones_do_no_harm(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    same = make_run(tmp_path / "c", steps=30)
    words = Page(comparison_html([RunRecord.read(run) for run in (runs[0], same, tmp_path / "empty")])).words
    assert str(runs[0]) in words
    assert str(same) in words
    assert "nothing measured yet" in words


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "got 1 run, expected from 2 to 7 to draw on one page"),
        ([f"r{number}" for number in range(8)], "got 8 runs, expected from 2 to 7"),
        (["a", "b", "a"], "the run a is given twice: give it once"),
    ],
)
def test_a_wrong_number_of_runs_is_refused(names, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write_comparison(names, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_command_takes_several_runs(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = map(str, runs)
    assert main(["report", first, second]) == 0
    assert capsys.readouterr().out == "written to comparison.html\n"
    assert main(["report", first, second, "--out", "page.html"]) == 0
    assert "2 runs" in (tmp_path / "page.html").read_text()
    for words, message in (
        ([first, f"{second}x"], "does not exist; did you mean"),
        ([first, first], "is given twice"),
        ([first, second, "--out", "page.svg"], "--out page.svg: expected a name that ends in .html"),
        ([first, "--out", "page.html"], "it is for several runs, and that of one is in its directory"),
        ([first, second, "--out", "no/page.html"], "no/page.html cannot be written"),
    ):
        capsys.readouterr()
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_page_of_one_run_has_its_hours_its_origin_and_folds_events_for_developers_away(runs):
    words = Page(report_html(RunRecord.read(runs[1]))).words
    assert "Where the time wentStepping40.0 s" in words
    assert "Git commit0123abc with changes" in words
    assert "Devices8 \N{MULTIPLICATION SIGN} cpu" in words
    html = report_html(RunRecord.read(runs[0]))
    events = html[html.index("What happened") : html.index("Make it again")]
    folded = re.findall(r"<details>(<summary>For developers: 3, in order.*?)</details>", events, re.DOTALL)
    assert len(folded) == 1
    assert "compile" in folded[0]
    assert "compile" not in re.sub(r"<details>.*?</details>", "", events, flags=re.DOTALL)
    assert "preempted" in events


def test_the_commit_of_a_file_is_recorded(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True)

    file = tmp_path / "exp.py"
    file.write_text("a = 1")
    assert git_commit(str(file)) is None, "no repository"
    git("init", "-q")
    assert git_commit(str(file)) is None, "no commit"
    git("add", "exp.py")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert git_commit(str(file)) == commit
    file.write_text("a = 2")
    assert git_commit(str(file)) == f"{commit} with changes"
    source = Source("a", text="a = 2", path=str(file))
    source.write(tmp_path / "run")
    assert Source.read(tmp_path / "run") == source
    stored = json.loads((tmp_path / "run" / "source" / "source.json").read_text())
    assert (stored["git"], stored["platform"]) == (f"{commit} with changes", host_text())


def test_drawing_needs_no_jax(runs, tmp_path):
    program = (
        "import sys; from jaxscale.report.comparison import write_comparison as w; w(sys.argv[1:3], sys.argv[3]); "
    )
    program += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, *map(str, runs), str(tmp_path / "page.html")], check=True)
