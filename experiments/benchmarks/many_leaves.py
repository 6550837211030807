"""An experiment of many small parameter arrays, where the host's work per step shows."""

from pathlib import Path

import jax
from flax import nnx

from jaxscale import Experiment
from jaxscale.data import Text
from jaxscale.models import ForeignModel, language_model
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples

TEXT = Path(__file__).resolve().parent.parent / "data" / "shakespeare.txt"


class Narrow(nnx.Module):
    """Tokens to logits through many narrow layers; two arrays each."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.table = nnx.Embed(256, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(4, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits."""
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def many_leaves(leaves: int) -> Experiment:
    """An experiment whose model has `leaves` (even) parameter arrays."""
    return Experiment(
        name="many_leaves",
        model=ForeignModel(lambda rngs: Narrow((leaves - 2) // 2, rngs), language_model()),
        data=Text(path=str(TEXT), tokenizer="byte", context=8),
        batch=4,
        evaluation=Evaluation(every=0, batches=1),
        samples=Samples(every=0, prompts=()),
        checkpoint=Checkpointing(every=0),
    )
