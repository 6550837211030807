"""Both halves of a backward do what the whole did, and no product runs twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.run.split import divide
from jaxscale.programs.flop import count_flop

D, F, ROWS, LAYERS = 8, 16, 4, 3


def layer(weights, x):
    gain, up, down = weights
    normed = gain[None] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normed @ up) @ down


def unrolled(weights, x):
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], weights), x)
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda x, one: (layer(one, x), None), x, weights)[0]


def checkpointed(weights, x):
    body = jax.checkpoint(layer, prevent_cse=False)
    return jax.lax.scan(lambda x, one: (body(one, x), None), x, weights)[0]


def barred(weights, x):
    block = jax.checkpoint(lambda one, x: layer(one, x))
    for i in range(LAYERS):
        x = block(jax.tree.map(lambda leaf, i=i: leaf[i], weights), x)
    return x


def padded(weights, x):
    """The first two layers alone are there."""

    def one(x, given):
        i, own = given
        return jax.lax.cond(i < 2, layer, lambda own, x: x, own, x), None

    return jax.lax.scan(one, x, (jnp.arange(LAYERS), weights))[0]


def tied(weights, x):
    """One layer's weights in all of them: its gradients add up in the loop."""
    own = jax.tree.map(lambda leaf: leaf[0], weights)
    return jax.lax.scan(lambda x, _: (layer(own, x), None), x, None, length=LAYERS)[0]


STAGES = {stage.__name__: stage for stage in (unrolled, scanned, checkpointed, barred, padded, tied)}


def arguments(seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(LAYERS, D), (LAYERS, D, F), (LAYERS, F, D), (ROWS, D), (ROWS, D)]
    gain, up, down, x, g = (jax.random.normal(key, shape) / 3 for key, shape in zip(keys, shapes, strict=True))
    return (1 + gain, up, down), x, g


def whole(stage):
    def backward(weights, x, g):
        gradients, input_gradient = jax.vjp(stage, weights, x)[1](g)
        return input_gradient, gradients

    return backward


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_both_halves_give_what_the_whole_gives(stage):
    weights, x, g = arguments()
    halves = divide(whole(stage), weights, x, g, is_kept=(True, True, False))

    @jax.jit
    def both(weights, x, g):
        first, cut = halves.run_first(weights, x, g)
        return first, halves.run_second(cut, weights, x, jnp.zeros_like(g))

    for ours, theirs in zip(
        jax.tree.leaves(both(weights, x, g)), jax.tree.leaves(jax.jit(whole(stage))(weights, x, g)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_no_product_runs_twice(stage):
    weights, x, g = arguments()
    halves = divide(whole(stage), weights, x, g, is_kept=(True, True, False))
    cut = jax.eval_shape(halves.run_first, weights, x, g)[1]
    first, second = count_flop(halves.run_first, weights, x, g), count_flop(halves.run_second, cut, weights, x, g)
    assert first.total + second.total == count_flop(whole(stage), weights, x, g).total
    # each layer's weight gradients: two products of 2 ROWS D F
    assert second.total == LAYERS * 2 * 2 * ROWS * D * F


@pytest.mark.parametrize("stage", [checkpointed, barred], ids=lambda stage: stage.__name__)
def test_a_checkpoint_stays_one_in_both_halves(stage):
    """So that the compiler does not merge what is computed again, and who reads the program sees what is."""
    weights, x, g = arguments()
    halves = divide(whole(stage), weights, x, g, is_kept=(True, True, False))
    cut = jax.eval_shape(halves.run_first, weights, x, g)[1]
    for program in (
        jax.make_jaxpr(halves.run_first)(weights, x, g),
        jax.make_jaxpr(halves.run_second)(cut, weights, x, g),
    ):
        found = [eqn for eqn in equations(program) if eqn.primitive.name in ("checkpoint", "remat", "remat2")]
        assert len(found) == (1 if stage is checkpointed else LAYERS)
        assert all(eqn.params["differentiated"] for eqn in found)
        assert {eqn.params["prevent_cse"] for eqn in found} == {stage is barred}


def equations(program):
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield eqn
        for inner in (eqn.params.get("jaxpr"), *eqn.params.get("branches", ())):
            if inner is not None:
                yield from equations(inner)


def test_sums_are_made_where_their_terms_are():
    """The gradient of a gain or a bias crosses, D numbers, in place of the ROWS D that it is a sum of."""

    def stage(weights, x):
        return (weights[0][None] * x + weights[1][None]) @ weights[2]

    weights = jnp.ones(D), jnp.ones(D), jnp.ones((D, F))
    x, g = jnp.ones((64, D)), jnp.ones((64, F))
    halves = divide(whole(stage), weights, x, g)
    assert sorted(one.shape for one in halves.crossing_shapes) == [(D,), (D,)]


def test_transformer_blocks_in_a_scan():
    """With stored residuals, as the executor has them: the second half reads a part of them, and the cut is small."""
    config = Decoder(vocab=8, context=8, layers=2, embed=16, heads=2, norm="layer", mlp_kind="gelu", dropout=0.1)
    graphdef, state = nnx.split(config.build(nnx.Rngs(0)).blocks)
    weights = nnx.to_pure_dict(state)
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 8, 16))

    def stage(weights, x):
        return nnx.merge(graphdef, weights, copy=True)(x, context=Context(key=jax.random.key(1)))

    stored, tree = jax.tree.flatten(jax.jit(lambda weights, x: jax.vjp(stage, weights, x)[1])(weights, x))

    def backward(stored, g):
        gradients, input_gradient = jax.tree.unflatten(tree, stored)(g)
        return input_gradient, gradients

    halves = divide(backward, stored, g, is_kept=(True, False))

    def both(stored, g):
        first, cut = halves.run_first(stored, g)
        return first, halves.run_second(cut, stored, g)

    cut = jax.eval_shape(halves.run_first, stored, g)[1]
    first, second = count_flop(halves.run_first, stored, g), count_flop(halves.run_second, cut, stored, g)
    assert first.total + second.total == count_flop(backward, stored, g).total
    # the weight gradients of a block: 12 products of B T D^2
    assert second.total == 2 * 12 * 2 * x.size * 16
    # a layer: the gradients of queries, keys, values, of what attention adds, of the hidden width (4) and of the output
    assert halves.crossing_bytes <= 2 * 9 * x.nbytes + 8 * 16 * 4
    read = sum(leaf.nbytes for leaf, reads in zip(stored, halves.is_read_by_second, strict=False) if reads)
    # a layer: the inputs of queries, keys and values, of the output projection, of both products of the mlp
    assert read <= 2 * (1 + 1 + 1 + 4) * x.nbytes
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(both)(stored, g)), jax.tree.leaves(jax.jit(backward)(stored, g)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * max(1.0, float(jnp.abs(theirs).max())))
