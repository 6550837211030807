"""The subcommand plan: a plan to train by, machines, prices, locks, runs with --plan auto and --recalibrate."""

import json
import re

import jaxlib
import pytest

from jaxscale.cli import main
from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.planning.search.calibration import calibration_of
from jaxscale.planning.search.prices import read_prices
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import read_plan
from tests.traced_once import share_traces

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


@pytest.fixture(autouse=True)
def _equal_steps_are_traced_once(monkeypatch):
    share_traces(monkeypatch)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(FILE)
    (tmp_path / "prices.json").write_text(json.dumps({"gpu h100": 3.0, "tpu v5e": 1.0}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_written_and_machines_are_compared(folder, capsys):
    words = [
        "plan",
        "toy.py",
        "--platforms",
        "gpu h100 x 2, tpu v5e:1x1",
        "--forbid",
        "pipeline,offload,tensor,microbatches",
    ]
    assert main([*words, "--prices", "prices.json", "--objective", "cost", "--save", "p.json", "-o", "p.html"]) == 0
    shown = capsys.readouterr().out
    assert "tokens for 1" in shown
    assert shown.count("toy on ") == 1
    assert read_plan(folder / "p.json").mesh is not None
    assert "<svg" in (folder / "p.html").read_text()


def test_a_free_batch_is_chosen_printed_and_locked(folder, capsys):
    words = ["plan", "toy.py", "--platform", "cpu", "--forbid", "microbatches,memory,loss_chunk", "--batch", "free"]
    assert main([*words, "--save", "p.json", "--lock", "p.lock"]) == 0
    shown = capsys.readouterr().out
    rows = int(re.search(r"and --batch (\d+); the learning rate", shown)[1])
    assert shown.startswith("batches on cpu:\nbatch  fits")
    assert f"train it with --plan-file p.json --batch {rows}" in shown
    assert json.loads((folder / "p.lock").read_text())["overrides"] == {"batch": str(rows)}
    assert main(["train", "toy.py", "--plan-file", "p.json", "--batch", str(rows), "--steps", "1", "--out", "run"]) == 0


def test_a_plan_that_does_not_fit_ends_with_3(folder, capsys):
    assert (
        main(
            [
                "plan",
                "toy.py",
                "--platform",
                "gpu h100",
                "--limit",
                "1KiB",
                "--forbid",
                "offload,microbatches,loss_chunk,pipeline,tensor,replica",  # fewer plans to look at
            ]
        )
        == 3
    )
    assert "does not fit" in capsys.readouterr().out


def test_a_run_with_plan_auto_trains_by_the_plan_that_it_prints(folder, capsys):
    assert (
        main(["train", "toy.py", "--plan", "auto", "--out", "run", "--plan.microbatches", "2", "--plan.mesh", "data:2"])
        == 0
    )
    assert "train it with: " in capsys.readouterr().out
    assert read_plan(folder / "run" / "plan.json").microbatches == 2


def test_the_settings_that_plan_prints_for_a_pipeline_train(folder, capsys):
    words = ["--plan.pipeline", "gpipe:2x2", "--forbid", "plan.memory,tensor,offload,loss_chunk,replica"]
    assert main(["plan", "toy.py", "--platform", "cpu x 2", *words]) == 0
    settings = re.search(r"train it with: (.*)", capsys.readouterr().out)[1].split()
    assert settings[:2] == ["--plan.mesh", "pipe:2"]
    assert main(["train", "toy.py", *settings, "--steps", "1", "--out", "run"]) == 0


def test_a_lock_holds_until_the_step_changes(folder, capsys, monkeypatch):
    reports = []

    def compile_twice(*arguments):
        """Compile for the lock and for the first check; the step of later ones is the same."""
        reports.append(compile_report(*arguments) if len(reports) < 2 else reports[0])
        return reports[-1]

    monkeypatch.setattr("jaxscale.planning.search.verification.compile_report", compile_twice)
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
    compilation_count = len(reports)
    for fields, message in (
        ({"parameters": 7}, "of a model with 7 parameters"),
        ({"version": 9}, "got lock version 9"),
        ({"file": "gone.py"}, "gone.py"),
        ({"platform": "tpu v9:2x2"}, "v9"),
    ):
        code, shown = check_changed(**fields)
        assert (code, message in shown) == (2, True), shown
    assert len(reports) == compilation_count  # all of these are found before anything is compiled
    assert main(["check", "prices.json"]) == 2
    assert "expected a lock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected prices by chip"),
        ("{}", "expected prices by chip"),
        ('{"gpu h100": 0}', "got 0, expected the price of one chip for an hour, above 0"),
        ('{"gpu h100": "3"}', "got '3', expected the price"),
        ('{"gpu h10": 3}', "'gpu h10' is not a known chip"),
        ('{"h100": 3}', "'h100' is not a known chip"),
    ],
)
def test_mistakes_in_prices(folder, content, message):
    (folder / "wrong.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_prices(str(folder / "wrong.json"))


def test_a_platform_without_a_price_is_named(folder):
    with pytest.raises(UserError, match="no price for 'tpu v5p', only for gpu h100, tpu v5e"):
        read_prices("prices.json").of(Platform.parse("tpu v5p:2x2x1"))


def test_a_run_stores_the_factor_by_which_later_seconds_are_multiplied(folder, capsys, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
    assert main(["train", "toy.py", "--steps", "19", "--recalibrate", "--out", "short"]) == 2
    assert "got 19 measured steps, expected at least 20" in capsys.readouterr().err
    assert not (folder / "short").exists()
    assert main(["train", "toy.py", "--out", "run", "--recalibrate", "--plan.mesh", "data:2", "--steps", "20"]) == 0
    shown = capsys.readouterr().out
    calibration = calibration_of(Platform.parse("cpu x 2"))
    assert f"stored the factor {calibration.factor:.3g} for cpu" in shown
    assert "modeled (" not in shown  # this run had no calibration yet
    assert calibration.steps == 20
    assert main(["train", "toy.py", "--out", "later", "--plan.mesh", "data:2", "--steps", "2"]) == 0
    assert "modeled (" in capsys.readouterr().out
    assert main(["fit", "toy.py", "--platform", "cpu x 2", "--plan.mesh", "data:2"]) == 0
    fitted = capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = sorted(row["step_seconds"] for row in rows if row["kind"] == "train")
    assert "modeled: " in fitted
    words = ["--plan.mesh", "data:2", "--plan.microbatches", "1", "--plan.memory", "none", "--plan.zero", "0"]
    assert main(["plan", "toy.py", "--platform", "cpu x 2", *words]) == 0
    planned = capsys.readouterr().out
    assert f"seconds are scaled by {calibration.factor:.3g}, as measured in 20 steps of toy" in planned
    assert "of the peak" not in planned
    modeled = [
        row["step_seconds"]
        for line in (folder / "later" / "metrics.jsonl").read_text().splitlines()
        if (row := json.loads(line)).get("name") == "predicted"
    ]
    assert modeled == [pytest.approx((measured[9] + measured[10]) / 2)]


def test_a_calibration_of_another_version_or_chip_does_not_count(folder, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
    entry = {"factor": 2.0, "steps": 20, "experiment": "toy", "jaxlib": "0.0.1"}
    (folder / "cache").mkdir()
    path = folder / "cache" / "calibration.json"
    path.write_text(json.dumps({"cpu": entry}))
    assert calibration_of(Platform.parse("cpu x 2")) is None
    assert calibration_of(Platform.parse("gpu h100")) is None
    path.write_text(json.dumps({"cpu": entry | {"jaxlib": jaxlib.__version__, "factor": -1.0}}))
    with pytest.raises(UserError, match=r"got a factor of -1\.0, expected a number above 0"):
        calibration_of(Platform.parse("cpu"))


def test_a_damaged_calibration_is_reported_and_stops_no_run(folder, capsys, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
    (folder / "cache").mkdir()
    (folder / "cache" / "calibration.json").write_text("[]")
    assert main(["train", "toy.py", "--out", "run"]) == 0
    assert "got a list, expected calibrations by chip" in " ".join("".join(capsys.readouterr()).split())
    assert main(["plan", "toy.py", "--platform", "cpu", "--forbid", "microbatches,memory"]) == 2
    assert "expected calibrations by chip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lock", "nowhere/plan.lock"], "--lock nowhere/plan.lock cannot be written"),
        (["--save", "nowhere/plan.json"], "--save nowhere/plan.json cannot be written"),
        (["--batch", "free", "--objective", "chips"], "--batch free chooses the batch by rows per second"),
        (["--batch", "fre"], "did you mean 'free'?"),
        (["--plan.microbatches", "3"], "3 microbatches do not divide the batch of 8 rows"),
        (["--plan.mesh", "data:4"], "mesh data:4 takes 4 devices, and there are 2"),
    ],
)
def test_what_no_plan_can_do_is_refused_with_its_reason(folder, capsys, words, message):
    assert main(["plan", "toy.py", "--platform", "gpu h100 x 2", *words]) == 2
    assert message in capsys.readouterr().err
