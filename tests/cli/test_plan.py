"""The subcommand plan: a plan to train by, a comparison of machines, prices, and a run with --plan auto."""

import json

import pytest

from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.planning.search.prices import read_prices
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import read_plan

FILE = """
from jaxscale import Experiment
from jaxscale.data import Arrays
from jaxscale.models import Decoder
import numpy as np


def experiment():
    model = Decoder(vocab=64, context=16, layers=2, embed=32, heads=2)
    tokens = np.arange(8 * 17, dtype=np.int32).reshape(8, 17) % 64
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return Experiment("toy", model, Arrays(rows), steps=2, batch=8)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(FILE)
    (tmp_path / "prices.json").write_text(json.dumps({"gpu h100": 3.0, "tpu v5e": 1.0}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_written_and_machines_are_compared(folder, capsys):
    words = ["plan", "toy.py", "--platforms", "gpu h100 x 2, tpu v5e:1x1", "--forbid", "pipeline,offload"]
    assert main([*words, "--prices", "prices.json", "--objective", "cost", "--save", "p.json", "-o", "p.html"]) == 0
    shown = capsys.readouterr().out
    assert "tokens for 1" in shown
    assert shown.count("toy on ") == 1
    assert read_plan(folder / "p.json").mesh is not None
    assert "<svg" in (folder / "p.html").read_text()


def test_a_plan_that_does_not_fit_ends_with_3(folder, capsys):
    assert main(["plan", "toy.py", "--platform", "gpu h100", "--limit", "1KiB", "--forbid", "offload"]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_a_run_with_plan_auto_trains_by_the_plan_that_it_prints(folder, capsys):
    assert main(["train", "toy.py", "--plan", "auto", "--out", "run", "--plan.microbatches", "2"]) == 0
    assert "train it with: " in capsys.readouterr().out
    assert read_plan(folder / "run" / "plan.json").microbatches == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected prices by chip"),
        ("{}", "expected prices by chip"),
        ('{"gpu h100": 0}', "got 0, expected the price of a chip and hour, above 0"),
        ('{"gpu h100": "3"}', "got '3', expected the price"),
        ('{"gpu h10": 3}', "'gpu h10' names no chip"),
        ('{"h100": 3}', "'h100' names no chip"),
    ],
)
def test_mistakes_in_prices(folder, content, message):
    (folder / "wrong.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_prices(str(folder / "wrong.json"))


def test_a_platform_without_a_price_is_named(folder):
    with pytest.raises(UserError, match="no price for 'tpu v5p', only for gpu h100, tpu v5e"):
        read_prices("prices.json").of(Platform.parse("tpu v5p:2x2x1"))
