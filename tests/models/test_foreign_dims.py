"""Stacks, rows and columns of the parameters of Flax's layers, and what rules for matrices make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxscale
from jaxscale.errors import UserError
from jaxscale.model_traits import TensorDims
from jaxscale.models.foreign import ForeignModel, classification, linen_model
from jaxscale.optim.leaves import leaf_of
from jaxscale.state.pure_model import PureModel
from tests.plans import plan_of

DEPTH, WIDTH = 3, 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return x + self.gain[None, None] * self.attention(self.norm(x))


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_blocks(rngs):
            return Block(rngs)

        self.blocks = make_blocks(rngs)
        self.convolution = nnx.Conv(3, WIDTH, (3,), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.table = nnx.Param(jnp.ones((3, 4)))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.head(run(self.convolution(x), self.blocks).mean(1))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(WIDTH)(linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x))), None


class LinenStacked(linen.Module):
    @linen.compact
    def __call__(self, x):
        scan = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
        x, _ = scan()(x, None)
        return linen.DenseGeneral((2, 2))(linen.Conv(WIDTH, (3,))(x).mean(1))


def unreached(module, batch):
    """Scores 0, whatever the parameters: weight decay alone changes these."""
    return 0 * module(batch["x"]).sum(-1)


BATCH = {"x": np.ones((4, 5, 3), np.float32)}


def test_layers_of_flax_have_stacks_rows_and_columns():
    dims = PureModel.of(ForeignModel(Stacked, classification()), 0).tensor_dims
    assert dims["blocks/attention/query/kernel"] == TensorDims(1, 1)
    assert dims["blocks/attention/query/bias"] == TensorDims(1, 0)
    assert dims["blocks/attention/out/kernel"] == TensorDims(1, 2)
    assert dims["blocks/norm/scale"] == TensorDims(1, 0)
    assert dims["blocks/gain"] == TensorDims(1, None)  # of the user's own class, beside layers that are stacked once
    assert dims["convolution/kernel"] == TensorDims(0, 2)
    assert dims["table"] == TensorDims(0, None)


def test_kernels_and_biases_of_linen_have_stacks_rows_and_columns():
    abstract_input = jax.ShapeDtypeStruct((2, 5, WIDTH), "float32")
    dims = PureModel.of(linen_model(LinenStacked(), abstract_input, score=classification()), 0).tensor_dims
    stack = "ScanLinenBlock_0"
    assert dims[f"{stack}/Dense_0/kernel"] == TensorDims(1, 1)
    assert dims[f"{stack}/Dense_0/bias"] == dims[f"{stack}/LayerNorm_0/scale"] == TensorDims(1, 0)
    assert dims[f"{stack}/MultiHeadDotProductAttention_0/query/kernel"] == TensorDims(1, 1)
    assert dims[f"{stack}/MultiHeadDotProductAttention_0/out/kernel"] == TensorDims(1, 2)
    assert dims["DenseGeneral_0/kernel"] == TensorDims(0, 1)
    assert dims["DenseGeneral_0/bias"] == TensorDims(0, 0)


def test_projections_of_heads_are_matrices_of_inputs_and_outputs():
    query = leaf_of("blocks/query/kernel", None, (DEPTH, WIDTH, 2, 4), dims=TensorDims(1, 1))
    out = leaf_of("blocks/out/kernel", None, (DEPTH, 2, 4, WIDTH), dims=TensorDims(1, 2))
    assert (query.kind, query.tensors, query.rows, query.columns) == ("matrix", DEPTH, WIDTH, 8)
    assert (out.kind, out.tensors, out.rows, out.columns) == ("matrix", DEPTH, 8, WIDTH)


def test_stacked_vectors_do_not_decay_and_muon_takes_a_layer_at_a_time():
    model = ForeignModel(Stacked, unreached)
    optimizer = jaxscale.Optimizer("muon", learning_rate=0.5, warmup=0, schedule="constant", weight_decay=0.2)
    step = jaxscale.build(
        jaxscale.Experiment("decay", model, data=None, steps=4, batch=4, optimizer=optimizer), plan_of(mesh="1")
    )
    assert "parameters: 6 matrices (4 stacks of layers), 1 table, 9 vectors (7 stacks of layers)" in step.describe()
    state = step.init()
    before = jax.tree.map(np.asarray, state.params)
    state, _ = step(state, step.place(BATCH))
    after = jax.tree.map(np.asarray, state.params)
    for path in (("attention", "query", "bias"), ("attention", "out", "bias"), ("norm", "scale"), ("gain",)):
        old, new = before["blocks"], after["blocks"]
        for word in path:
            old, new = old[word], new[word]
        np.testing.assert_array_equal(new, old)
    kernel, decayed = before["blocks"]["attention"]["query"]["kernel"], after["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(decayed, kernel * (1 - 0.5 * 0.2), rtol=1e-6)


def test_arrays_of_unequal_rows_are_refused_where_a_loop_places_them():
    step = jaxscale.build(jaxscale.Experiment("rows", ForeignModel(Stacked, unreached), data=None, steps=1, batch=4))
    with pytest.raises(UserError, match=r"numbers of rows \{'x': 4, 'class_weights': 10\}.*a part of the score"):
        step.place({**BATCH, "class_weights": np.ones(10, np.float32)})
    with pytest.raises(UserError, match="temperature is a single number"):
        step.place({**BATCH, "temperature": np.float32(1)})
