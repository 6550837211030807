"""A whole run under a learning rate of the user's own: its record, its report, and how it goes on."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale.checkpoint.export import export
from jaxscale.errors import UserError
from jaxscale.optim.optimizer import Optimizer
from jaxscale.records.metrics import read_metrics
from jaxscale.records.source import load_file
from jaxscale.training.loop import train
from jaxscale.training.run import Run

FILE = """
import dataclasses
from pathlib import Path

import jax.numpy as jnp

import jaxscale as jx


def warm(update):
    return jnp.minimum(1e-2, 2e-3 * (1 + update))


def experiment():
    return jx.Experiment(
        "own", jx.models.Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
        jx.data.Text(Path(__file__).with_name("text.txt"), context=16),
        jx.Optimizer(schedule=warm, groups={"mlp": jx.Optimizer("sgd", schedule=lambda update: 0.1 / (1 + update))}),
        steps=4, batch=4, evaluation=jx.Evaluation(every=0, batches=2), samples=jx.Samples(every=0, prompts=()),
        checkpoint=jx.Checkpointing(every=2, minutes=None), plan=jx.Plan(mesh="1"),
    )


def renamed():
    base = experiment()
    return dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, schedule=lambda update: 1e-2))


VARIANTS = {"renamed": renamed}
"""
WARM = [2e-3, 4e-3, 6e-3, 8e-3]
GROUP = [0.1, 0.05, 0.1 / 3, 0.025]


def rates_of(run):
    rows = read_metrics(run, "train")
    return rows.column("learning_rate"), rows.column("learning_rate/mlp")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def run_of(file, name, variant=None, **arguments):
    experiment, source = load_file(file, variant)
    return train(experiment, out=file.parent / name, source=source, **arguments)


@pytest.mark.slow
def test_a_run_is_recorded_resumed_evaluated_exported_and_reported(file, capsys):
    run_of(file, "whole", quiet=True)
    run_of(file, "halves", quiet=True, steps=2)
    run = run_of(file, "halves")
    assert "steps were 2 and are 4: the learning rate of step 3 stays at 0.006, that of group mlp stays at 0.03333" in (
        output := capsys.readouterr().out
    )
    assert "has changed since" not in output
    for name in ("whole", "halves"):
        np.testing.assert_allclose(rates_of(file.parent / name), [WARM, GROUP], rtol=1e-6)
    losses = [read_metrics(file.parent / name, "train").column("loss") for name in ("whole", "halves")]
    np.testing.assert_array_equal(*losses)
    optimizer = json.loads((file.parent / "whole" / "experiment.json").read_text())["optimizer"]
    assert optimizer["schedule"]["callable"].endswith(":warm")
    assert optimizer["groups"]["mlp"]["schedule"]["callable"].endswith(":experiment.<locals>.<lambda>")
    page = (file.parent / "whole" / "report.html").read_text()
    assert f"The learning rate is what the function {optimizer['schedule']['callable']} returns" in page
    assert "The learning rate of the group mlp is what the function" in page
    assert np.isfinite(run.held_out_loss)
    assert Run.open(file.parent / "halves").step == 4
    export(file.parent / "halves", file.parent / "exported")
    assert (file.parent / "exported" / "config.json").exists()
    # another function in the same place is a change of the file's code, which is allowed and logged
    file.write_text(FILE.replace("2e-3 * (1 + update)", "5e-3 * (1 + update)").replace("steps=4", "steps=6"))
    run_of(file, "whole")
    assert "own.py has changed since this run was last started, and the experiment uses code" in capsys.readouterr().out
    assert rates_of(file.parent / "whole")[0][4:] == pytest.approx([1e-2, 1e-2])
    # a function of another name is another experiment, but a run may return to a checkpoint with it
    with pytest.raises(UserError, match=r"holds a run of another experiment: optimizer.schedule"):
        run_of(file, "halves", "renamed", steps=6)
    run_of(file, "halves", "renamed", steps=6, from_step=2, quiet=True)
    assert read_metrics(file.parent / "halves", "train").column("learning_rate")[-4:] == pytest.approx([1e-2] * 4)


def test_a_named_schedule_and_a_function_are_two_experiments(toy, whole):
    other = dataclasses.replace(toy().optimizer, learning_rate=1e-3, warmup=0, schedule=lambda update: 1e-2)
    with pytest.raises(UserError, match=r"another experiment: .*optimizer.schedule"):
        train(toy(optimizer=other), out=whole, quiet=True)
    assert isinstance(other, Optimizer)
