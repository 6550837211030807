"""Whole runs of models that scan over their blocks: resumed bit for bit, also under another plan, and evaluated."""

import functools

import jax
import numpy as np
import pytest

from jaxscale.checkpoint.restore import restore_parameters
from jaxscale.models import ForeignModel, language_model, linen_model
from jaxscale.records.metrics import read_metrics
from jaxscale.training.evaluate import held_out_means
from jaxscale.training.loop import train
from jaxscale.training.run import Run
from tests.models import public_language_models as nets
from tests.plans import plan_of


def scanned_nnx(vocab, length):
    return ForeignModel(functools.partial(nets.ScannedRemat, name=None, rate=0.1, vocab=vocab), language_model())


def looped_linen(vocab, length):
    module = nets.LinenLoop(rate=0.1, vocab=vocab)
    return linen_model(module, jax.ShapeDtypeStruct((1, length), "int32"), score=language_model())


SCANNED_PLAN = {"pipeline": "1f1b:3x2", "mesh": "1"}  # stages of 2, 1 and 1 layers
HOSTED_PLAN = {"pipeline": "1f1b:2x2", "mesh": "fsdp:2", "zero": "3", "weights": "host"}
LINEN_PLAN = {"pipeline": "1f1b:2x2", "stash": "input"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "fields", "other_fields"),
    [
        (scanned_nnx, SCANNED_PLAN, {"mesh": "fsdp:2", "zero": "3", "memory": "sqrt", "microbatches": "2"}),
        (scanned_nnx, HOSTED_PLAN, {"mesh": "1", "microbatches": "2"}),
        (looped_linen, LINEN_PLAN, {"mesh": "1", "microbatches": "2"}),
    ],
)
def test_a_run_is_resumed_bit_for_bit_and_goes_on_under_another_plan(toy, tmp_path, make, fields, other_fields):
    base = toy()
    vocab, length = 256, base.data.shapes(1)["tokens"][0][1]
    experiment = toy(model=make(vocab, length), plan=plan_of(**fields))
    train(experiment, steps=4, out=tmp_path / "whole", quiet=True)
    train(experiment, steps=2, out=tmp_path / "halves", quiet=True)
    run = train(experiment, steps=4, out=tmp_path / "halves", quiet=True)
    losses = read_metrics(tmp_path / "whole", "train").column("loss")
    np.testing.assert_array_equal(read_metrics(tmp_path / "halves", "train").column("loss"), losses)
    trained = restore_parameters(tmp_path / "halves", experiment=experiment, split=True)
    means = held_out_means(trained.step, experiment.data.open(4, 0), trained.state, 2, one_at_a_time=True)
    assert means["loss"] == pytest.approx(run.held_out_loss, rel=1e-5)
    assert (tmp_path / "halves" / "report.html").exists()
    other = toy(model=make(vocab, length), plan=plan_of(**other_fields))
    train(other, steps=5, out=tmp_path / "halves", quiet=True)
    assert Run.open(tmp_path / "halves").step == 5
