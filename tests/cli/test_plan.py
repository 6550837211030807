"""The subcommand plan: a plan to train by, a comparison of machines, prices, and a run with --plan auto."""

import json

import pytest

from jaxscale.cli import main
from jaxscale.compiler.compile import compile_report
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


def test_a_lock_holds_until_the_step_changes(folder, capsys, monkeypatch):
    reports = []

    def compile_twice(*arguments):
        """Compile for the lock and for the first check; the step of later ones is the same."""
        reports.append(compile_report(*arguments) if len(reports) < 2 else reports[0])
        return reports[-1]

    monkeypatch.setattr("jaxscale.planning.search.search.compile_report", compile_twice)
    monkeypatch.setattr("jaxscale.compiler.compile.compile_report", compile_twice)
    words = ["plan", "toy.py", "--platform", "cpu x 2", "--lock", "plan.lock"]
    words += ["--plan.mesh", "fsdp:2", "--plan.zero", "2", "--plan.memory", "none", "--plan.microbatches", "1"]
    assert main(words) == 0
    assert "according to the compiler" in capsys.readouterr().out
    assert main(["check", "plan.lock"]) == 0
    assert "plan.lock holds" in capsys.readouterr().out

    def check_changed(**fields):
        """Check the lock with other fields; return the exit code and what was printed."""
        (folder / "other.lock").write_text(json.dumps(lock | fields))
        code = main(["check", "other.lock"])
        return code, "".join(capsys.readouterr())

    lock = json.loads((folder / "plan.lock").read_text())
    more_bytes = {"device_bytes": 2 * lock["device_bytes"], "sent_bytes": {"all-gather over fsdp": 10**6}}
    code, shown = check_changed(**more_bytes)
    assert code == 3
    assert "other.lock is changed" in shown
    assert "all-gather over fsdp: 977 KiB in the lock" in shown
    code, shown = check_changed(**more_bytes, versions={"jax": "0.9.0"})
    assert (code, "other.lock holds, with notes" in shown, "the lock by jax 0.9.0" in shown) == (0, True, True)
    for fields, message in (
        ({"parameters": 7}, "of a model with 7 parameters"),
        ({"version": 9}, "got lock version 9"),
        ({"file": "gone.py"}, "gone.py"),
        ({"platform": "tpu v9:2x2"}, "v9"),
    ):
        code, shown = check_changed(**fields)
        assert (code, message in shown) == (2, True), shown
    assert main(["check", "prices.json"]) == 2
    assert "expected a lock" in capsys.readouterr().err


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
