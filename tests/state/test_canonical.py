"""One canonical form for every layout: what one run saves, any other continues from.

States of a decoder, of groups with factored moments and statistics, and of GaLore move by default.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.layers.stack import Stack
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel, classification
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.naming import layer_name
from jaxscale.step.build import build
from tests.tiers import variants

ROWS, LENGTH, VOCAB = 8, 8, 13  # a vocabulary that no axis divides: it is padded under tensor parallelism
DECODER = Decoder(vocab=VOCAB, context=LENGTH, layers=2, embed=8, heads=4, kv_heads=4, mlp=24)


@dataclasses.dataclass(frozen=True)
class Unrolled(Decoder):
    """A Decoder whose stack is not scanned."""

    def build(self, rngs, *, vocab_multiple=1):
        module = super().build(rngs, vocab_multiple=vocab_multiple)
        for _, node in nnx.iter_graph(module):
            if isinstance(node, Stack):
                node.scan = False
        return module


@dataclasses.dataclass(frozen=True)
class Grouped(Decoder):
    """A Decoder of two layers that keeps them in two stacks."""

    def build(self, rngs, *, vocab_multiple=1):
        with blocks.grouping((1, 1)):
            return super().build(rngs, vocab_multiple=vocab_multiple)


class Running(nnx.Module):
    """Scales by its weight, and keeps a mean."""

    def __init__(self, rngs):
        self.weight = nnx.Param(rngs.params.normal((8, 16)), out_sharding=(None, "mlp"))
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, *, context=Context()):
        self.mean[...] = self.mean[...] + jnp.mean(x)
        return x + jnp.tanh(x @ self.weight[...]) @ self.weight[...].T


class Stacked(nnx.Module):
    def __init__(self, rngs, groups=()):
        with blocks.grouping(groups):
            self.blocks = Stack(Running, 3, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(x))


def stacked(groups=()):
    return ForeignModel(functools.partial(Stacked, groups=groups), classification())


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.norm(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def foreign():
    return ForeignModel(Net, classification())


def lamb(rate):
    return optax.lamb(rate)


ADAFACTOR = functools.partial(optax.adafactor, min_dim_size_to_factor=8, multiply_by_parameter_scale=False)


def factored(rate):
    return ADAFACTOR(rate)


def unclipped(rate):
    """Without the clipping of each array's update, in which a stack in groups differs from one."""
    return ADAFACTOR(rate, clipping_threshold=None)


def make(model=DECODER, mesh="1", optimizer=Optimizer(), **plan):
    experiment = Experiment(name="canonical", model=model, data=None, optimizer=optimizer, steps=20, batch=ROWS)
    return build(experiment, Plan(mesh=MeshSpec.parse(mesh), **plan))


def batch_of(step):
    rng = np.random.default_rng(0)
    if isinstance(step.experiment.model, ForeignModel):
        images = rng.normal(size=(ROWS, 8)).astype(np.float32)
        return {"images": images, "labels": rng.integers(0, 5, ROWS).astype(np.int32)}
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def shapes(step):
    return {name: (leaf.shape, str(leaf.dtype)) for name, leaf in step.canonical_abstract().items()}


LAYOUTS = {
    "data": {"mesh": "data:4"},
    "zero 1": {"mesh": "fsdp:4", "zero": 1},
    "zero 3 x tensor, padded vocabulary": {"mesh": "fsdp:2,tensor:4", "zero": 3},
    "bfloat16, microbatches": {"mesh": "fsdp:2", "zero": 2, "precision": "bfloat16", "microbatches": 2},
    "unrolled": {"model": Unrolled(**{f.name: getattr(DECODER, f.name) for f in dataclasses.fields(DECODER)})},
    "groups": {"model": Grouped(**{f.name: getattr(DECODER, f.name) for f in dataclasses.fields(DECODER)})},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_shapes_and_types_are_those_of_one_device(name):
    found = shapes(make(**LAYOUTS[name]))
    assert found == shapes(make())
    tables = [shape for leaf, (shape, _) in found.items() if leaf.startswith("params/") and VOCAB in shape]
    assert len(tables) == 2
    assert not any(shape[:1] == (2,) for shape, _ in found.values()), "a stack of two layers is left"
    assert sum("/layers/1/" in leaf and leaf.startswith("params/") for leaf in found) == 9


OPTIMIZERS = {
    "adamw": (Optimizer(), 2),
    "sgd": (Optimizer(name="sgd", weight_decay=0.0), 0),
    "sgd with momentum": (Optimizer(name="sgd", momentum=0.9), 1),
    "lion": (Optimizer(name="lion"), 1),
    "custom": (Optimizer(custom=lamb), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_taken_apart_as_its_parameters_are(name):
    optimizer, copies = OPTIMIZERS[name]
    found = shapes(make(mesh="fsdp:2,tensor:4", zero=2, optimizer=optimizer))
    assert found == shapes(make(optimizer=optimizer))
    params = sorted(leaf for leaf in found if leaf.startswith("params/"))
    state = [leaf for leaf in found if leaf.startswith("optimizer/") and found[leaf][0]]
    assert len(state) == copies * len(params)
    for param in params:
        mine = [leaf for leaf in state if leaf.endswith(param.removeprefix("params"))]
        assert [found[leaf] for leaf in mine] == [found[param]] * copies, param


def test_factored_state_has_the_same_form_on_every_mesh():
    """Its rows and columns have no parameter's shape: they stay whole, and are stacked as the parameter is."""
    one, other = (make(mesh=m, optimizer=Optimizer(custom=factored), zero=z) for m, z in (("1", 0), ("fsdp:4", 2)))
    assert shapes(one) == shapes(other)
    assert any("v_row" in leaf for leaf in shapes(one))


def bits(arrays):
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def losses(step, state, count=2):
    batch, found = step.place(batch_of(step)), []
    for _ in range(count):
        state, metrics = step(state, batch)
        found.append([float(metrics[k]) for k in ("loss", "grad_norm", "learning_rate")])
    return np.array(found)


def trained(step):
    state = step.init()
    for _ in range(2):
        state, _ = step(state, step.place(batch_of(step)))
    return state


MOVES = {
    "groups": (
        {"model": LAYOUTS["groups"]["model"], "mesh": "fsdp:2,tensor:4", "zero": 3},
        {"mesh": "data:2"},
    ),
    "groups of statistics": ({"model": stacked((2, 1)), "mesh": "data:2"}, {"model": stacked()}),
    "groups, factored": (
        {"model": stacked((2, 1)), "mesh": "fsdp:2", "zero": 2, "optimizer": Optimizer(custom=unclipped)},
        {"model": stacked(), "optimizer": Optimizer(custom=unclipped)},
    ),
    "decoder": ({"mesh": "data:2"}, {"mesh": "fsdp:2,tensor:4", "zero": 3}),
    "foreign": ({"model": foreign(), "mesh": "fsdp:4", "zero": 3}, {"model": foreign(), "mesh": "data:2"}),
    "factored": (
        {"model": foreign(), "mesh": "fsdp:4", "zero": 2, "optimizer": Optimizer(custom=factored)},
        {"model": foreign(), "mesh": "1", "optimizer": Optimizer(custom=factored)},
    ),
    "arrays without elements": (
        {"model": stacked(), "mesh": "data:2", "optimizer": Optimizer(name="galore", rank=2)},
        {"model": stacked(), "optimizer": Optimizer(name="galore", rank=2)},
    ),
}


@pytest.mark.parametrize(
    "name",
    variants(
        [pytest.param(name, marks=pytest.mark.slow) if name in ("groups", "factored") else name for name in MOVES],
        default=["groups, factored", "decoder", "arrays without elements"],
    ),
)
def test_a_state_moves_between_layouts_bit_by_bit_and_training_goes_on(name):
    one, other = (make(**fields) for fields in MOVES[name])
    state = trained(one)
    saved = one.to_canonical(state)
    if name == "arrays without elements":
        assert not all(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    assert all(array.size for array in saved.values()), "checkpoints take no array without elements"
    kept = bits(saved)
    placed = {n: jax.device_put(np.array(a), other.canonical_abstract()[n].sharding) for n, a in saved.items()}
    moved = other.from_canonical(placed)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), moved) == jax.tree.map(
        lambda a: (a.shape, a.dtype), other.layout.abstract
    )
    for leaf, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(other.layout.state_shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    again = other.to_canonical(moved)
    assert bits(again) == kept
    back = one.from_canonical(
        {n: jax.device_put(np.array(a), one.canonical_abstract()[n].sharding) for n, a in again.items()}
    )
    assert bits(one.to_canonical(back)) == kept
    here, there = losses(one, back), losses(other, moved)
    np.testing.assert_allclose(there, here, rtol=1e-5)
    np.testing.assert_array_equal(losses(one, state), here)
    assert bits(saved) == kept, "a saved array shares memory with a state that was given away"


@pytest.mark.parametrize("fields", [{"mesh": "data:2"}, {"mesh": "fsdp:2,tensor:4", "zero": 3}, {"mesh": "tensor:4"}])
def test_the_copy_takes_the_bytes_that_were_told(fields):
    step = make(**fields)
    compiled = step._canonical.take_apart.lower(step.layout.abstract).compile().memory_analysis()
    addresses = 8 * len(step.canonical_abstract())
    assert step.canonical_copy_bytes == compiled.output_size_in_bytes - addresses
    assert compiled.alias_size_in_bytes == 0, "the state stays"


def test_padding_of_the_vocabulary_comes_back_as_zeros():
    step = make(mesh="tensor:4", optimizer=Optimizer(name="sgd", weight_decay=0.0))
    arrays = {n: jnp.ones(a.shape, a.dtype) for n, a in step.canonical_abstract().items()}
    state = step.from_canonical(arrays)
    tables = [p for p in jax.tree.leaves(state.params) if 16 in p.shape]
    assert len(tables) == 2
    for table in tables:
        assert float(table.sum()) == VOCAB * 8


def test_what_is_joined_is_freed_and_generators_come_back():
    step = make(model=foreign())
    state = step.init()
    before = jax.tree.map(
        lambda leaf: np.array(jax.random.key_data(leaf)) if is_key(leaf) else np.array(leaf), state.rest
    )
    arrays = step.to_canonical(state)
    keys = [n for n, a in arrays.items() if n.startswith("rest/") and a.dtype == jnp.uint32 and a.shape == (2,)]
    assert keys
    after = step.from_canonical(arrays)
    assert all(arrays[n].is_deleted() for n in keys)
    for old, leaf in zip(jax.tree.leaves(before), jax.tree.leaves(after.rest), strict=True):
        np.testing.assert_array_equal(old, jax.random.key_data(leaf) if is_key(leaf) else leaf)
    assert [is_key(leaf) for leaf in jax.tree.leaves(after.rest)] == [
        is_key(leaf) for leaf in jax.tree.leaves(state.rest)
    ]

    stacked = make()
    arrays = stacked.to_canonical(stacked.init())
    stacked.from_canonical(arrays)
    assert {n for n, a in arrays.items() if a.is_deleted()} == {n for n in arrays if "/layers/" in n}


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("params/layers/w", "params/layers/7/w"),
        ("params/layers/layers/w", "params/layers/layers/7/w"),
        ("params/blocks", "params/blocks/7"),
        ("params/players/w", "params/players/w/7"),
        ("params/layers_from_5/w", "params/layers/12/w"),
    ],
)
def test_names_of_layers(name, expected):
    assert layer_name(name, 7) == expected
