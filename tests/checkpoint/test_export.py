import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint.export import export
from jaxscale.errors import UserError
from jaxscale.models import huggingface
from jaxscale.training.run import Run


def test_the_folder_holds_the_model_of_the_run(toy, whole, tmp_path):
    folder = export(whole, tmp_path / "hf")
    assert (folder / "config.json").exists()
    model, params = huggingface.load(folder)
    assert (model.vocab, model.layers, model.embed) == (256, 1, 8)
    trained = Run.open(whole).state.params
    np.testing.assert_array_equal(np.asarray(params["embedding"]["weight"]), np.asarray(trained["embedding"]["weight"]))
    assert not (folder / "tokenizer.json").exists(), "bytes need none"


def test_a_folder_that_holds_a_model_is_left_alone(whole, tmp_path):
    export(whole, tmp_path / "hf", dtype="bfloat16")
    with pytest.raises(UserError, match="already contains a model"):
        export(whole, tmp_path / "hf")
    assert huggingface.load(tmp_path / "hf")[1]["embedding"]["weight"].dtype == jnp.bfloat16
