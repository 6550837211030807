"""Mistakes in a user's own model, score, data, schedule and callback: the first line has the user's file and line."""

from pathlib import Path

import numpy as np
import pytest

from jaxscale.cli import main

EXPERIMENT = """
import jax
import numpy as np
from flax import nnx

import jaxscale as jx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, images):
        hidden = jax.nn.relu(self.hidden(images))
        return self.head(hidden)


def score(module, batch):
    logits = module(batch["images"][:, 0, :, 0])
    return -jax.nn.log_softmax(logits)[:, 0]


def rate(step):
    return 1e-3


def experiment():
    return jx.Experiment(
        name="mine",
        model=jx.models.ForeignModel(lambda rngs: Net(rngs), score),
        data=jx.data.Images("images.npz", scale=1.0),
        optimizer=jx.Optimizer(),
        steps=2,
        batch=4,
        plan=jx.Plan(mesh="1"),
    )
"""
"""An experiment with nothing wrong in it; each mistake replaces a text in it by another."""

MISTAKES = {
    "shapes that do not fit": ("self.head(hidden)", "self.head(hidden @ hidden)", "TypeError: dot_general"),
    "a layer of another size": ("nnx.Linear(8, 3", "nnx.Linear(9, 3", "TypeError: dot_general"),
    "a name that is not there": ("jax.nn.relu(", "jax.nn.rleu(", "AttributeError: module 'jax.nn'"),
    "a layer that is not there": ("self.head(hidden)", "self.tail(hidden)", "AttributeError: 'Net' object"),
    "a variable that is not there": ("return self.head(hidden)", "return self.head(hiden)", "NameError: name 'hiden'"),
    "a branch on a traced value": (
        "hidden = jax.nn.relu(",
        "assert images.sum() > 0; hidden = jax.nn.relu(",
        "TracerBoolConversionError",
    ),
    "an array made a number": ("hidden = jax", "float(images.sum()); hidden = jax", "ConcretizationTypeError"),
    "an array made NumPy's": ("hidden = jax", "np.asarray(images); hidden = jax", "TracerArrayConversionError"),
    "an argument too many": ("module(batch[", "module(1, batch[", "TypeError: Net.__call__() takes 2"),
    "a batch without the array": ('batch["images"]', 'batch["image"]', "KeyError: 'image'"),
    "an index out of dims": (")[:, 0]", ")[:, 0, 0]", "IndexError: Too many indices"),
    "a model that cannot be made": ("nnx.Linear(4, 8, rngs=rngs)", "nnx.Linear(4, 8)", "TypeError: Linear.__init__"),
    "a division by zero": ("return jx.Experiment(", "1 / 0; return jx.Experiment(", "ZeroDivisionError"),
    "an import that fails": ("import numpy as np", "import numpy as np; import nowhere_at_all", "ModuleNotFoundError"),
}


@pytest.fixture(autouse=True)
def folder_of_data(tmp_path, monkeypatch):
    """Current folder with the file of 20 images of 1x4 pixels."""
    monkeypatch.chdir(tmp_path)
    np.savez("images.npz", x=np.ones((20, 1, 4), np.float32), y=np.arange(20) % 3)


def line_of(source: str, mistake: str) -> int:
    return source[: source.index(mistake)].count("\n") + 1


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_line_has_the_users_file_and_line(name, capfd):
    old, new, message = MISTAKES[name]
    assert old in EXPERIMENT
    source = EXPERIMENT.replace(old, new, 1)
    Path("mine.py").write_text(source)
    code = main(["train", "mine.py"])
    first, *others = capfd.readouterr().err.splitlines()
    assert first.startswith("jaxscale: ")
    assert "mine.py" in first
    assert message in first
    if code == 1:
        line = line_of(source, "self.head(hidden)" if name == "a layer of another size" else new)
        assert first.startswith(f"jaxscale: mine.py:{line}: ")
        assert not any("site-packages" in line or "jaxscale/models" in line for line in others)


def test_shapes_and_the_whole_traceback_on_request(monkeypatch, capfd):
    Path("mine.py").write_text(EXPERIMENT.replace("self.head(hidden)", "self.head(hidden @ hidden)"))
    assert main(["train", "mine.py"]) == 1
    assert "in Net.__call__(self: Net, images: float32[4,4]), where hidden: float32[4,8]" in capfd.readouterr().err
    monkeypatch.setenv("JAXSCALE_TRACEBACK", "full")
    with pytest.raises(TypeError, match="dot_general"):
        main(["train", "mine.py"])
