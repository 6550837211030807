"""A batch without the arrays that a model reads is refused by name, in a loop of one's own and in a run."""

import numpy as np
import pytest

from jaxscale.data.rows import Arrays
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.vit import ViT
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.training.loop import train

DECODER = Decoder(vocab=16, context=8, layers=1, embed=8, heads=2)
IMAGES = {"images": np.zeros((8, 8, 8, 1), np.float32), "labels": np.zeros(8, np.int32)}
TOKENS = dict.fromkeys(("tokens", "targets"), np.zeros((8, 8), np.int32))


@pytest.mark.parametrize(
    ("model", "arrays", "message"),
    [
        (DECODER, IMAGES, "a batch holds images, labels, weights, but a decoder reads tokens and targets"),
        (
            ViT(classes=2, image=8, patch=4, channels=1, layers=1, embed=8, heads=2),
            TOKENS,
            "a batch holds targets, tokens, weights, but a classifier of images reads images and labels",
        ),
    ],
)
def test_a_batch_without_the_arrays_that_a_model_reads_is_refused(tmp_path, model, arrays, message):
    experiment = Experiment("names", model, Arrays(arrays), batch=4, steps=2, plan=Plan(mesh=MeshSpec()))
    step = build(experiment)
    state = step.init()
    with pytest.raises(UserError, match=message.replace(", weights", "")):
        step(state, step.place({name: array[:4] for name, array in arrays.items()}))
    with pytest.raises(UserError, match=message.replace(", weights", "(, weights)?")):
        train(experiment, out=tmp_path / "run", quiet=True)
