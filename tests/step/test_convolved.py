"""Plans drawn at random for a network of convolutions by tiles, each beside the plan of defaults on one device."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx
from jaxscale.blocks import Context, Loss
from jaxscale.layers.conv import Conv
from jaxscale.layers.linear import Linear
from jaxscale.layers.stack import Stack

WIDTH = 32
"""Channels: enough for tiles."""
ROWS = 64
CHOICES = {
    "mesh": ("data:8", "data:4", "fsdp:4", "data:2,fsdp:2", "fsdp:8", "data:2,tensor:2", "fsdp:2,tensor:2"),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2, 4),
    "memory": ("none", "full", "dots", "save:1MiB"),
    "pipeline": (None, None, "gpipe:2x4", "1f1b:2x4", "zb-h1:2x4"),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (Conv(WIDTH, WIDTH, bias=True, rngs=rngs) for _ in range(2))

    def __call__(self, x, *, context=Context()):
        return x + 0.3 * self.second(jax.nn.relu(self.first(x)))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.stem = Conv(3, WIDTH, rngs=rngs)
        self.blocks = Stack(Block, 4, rngs=rngs)
        self.head = Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        return self.head(jnp.mean(self.blocks(self.stem(images)), (1, 2)))


@dataclasses.dataclass(frozen=True)
class Convolved:
    """A network of convolutions without statistics of a batch, so that microbatches and stages change no loss."""

    def build(self, rngs, *, vocab_multiple=1):
        return Network(rngs)

    def loss(self, module, batch, context):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(module(batch["images"])), batch["labels"][:, None], 1)
        return Loss(-jnp.sum(chosen), jnp.float32(chosen.size))

    def logical_sizes(self):
        return {"channels": WIDTH}


def drawn_plan(number):
    """Return the plan of draw `number`."""
    generator = random.Random(f"convolved/{number}")
    fields = {name: generator.choice(values) for name, values in CHOICES.items()}
    if fields["pipeline"] is not None:
        fields |= {
            "microbatches": 1,
            "mesh": generator.choice(("data:2", "data:4", "fsdp:2", "tensor:2", "data:2,tensor:2")),
        }
    if "fsdp" not in fields["mesh"]:
        fields["zero"] = 0
    return jx.Plan(**fields)


def losses(plan, count=4):
    """Return the losses of the first steps under a plan."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(ROWS, 8, 8, 3)), rng.integers(0, 10, ROWS, dtype=np.int32)
    batch = {"images": images.astype(np.float32), "labels": labels}
    optimizer = jx.Optimizer(name="sgd", learning_rate=1.0)
    step = jx.build(jx.Experiment("convolved", Convolved(), batch, optimizer, steps=count, batch=ROWS, plan=plan))
    state = step.init()
    step_losses = []
    for _ in range(count):
        state, metrics = step(state, step.place(batch))
        step_losses.append(float(metrics["loss"]))
    return step_losses


@pytest.fixture(scope="module")
def plain_losses():
    assert len(jax.devices()) == 8
    step_losses = losses(jx.Plan(mesh="1"))
    assert step_losses[0] > 1.01 * step_losses[-1]
    return step_losses


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 24))])
def test_a_drawn_plan_trains_like_the_plain_one(number, plain_losses):
    np.testing.assert_allclose(losses(drawn_plan(number)), plain_losses, rtol=2e-5)
