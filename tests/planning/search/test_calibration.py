"""Seconds of steps beside measured ones: a calibration of a chip, and what plan, fit and a run show with it."""

import json

import jaxlib
import pytest

from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.planning.search.calibration import calibration_of
from jaxscale.platforms.platform import Platform

FILE = """
from jaxscale import Experiment
from jaxscale.data import Arrays
from jaxscale.models import Decoder
import numpy as np


def experiment():
    model = Decoder(vocab=64, context=16, layers=2, embed=32, heads=2)
    tokens = np.arange(8 * 17, dtype=np.int32).reshape(8, 17) % 64
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return Experiment("toy", model, Arrays(rows), steps=20, batch=8)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_run_stores_the_factor_by_which_later_seconds_are_multiplied(folder, capsys):
    assert main(["train", "toy.py", "--steps", "19", "--recalibrate", "--out", "short"]) == 2
    assert "got 19 measured steps, expected at least 20" in capsys.readouterr().err
    assert not (folder / "short").exists()
    assert main(["train", "toy.py", "--out", "run", "--recalibrate", "--plan.mesh", "data:2"]) == 0
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
    assert main(["plan", "toy.py", "--platform", "cpu x 2", "--plan.mesh", "data:2", "--plan.microbatches", "1"]) == 0
    planned = capsys.readouterr().out
    assert f"seconds are scaled by {calibration.factor:.3g}, as measured in 20 steps of toy" in planned
    assert "of the peak" not in planned
    modeled = [
        row["step_seconds"]
        for line in (folder / "later" / "metrics.jsonl").read_text().splitlines()
        if (row := json.loads(line)).get("name") == "predicted"
    ]
    assert modeled == [pytest.approx((measured[9] + measured[10]) / 2)]


def test_a_calibration_of_another_version_or_chip_does_not_count(folder):
    entry = {"factor": 2.0, "steps": 20, "experiment": "toy", "jaxlib": "0.0.1"}
    (folder / "cache").mkdir()
    path = folder / "cache" / "calibration.json"
    path.write_text(json.dumps({"cpu": entry}))
    assert calibration_of(Platform.parse("cpu x 2")) is None
    assert calibration_of(Platform.parse("gpu h100")) is None
    path.write_text(json.dumps({"cpu": entry | {"jaxlib": jaxlib.__version__, "factor": -1.0}}))
    with pytest.raises(UserError, match=r"got a factor of -1\.0, expected a number above 0"):
        calibration_of(Platform.parse("cpu"))
