"""The blocks of a foreign model in sequence: stages of a pipeline, and rules that recompute segments of blocks.

By default: a pipeline of alike blocks with dropout, in float32, one of blocks of different widths under an interleaved
schedule; a chain's budget for a residual stream, and segments.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import Experiment, Optimizer, build
from jaxscale.errors import UserError
from jaxscale.models import ForeignModel, classification
from tests.plans import plan_of
from tests.tiers import variants

nnx.use_eager_sharding(False)


class Block(nnx.Module):
    """Reads a mask that all blocks share, and passes on an auxiliary sum."""

    def __init__(self, width, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, aux, mask):
        h = self.dropout(jax.nn.relu(self.linear(self.norm(x))))
        return x + h * mask, aux + jnp.mean(h**2, axis=-1)


class Net(nnx.Module):
    """Operations between the blocks, a tuple from block to block, a parameter of all blocks."""

    def __init__(self, rngs, depth=3, rate=0.0, width=8):
        self.stem = nnx.Linear(4, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rngs, rate) for _ in range(depth)])
        self.gain = nnx.Param(jnp.full((width,), 0.9))
        self.head = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x):
        mask = (x[:, :1] > 0).astype(x.dtype)
        x, aux = self.stem(x), 0.0
        for layer in self.layers:
            x, aux = layer(x, aux, mask)
            x = x * self.gain[...][None]
        return self.head(x) + 0.1 * jnp.asarray(aux)[:, None]


class Numbered(nnx.Module):
    """Blocks of different widths, as attributes with numbers."""

    def __init__(self, rngs):
        self.block0, self.block1 = Dense(4, 8, rngs), Dense(8, 8, rngs)
        self.block2, self.block3 = Dense(8, 8, rngs), Dense(8, 5, rngs)

    def __call__(self, x):
        return self.block3(self.block2(self.block1(self.block0(x))))


class Dense(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Residual(nnx.Module):
    """The module adds up the residual stream itself, from two lists, as Mamba does."""

    def __init__(self, rngs, depth=4):
        self.norms = nnx.List([nnx.LayerNorm(4, rngs=rngs) for _ in range(depth)])
        self.layers = nnx.List([Dense(4, 4, rngs) for _ in range(depth)])
        self.gain = nnx.Param(jnp.full((4,), 0.9))
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x * self.gain[...][None] + layer(norm(x))
        return self.head(x)


class Summed(Residual):
    """Each block's result is also a part of a sum, as an auxiliary loss is."""

    def __call__(self, x):
        total = jnp.zeros(x.shape)
        for layer in self.layers:
            x = layer(x)
            total = total + x**2
        return self.head(x + total)


class Skips(Net):
    def __init__(self, rngs):
        super().__init__(rngs, depth=5)

    def __call__(self, x):
        mask, results = jnp.ones((1, 1)), []
        x = self.stem(x)
        for layer in self.layers:
            x, _ = layer(x if len(results) < 3 else x + results[0], 0.0, mask)
            results.append(x)
        return self.head(x)


class Tied(Net):
    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x, _ = layer(x, 0.0, jnp.ones((1, 1)))
        return self.head(x @ self.layers[1].linear.kernel[...])


class Branches(nnx.Module):
    """Two lists of blocks."""

    def __init__(self, rngs):
        self.down = nnx.List([Dense(4, 4, rngs) for _ in range(2)])
        self.up = nnx.List([Dense(4, 4, rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        for layer in [*self.down, *self.up]:
            x = layer(x)
        return self.head(x)


class Remade(Branches):
    """Blocks inside of a checkpoint of the user's own."""

    def __call__(self, x):
        return jax.checkpoint(super().__call__)(x)


class Scaled(Dense):
    def __call__(self, x, scale):
        return super().__call__(x) * scale[:1]


class Lent(nnx.Module):
    """Each block is called with a parameter of the block whose index is `lender`, or of its own."""

    def __init__(self, rngs, lender=None):
        self.layers, self.lender = nnx.List([Scaled(4, 4, rngs) for _ in range(2)]), lender
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x, self.layers[index if self.lender is None else self.lender].linear.kernel[...])
        return self.head(x)


class Translator(Branches):
    """Decoder blocks that each read the result of the encoder, and in the encoder dropout."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.up = nnx.List([Scaled(4, 4, rngs) for _ in range(2)])

    def __call__(self, x):
        memory = x[:, ::-1]
        for layer in self.down:
            memory = layer(memory)
        for layer in self.up:
            x = layer(x, jnp.mean(memory, axis=0, keepdims=True) * 0 + 1) + memory
        return self.head(x)


class Leaves(Dense):
    def __call__(self, x):
        y = super().__call__(x)
        self.seen = nnx.Intermediate(2.0 * y)
        return y


class Sown(nnx.Module):
    """A value that the last block leaves is read after the blocks."""

    def __init__(self, rngs):
        self.layers = nnx.List([Leaves(4, 4, rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.layers[1].seen[...])


class Normalized(Branches):
    """Running statistics."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)


def batches():
    rng = np.random.default_rng(0)
    return [
        {"images": rng.normal(size=(8, 4)).astype("float32"), "labels": rng.integers(0, 5, 8).astype("int32")}
        for _ in range(3)
    ]


def trajectory(make, blocks=None, **plan_fields):
    """Losses and gradient norms of three steps."""
    model = ForeignModel(make, classification(), blocks=blocks)
    optimizer = Optimizer("sgd", learning_rate=0.1)
    step = build(Experiment("net", model, batches()[0], optimizer, steps=3, batch=8), plan_of(**plan_fields))
    step.compile(batches()[0])
    state, figures = step.init(), []
    for batch in batches():
        state, metrics = step(state, step.place(batch))
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(figures)


plain = functools.cache(trajectory)


ALL = ("down/0", "down/1", "up/0", "up/1")


@pytest.mark.parametrize(
    ("make", "blocks", "plan"),
    variants(
        [
            (Numbered, None, {"pipeline": "interleaved:2x4,v=2", "stash": "input"}),
            (Residual, "layers", {"memory": "chain:200B"}),
            (Net, None, {"memory": "revolve:2"}),
            (Net, None, {"pipeline": "1f1b:2x4", "stash": "input"}),  # padding rows: three blocks on two stages
            (Branches, ALL, {"pipeline": "1f1b:2x4", "stash": "input", "mesh": "1"}),
            (Summed, "layers", {"memory": "sqrt"}),
            (Translator, "up", {"memory": "sqrt"}),
            (Residual, "layers", {"pipeline": "1f1b:2x4", "stash": "input"}),
            (lambda rngs: Net(rngs, 5), "layers", {"mesh": "data:2", "pipeline": "gpipe:4x2", "stash": "input"}),
            (Net, None, {"mesh": "data:2", "pipeline": "gpipe:2x2", "stash": "input", "memory": "full"}),
            (Net, None, {"mesh": "fsdp:2", "pipeline": "zb-h1:2x4", "stash": "input", "zero": "2"}),
            (Numbered, None, {"pipeline": "chimera:4x4", "stash": "input"}),
            (Translator, "up", {"pipeline": "1f1b:2x4", "stash": "input", "mesh": "data:2"}),
            (Residual, "layers", {"mesh": "data:2", "pipeline": "interleaved:2x4,v=2", "stash": "input"}),
            (Net, None, {"memory": "sqrt"}),
            (Net, None, {"memory": "chain:400B", "mesh": "data:2"}),
        ],
        default=3,
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_blocks_in_sequence_give_the_numbers_of_one_device(make, blocks, plan):
    np.testing.assert_allclose(trajectory(make, blocks, **plan), plain(make), rtol=2e-5)


@pytest.mark.parametrize(("make", "memory"), [(Residual, "chain:200B"), (Net, "revolve:2"), (Summed, "sqrt")])
def test_a_rule_of_several_blocks_keeps_less_than_everything(make, memory):
    model = ForeignModel(make, classification(), blocks="layers")
    experiment = Experiment("net", model, batches()[0], Optimizer("sgd"), steps=3, batch=8)
    some, everything = (build(experiment, plan_of(memory=rule)).decision for rule in (memory, "chain:1MiB"))
    assert 0 < some.bytes < everything.bytes


@pytest.mark.parametrize("precision", variants(["float32", "bfloat16"], default=1))
def test_dropout_in_a_pipeline_is_that_of_its_microbatches(precision):
    def make(rngs):
        return Net(rngs, rate=0.5)

    # without an axis over rows, whose devices would each draw the mask of their own rows
    fields = {"mesh": "1", "precision": precision}
    figures = trajectory(make, pipeline="1f1b:2x4", stash="input", **fields)
    tolerance = 2e-5 if precision == "float32" else 1e-2
    np.testing.assert_allclose(figures, trajectory(make, microbatches="4", **fields), rtol=tolerance)
    without = plain(Net, microbatches="4", **fields)
    assert np.abs(figures / without - 1).max() > 5 * tolerance


@pytest.mark.variant  # by default: those of blocks under remat, in `test_foreign_blocks.py`
def test_statistics_change_in_segments_as_without_them():
    def make(rngs):
        module = Net(rngs)
        for layer in module.layers:
            layer.norm = nnx.BatchNorm(8, rngs=rngs)
        return module

    np.testing.assert_allclose(trajectory(make, mesh="1", memory="sqrt"), trajectory(make, mesh="1"), rtol=2e-5)


@pytest.mark.parametrize(
    ("make", "blocks", "plan", "words"),
    [
        (Skips, None, {"pipeline": "1f1b:2x4", "stash": "input"}, "reads the results of blocks layers/0 and layers/2"),
        (Skips, None, {"memory": "sqrt"}, "a memory rule of several blocks needs blocks that each read"),
        (Tied, None, {"pipeline": "1f1b:2x4", "stash": "input"}, "parameters of block layers/1 are also read outside"),
        (Remade, ALL, {"pipeline": "1f1b:2x4", "stash": "input"}, "calls its blocks inside of "),
        (
            Branches,
            None,
            {"pipeline": "1f1b:2x4", "stash": "input"},
            "a chain of 2 blocks (down/0, ...) and a chain of 2 blocks",
        ),
        (
            Branches,
            ALL[::-1],
            {"pipeline": "1f1b:2x4", "stash": "input"},
            "in the order up/1, up/0, down/1, down/0; this model calls",
        ),
        (Branches, "dwn", {"pipeline": "1f1b:2x4", "stash": "input"}, "did you mean 'down'?"),
        (Lent, None, {"pipeline": "1f1b:2x4", "stash": "input"}, "parameters of block layers/0 are also read outside"),
        (
            lambda rngs: Lent(rngs, 0),
            None,
            {"pipeline": "1f1b:2x4", "stash": "input"},
            "parameters of block layers/0 are also read outside",
        ),
        (Branches, "head", {"pipeline": "1f1b:2x4", "stash": "input"}, "unknown list of blocks 'head'"),
        (Branches, "down/0", {"pipeline": "1f1b:2x4", "stash": "input"}, "unknown list of blocks 'down/0'"),
        (Branches, ("down/0", "upp/1"), {"pipeline": "1f1b:2x4", "stash": "input"}, "unknown block 'upp/1'"),
        (Branches, 3, {}, "blocks: got 3, expected the path of a list of submodules"),
        (Branches, ["down/0", "down/1"], {}, "or a tuple of paths of submodules"),
        (Sown, None, {"pipeline": "1f1b:2x4", "stash": "input"}, "reads a variable that block layers/1 changes"),
        (Normalized, ALL, {"pipeline": "1f1b:2x4", "stash": "input"}, "running statistics (norm/"),
        (
            lambda rngs: nnx.Linear(4, 5, rngs=rngs),
            None,
            {"pipeline": "1f1b:2x4", "stash": "input"},
            "no blocks to cut into stages: its parts are bias, kernel, and none is a list of alike submodules",
        ),
        (Net, None, {"pipeline": "2bw:2x4"}, "cannot update their weights at different times"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_models_whose_blocks_form_no_chain_are_refused_by_name(make, blocks, plan, words):
    with pytest.raises(UserError, match=re.escape(words)):
        trajectory(make, blocks, **plan)
