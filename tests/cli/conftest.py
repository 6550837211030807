"""An experiment file whose model builds nothing, and a place to run in."""

from pathlib import Path

import pytest

TOY = '''
"""A toy."""
import dataclasses
from pathlib import Path
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment

HERE = Path(__file__).parent


class Lines:
    """Toy data."""

    def __init__(self, path):
        self.path = path

    def open(self, batch, seed, *, process=0, processes=1): ...


@dataclasses.dataclass(frozen=True)
class Toy:
    """A toy model.

    Args:
        embed: width.
        kind: which of two.
    """

    embed: int = 8
    kind: Literal["plain", "fancy"] = "plain"

    def __post_init__(self):
        if self.embed % 8:
            raise UserError(f"embed: got {self.embed}, expected a multiple of 8")

    def build(self, rngs, *, vocab_multiple=1): ...

    def loss(self, module, batch, context): ...

    def logical_sizes(self):
        return {}


def experiment():
    """The toy itself."""
    return Experiment(name="toy", model=Toy(), data=Lines(HERE / "text.txt"), steps=3)


def wide():
    """Twice as wide."""
    return Experiment(name="toy", model=Toy(embed=16), data=None)


VARIANTS = {"wide": wide}
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the toy, relative to the working directory, which is empty but for it."""
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()
    file = Path("experiments/toy.py")
    file.write_text(TOY)
    return file
