"""A run's checkpoint with its optimizer state in other bits: what is read back is what the old one decodes to."""

import json

import numpy as np
import pytest

from jaxscale.checkpoint.convert import convert_state
from jaxscale.checkpoint.store import Checkpoints, Description
from jaxscale.cli.main import main
from jaxscale.data import Text
from jaxscale.errors import MISTAKE, UserError
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.records import directory as place
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build

MODEL = Decoder(vocab=256, context=8, layers=1, embed=64, heads=4, kv_heads=1, mlp=64)
NAME = "optimizer/1/0/mu/blocks/layers/0/mlp/up/weight"


@pytest.fixture
def run(tmp_path):
    """A directory with a checkpoint of float32 state whose moments are no zeros."""
    experiment = Experiment("bits", MODEL, Text("text.txt", tokenizer="byte", context=8), batch=8)
    step = build(experiment, Plan(mesh=MeshSpec()))
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=leaf.shape).astype(leaf.dtype) ** (2 if "/nu/" in name else 1)
        if name.startswith("optimizer/") and leaf.shape
        else np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in step.canonical_abstract().items()
    }
    folder = tmp_path / "run"
    folder.mkdir()
    place.write_values(folder, experiment, step.plan)
    Checkpoints(folder / "checkpoints").save_arrays(arrays, Description(3, 30, None, "bits"), wait=True)
    return folder, arrays


def test_a_checkpoint_goes_to_eight_bits_and_back(run, capsys):
    folder, arrays = run
    assert main(["convert-state", str(folder), "--to", "int8"]) == 0
    assert "were float32 and are now soft8 in blocks of" in capsys.readouterr().out
    eight = folder.with_name("run-int8")
    assert json.loads((eight / "plan.json").read_text())["state"]["moments"] == "int8"
    back = folder.with_name("back")
    assert "step 3" in convert_state(eight, "float32", back)
    with pytest.raises(UserError, match="already exists: give another directory with --out"):
        convert_state(eight, "float32", back)
    experiment = Experiment("bits", MODEL, Text("text.txt", tokenizer="byte", context=8), batch=8)
    found = Checkpoints(back / "checkpoints").restore_arrays(
        build(experiment, Plan(mesh=MeshSpec())).canonical_abstract()
    )
    assert found is not None
    assert found.description.step == 3
    assert set(found.arrays) == set(arrays)
    changed = 0
    for name, array in arrays.items():
        if name in (NAME, NAME.replace("/mu/", "/nu/")):
            changed += 1
            np.testing.assert_allclose(found.arrays[name], array, atol=np.abs(array).max() / 126)
            assert np.any(np.asarray(found.arrays[name]) != array)
        elif "/mlp/" not in name and "/q/" not in name and "/out/" not in name:
            np.testing.assert_array_equal(found.arrays[name], array)
    assert changed == 2


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["convert-state", str(tmp_path / "none")]) == MISTAKE
    assert main(["convert-state", str(tmp_path), "--to", "int7"]) == MISTAKE
    assert "int7" in capsys.readouterr().err
