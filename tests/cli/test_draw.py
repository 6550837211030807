"""`jaxscale draw` as a user meets it."""

import os
from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.cli.draw import split_schedules
from jaxscale.pipeline.schedules import METHODS

SHAKESPEARE = str(Path(__file__).parents[2] / "experiments" / "shakespeare.py")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """100 columns, no colors, an empty directory."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def drawn(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["draw", "pipeline", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_one_schedule(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = drawn(capsys, "1f1b:2x3")
    assert out.splitlines()[:7] == [
        "rank 0 │F0─F1─      B0════F2─B1════   B2════│ 2 live",
        "rank 1 │   F0─B0════F1─B1════F2─B2════      │ 1 live",
        "       0     2     4     6     8     10    12",
        "",
        "          time  each  bubble  own span  live  weights  apart",
        "1f1b:2x3    12     4   25.0%     14.3%     2        1     12",
        "",
    ]
    assert "\x1b" not in out


def test_every_name_can_be_drawn(capsys):
    """A new schedule needs nothing here."""
    for name, method in METHODS.items():
        text = f"{name}:4" if method.streams else f"{name}:4x8"
        assert text in drawn(capsys, text)
    with_all = ",".join(f"{name}:4" if method.streams else f"{name}:4x8" for name, method in METHODS.items())
    assert drawn(capsys, "--compare", with_all).count("rank 3 │") == len(METHODS)


def test_files(capsys):
    assert "written to chart.svg" in drawn(capsys, "zb-v:4x8", "-o", "chart.svg")
    assert Path("chart.svg").read_text().startswith("<svg")
    drawn(capsys, "--compare", "1f1b:4x8,interleaved:4x8,v=2", "--out", "chart.html")
    assert "interleaved:4x8,v=2" in Path("chart.html").read_text()
    drawn(capsys, "zb-v:4x8", "-o", "zb.csv")
    as_drawn, as_read = (drawn(capsys, text).splitlines()[:4] for text in ("zb-v:4x8", "file:zb.csv"))
    assert as_drawn == as_read


def test_prices(capsys):
    assert " 24 " in drawn(capsys, "gpipe:2x3", "--cost", "f=2,i=1,w=3")
    assert " 20 " in drawn(capsys, "gpipe:2x3", "--cost", "f=2,b=3")
    # a message on the way down and one on the way up
    assert " 21 " in drawn(capsys, "gpipe:2x3", "--cost", "f=2,b=3,link=0.5", "--machine", "dataflow")
    assert drawn(capsys, "gpipe:2x3") == drawn(capsys, "gpipe:2x3", "--cost", "f=1, i=1, w=1")


def test_the_machine(capsys):
    assert " 40     5   40.0%" in drawn(capsys, "1f1b:4x8")
    assert " 33  4.125   27.3%" in drawn(capsys, "1f1b:4x8", "--machine", "dataflow")


def test_updates_of_an_asynchronous_schedule(capsys):
    few, many = (drawn(capsys, "2bw:2x2", "--updates", count) for count in ("2", "6"))
    assert "F3" in few
    assert "F11" not in few
    assert len(many.splitlines()[0]) <= 100


def test_stages_priced_by_an_experiment(capsys):
    """Roofline seconds and bytes, of the plan's own pipeline where none is named, with fields by path."""
    asked = ("--experiment", SHAKESPEARE, "--platform", "tpu v5e:2x2", "--plan.pipeline", "1f1b:2x4")
    out = drawn(
        capsys, *asked, "--model.layers", "2", "--model.embed", "64", "--model.context", "32", "--data.context", "32"
    )
    assert "1f1b:2x4" in out
    assert " µs" in out or " ms" in out
    assert "live bytes" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("draw", "draw lacks its PICTURE: jaxscale draw pipeline [SCHEDULE] [flags]"),
        ("draw pipelin 1f1b:4x8", "unknown picture 'pipelin': expected one of pipeline; did you mean 'pipeline'?"),
        ("draw 1f1b:4x8", "jaxscale draw pipeline 1f1b:4x8"),
        ("draw pipeline", "got no schedule, expected one such as 1f1b:4x8; there are 1f1b:PxM, "),
        ("draw pipeline 1fb1:4x8", "unknown pipeline schedule '1fb1'"),
        ("draw pipeline 1f1b:4", "1f1b"),
        ("draw pipeline chimera:3x6", "expected an even number"),
        ("draw pipeline auto:4", "its schedule is not chosen yet"),
        ("draw pipeline file:none.csv", "none.csv"),
        ("draw pipeline 1f1b:4x8 --compare gpipe:4x8", "put all schedules after --compare"),
        ("draw pipeline --compare ,", "got no schedule, expected one or more"),
        ("draw pipeline --compare 1f1b:4x8,zbv:4x8", "did you mean 'zb-v'?"),
        ("draw pipeline 1f1b:4x8 --cost q=1", "unknown letter 'q': expected some of f, i, w, b, u, link"),
        ("draw pipeline 1f1b:4x8 --cost lnk=1", "did you mean 'link'?"),
        ("draw pipeline 1f1b:4x8 --cost f", "got 'f', expected a number >= 0, such as f=1"),
        ("draw pipeline 1f1b:4x8 --cost f=-1", "got 'f=-1', expected a number >= 0"),
        ("draw pipeline 1f1b:4x8 --cost f=nan", "got 'f=nan', expected a number >= 0"),
        (
            "draw pipeline --measured runs/x --model.embed 3",
            "--model.embed is a field of an experiment",
        ),
        ("draw pipeline 1f1b:4x8 --cost f=1,f=2", "f is given twice"),
        ("draw pipeline 1f1b:4x8 --cost f=0", "got no time for the forward pass, so there is nothing to draw"),
        ("draw pipeline 1f1b:4x8 -o chart.pdf", "chart.pdf: expected a name that ends in .svg, .html or .csv"),
        ("draw pipeline --compare 1f1b:4x8,gpipe:4x8 -o a.csv", "a CSV holds one schedule, not 2"),
        ("draw pipeline pipedream:4 -o a.csv", "got updates of weights inside the schedule, which CSV cannot express"),
        ("draw pipeline 1f1b:4x8 -o none/chart.svg", "none/chart.svg cannot be written"),
        ("draw pipeline 1f1b:4x8 --machine neighbor", "did you mean 'neighbour'?"),
        ("draw pipeline 1f1b:4x8 --updates 3", "--updates is for asynchronous schedules"),
        ("draw pipeline pipedream:4 --updates 0", "--updates: got 0, expected a whole number >= 1"),
        ("draw pipeline 1f1b:4x8 --platform local", "--platform needs --experiment FILE"),
        ("draw pipeline 1f1b:4x8 --variant wide", "--variant needs --experiment FILE"),
        ("draw pipeline 1f1b:4x8 --model.layers 3", "--model.layers is a field of an experiment"),
        ("draw pipeline 1f1b:4x8 --experiment toy.py", "there is no file toy.py"),
        (f"draw pipeline 1f1b:4x8 --experiment {SHAKESPEARE} --cost f=1", "leave one out"),
        (f"draw pipeline 1f1b:4x8 --experiment {SHAKESPEARE} --platform v5e", "unknown platform 'v5e'"),
        (f"draw pipeline --experiment {SHAKESPEARE}", "has no pipeline in its plan; give a schedule, such as 1f1b:4x8"),
    ],
)
def test_mistakes(capsys, words, message):
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxscale: ")
    assert message in shown.err


def test_a_platform_of_unknown_rates_and_one_that_does_not_divide(capsys):
    asked = ["draw", "pipeline", "1f1b:3x4", "--experiment", SHAKESPEARE, "--platform"]
    assert main([*asked, "cpu x 4"]) == 2
    assert "the rates of a cpu are unknown" in capsys.readouterr().err
    assert main([*asked, "tpu v5e:2x2"]) == 2
    assert "pipeline of 3 ranks: tpu v5e:2x2 has 4 devices, expected a multiple of 3" in capsys.readouterr().err


def test_colors_where_a_terminal_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in drawn(capsys, "1f1b:2x3")
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    assert "\x1b[" not in drawn(capsys, "1f1b:2x3")


def test_options_stay_with_their_schedule():
    assert split_schedules(" a:1 ,b:2x3,v=2,c:4,file:x.csv ") == ["a:1", "b:2x3,v=2", "c:4", "file:x.csv"]


def test_the_help_says_how(capsys):
    assert main(["draw", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("jaxscale draw pipeline zb-v:4x8", "--compare", "v=2, belong to the preceding", "by roofline"):
        assert words in out
