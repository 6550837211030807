"""A U-Net of unlike blocks sharpens handwritten digits, and a budget in bytes places its recomputation.

    jaxscale train experiments/unet_chain.py
    jaxscale train experiments/unet_chain.py --plan.mesh 1 --plan.memory chain:2MB

Images of 4 x 4 pixels, each the mean of 2 x 2, become 8 x 8 again; what is told is the mean squared error of a pixel.
Skips make a U-Net no chain, until they travel with the features: each block takes the list, adds to it on the way
down, and takes from it on the way up. What a block passes on unchanged takes memory once, and the plan knows
(`Stage.passed_bytes`). 1,797 images, a fifth held out, 300 steps of AdamW.

On two CPU cores, busy with other work: 14 seconds of steps after 42 of compilation; the held-out error falls from
0.050, that of the coarse image, to 0.0101.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import Context, Evaluation, Experiment, Loss, Optimizer
from jaxscale.data import Images
from jaxscale.layers import Chain, Conv, LayerNorm

DIGITS = Path(__file__).parent / "data" / "digits.npz"
State = tuple[Any, ...]
"""Features (B, I, J, C), and before them the skips that wait for the way up."""


class Block(nnx.Module):
    """Two convolutions with a residual, on the way down or up, or between.

    Args:
        way: "down" leaves its features as a skip and halves height and width, "up" doubles them and takes a skip.
        inward: channels that come in.
        outward: channels that go out.
        rngs: random streams.
    """

    def __init__(self, way: Literal["down", "flat", "up"], inward: int, outward: int, *, rngs: nnx.Rngs):
        self.way = way
        self.norm = LayerNorm(inward, rngs=rngs)
        self.first = Conv(inward, outward, rngs=rngs)
        self.second = Conv(outward, outward, init=nnx.initializers.zeros_init(), rngs=rngs)
        self.shortcut = Conv(inward, outward, window=1, rngs=rngs)

    def __call__(self, state: State, *, context: Context = Context()) -> State:
        """The state after the block."""
        *skips, x = state
        if self.way == "up":
            x = jnp.concatenate([x.repeat(2, 1).repeat(2, 2), skips.pop()], -1)
        x = self.shortcut(x) + self.second(jax.nn.gelu(self.first(self.norm(x))))
        if self.way == "down":
            batch, height, width, channels = x.shape
            return (*skips, x, x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4)))
        return (*skips, x)


class UNetModule(nnx.Module):
    """Coarse images to fine ones, both (B, I, J, 1)."""

    def __init__(self, config: "UNet", *, rngs: nnx.Rngs):
        widths = [config.width * 2**level for level in range(config.levels + 1)]
        self.stem = Conv(1, widths[0], rngs=rngs)
        down = [
            Block("down", widths[0] if i == 0 else widths[i - 1], widths[i], rngs=rngs) for i in range(len(widths) - 1)
        ]
        flat = [Block("flat", widths[-2] if i == 0 else widths[-1], widths[-1], rngs=rngs) for i in range(config.depth)]
        up = [Block("up", widths[i + 1] + widths[i], widths[i], rngs=rngs) for i in reversed(range(len(widths) - 1))]
        self.blocks = Chain([*down, *flat, *up])
        self.head = Conv(widths[0], 1, init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, coarse: jax.Array, *, context: Context = Context()) -> jax.Array:
        """What is added to the coarse image, and it."""
        dtype = jnp.dtype(context.dtype or "float32")
        (x,) = self.blocks((self.stem(coarse.astype(dtype)),), context=context)
        return coarse + self.head(x).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class UNet:
    """A U-Net that sharpens images.

    Args:
        width: channels at full size; each level has twice those above.
        levels: times that height and width are halved.
        depth: blocks at the smallest size.
    """

    width: int = 16
    levels: int = 2
    depth: int = 2

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> UNetModule:
        """The module."""
        return UNetModule(self, rngs=rngs)

    def loss(self, module: UNetModule, batch: Any, context: Context) -> Loss:
        """Sum over images of the mean squared error of a pixel."""
        fine = batch["images"]
        rows, height, width, channels = fine.shape
        coarse = fine.reshape(rows, height // 2, 2, width // 2, 2, channels).mean((2, 4)).repeat(2, 1).repeat(2, 2)
        errors = jnp.square(module(coarse, context=context) - fine).mean((1, 2, 3))
        weights = batch.get("weights", jnp.ones(rows))
        return Loss((errors * weights).sum(), weights.sum())

    def logical_sizes(self) -> dict[str, int]:
        """No axis of it lies on a mesh but the batch."""
        return {}


def experiment() -> Experiment:
    """Trains in about a minute on two cores."""
    return Experiment(
        name="unet_chain",
        model=UNet(),
        data=Images(str(DIGITS), scale=16.0),
        optimizer=Optimizer(learning_rate=3e-3, warmup=30),
        steps=300,
        batch=64,
        evaluation=Evaluation(every=150),
    )
