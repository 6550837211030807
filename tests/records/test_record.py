"""What a run's files report."""

import json

import pytest

from jaxscale.records.record import RunRecord


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        ({"type": "models.Decoder"}, "nats per target token"),
        (
            {"type": "models.ForeignModel", "score": {"type": "models.CrossEntropy"}, "unit": ""},
            "nats per target token",
        ),
        ({"type": "models.ForeignModel", "score": {"function": "mine:score"}, "unit": ""}, ""),
        ({"type": "models.ForeignModel", "score": {"function": "mine:score"}, "unit": "mse"}, "mse"),
        ({"type": "models.LoRA", "model": {"type": "models.ForeignModel", "unit": "mse"}}, "mse"),
    ],
)
def test_the_unit_of_the_loss_is_that_of_the_model_or_of_its_score(tmp_path, model, unit):
    (tmp_path / "experiment.json").write_text(json.dumps({"model": model}))
    assert RunRecord.read(tmp_path).loss_unit == unit
