"""What stacks whose blocks repeat in cycles keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.layers.layer_group import LayerGroup
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Stack
from jaxscale.memory.apply import treatment_for
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.programs.collect import collect

X = jax.random.normal(jax.random.key(9), (2, 3, 4))


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.mlp = MLP(4, 8, rngs=rngs)

    def __call__(self, x, *, context=Context(), scale=1.0):
        return x + scale * self.mlp(x, context=context)


def _loss_and_params(layers):
    """Return the loss of a stack in cycles of two unlike blocks, as a function of its parameters, and these."""
    graphdef, params = nnx.split(Stack(Scaled, layers, rngs=nnx.Rngs(0)), nnx.Param)
    cycle = ({"scale": 1.0}, {"scale": 0.5})

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params, copy=True)(X, cycle=cycle) ** 2)

    return loss, nnx.to_pure_dict(params)


@pytest.mark.parametrize("wrapper", [blocks.identity, lambda block, rolled: jax.checkpoint(block)])
def test_a_cycle_keeps_no_copies_of_weights_for_the_backward_pass(wrapper):
    loss, params = _loss_and_params(layers=6)
    with blocks.wrapping(wrapper):
        kept_shapes = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(loss, params)[1])]
    weight_shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(params)}
    assert {shape for shape in kept_shapes if shape[1:] in weight_shapes} == set()
    weight_count = sum(leaf.shape == (6, 4, 8) for leaf in jax.tree.leaves(params))
    assert kept_shapes.count((3, 2, 4, 8)) == weight_count > 0  # the weights themselves


def test_a_save_set_for_a_cycle_is_for_its_blocks():
    loss, params = _loss_and_params(layers=4)
    treatment = treatment_for(decide(MemoryPlan.parse("save:1KiB"), collect(loss, params)))
    expected = jax.grad(loss)(params)
    with blocks.treating(treatment):
        gradient = jax.grad(lambda params: loss(params))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradient, expected)


def _kept_count(block, layers, cycle, has_padding=False):
    """Return the number of elements that a stack of equal blocks, which share `x`, keeps for the backward pass."""
    params = {"w": jnp.ones((layers, 4, 4))}
    inputs = (params, {}, jnp.arange(layers), {})

    def loss(params):
        group = LayerGroup([block] * cycle, blocks.identity, 1, None, has_padding)
        return jnp.sum(group.scan_layers(X, (params, *inputs[1:]), layers)[0])

    return sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(loss, params)[1]))


def _squared(params, state, x, index, layer_arguments):
    return jnp.square(x @ params["w"]), (state, None)


def test_a_cycle_with_padding_keeps_its_weights_once():
    assert _kept_count(_squared, 6, 3, has_padding=True) <= _kept_count(_squared, 6, 1, has_padding=True)


def test_a_block_of_a_cycle_keeps_its_own_checkpoint():
    def wide(params, state, x, index, layer_arguments):
        spread = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x[..., None] * jnp.ones((1, 1, 1, 50))), -1))
        return spread(x @ params["w"]), (state, None)

    one_by_one, in_pairs = (_kept_count(wide, 6, cycle) for cycle in (1, 2))
    assert in_pairs <= one_by_one + 6 * 16  # and a copy of the weights


def test_a_block_of_a_cycle_keeps_its_own_slices():
    def slicing(params, state, x, index, layer_arguments):
        spread = jnp.sin((x @ params["w"])[..., None] * jnp.ones((1, 1, 1, 50)))
        part = jax.lax.dynamic_slice_in_dim(spread, 0, 1, axis=-1)[..., 0]
        return x + part * part, (state, None)

    one_by_one, in_pairs = (_kept_count(slicing, 6, cycle) for cycle in (1, 2))
    assert in_pairs <= one_by_one + 6 * 16
