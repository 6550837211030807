"""A model of as few leaves as a stack can have: what is compiled is the step around it, at half of a decoder's cost."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.blocks import Context, Loss
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Stack

LENGTH, WIDTH = 4, 32


class Block(nnx.Module):
    """A feed-forward layer and its residual."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.mlp = MLP(WIDTH, 2 * WIDTH, kind="relu", rngs=rngs)

    def __call__(self, x: Any, *, context: Context = Context()) -> Any:
        return x + self.mlp(x, context=context)


class Blocks(nnx.Module):
    """A stack of them."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.blocks = Stack(lambda rngs: Block(rngs=rngs), layers, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Residual:
    """Squared differences of the blocks' outputs from targets."""

    layers: int = 2

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> Blocks:
        return Blocks(self.layers, rngs)

    def logical_sizes(self) -> dict[str, int]:
        return {"mlp": 2 * WIDTH, "embed": WIDTH}

    def loss(self, module: Blocks, batch: Any, context: Context) -> Loss:
        x = batch["inputs"].astype(context.dtype or jnp.float32)
        y = module.blocks(x, context=context).astype(jnp.float32)
        weights = batch.get("weights", jnp.ones(x.shape[0]))  # of rows
        losses = jnp.square(y - batch["targets"]).sum((1, 2))
        return Loss((weights * losses).sum(), weights.sum() * LENGTH * WIDTH)


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Shapes of batches, and nothing else."""

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return dict.fromkeys(("inputs", "targets"), ((batch, LENGTH, WIDTH), "float32"))


def random_batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32) for name in ("inputs", "targets")}
