"""An experiment small enough to compile, big enough that its arrays outweigh its scalars."""

import dataclasses
from pathlib import Path

import pytest

from jaxscale.data import Text
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment
from tests.plans import plan_of
from tests.traced_once import share_traces

FILE = """
from jaxscale.data import Text
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment


def experiment():
    model = Decoder(vocab=512, context=128, layers=4, embed=128, heads=4)
    return Experiment(name="small", model=model, data=Text("text.txt", context=128), batch=8)
"""


@pytest.fixture(autouse=True)
def _equal_steps_are_traced_once(monkeypatch):
    share_traces(monkeypatch)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    model = Decoder(vocab=512, context=128, layers=4, embed=128, heads=4)
    return Experiment(name="small", model=model, data=Text("text.txt", context=128), batch=8)


@pytest.fixture(scope="module")
def planned(experiment: Experiment):
    """The experiment under a plan with these fields."""

    def make(mesh: str = "fsdp:4", **fields) -> Experiment:
        plan = plan_of(mesh=mesh, **fields)
        return dataclasses.replace(experiment, plan=plan)

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return path
