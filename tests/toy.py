"""Fixtures of rooms that train the smallest language model: its experiment, a whole run, its compiled programs."""

import os

import pytest

os.environ["TOKENIZERS_PARALLELISM"] = "true"


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A function of changes: the smallest language model that generates, on a text of its own, on two devices."""
    from jaxscale.data.text import Text
    from jaxscale.models.decoder import Decoder
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples
    from jaxscale.recipe.plan import Plan
    from jaxscale.sharding.mesh import MeshSpec

    folder = tmp_path_factory.mktemp("toy")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat. " * 60)

    def make(**changes):
        fields = {
            "name": "toy",
            "model": Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
            "data": Text(text, context=16),
            "optimizer": Optimizer(warmup=5, learning_rate=1e-2),
            "steps": 12,
            "batch": 4,
            "evaluation": Evaluation(every=0, batches=2),
            "samples": Samples(every=0, prompts=()),
            "checkpoint": Checkpointing(every=5, minutes=None),
            "plan": Plan(mesh=MeshSpec(data=2)),
        }
        return Experiment(**{**fields, **changes})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(folder / "cache"))
        yield make


@pytest.fixture(scope="session")
def _whole(toy, tmp_path_factory):
    from jaxscale.training.loop import train

    folder = tmp_path_factory.mktemp("whole") / "run"
    train(toy(), out=folder, quiet=True)
    return folder


@pytest.fixture
def whole(_whole, tmp_path):
    """A copy of the directory of `toy()` trained to its end without any interruption."""
    import shutil

    return shutil.copytree(_whole, tmp_path / "whole")


@pytest.fixture(scope="session")
def _compiled():
    """Compiled steps of toys, and what their compilation returned."""
    return {}, {}


@pytest.fixture(scope="module")
def shared_steps(_compiled):
    """Runs of one experiment and plan share their compiled step, as if it were loaded from a cache."""
    from tests.system.whole import compiled_once

    with compiled_once(*_compiled):
        yield
