"""Recipes: programs of chains and stacks that another process makes, to be compiled for a machine that is not here."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Call, Treatment
from jaxscale.memory.apply import chain_treatment

CHAIN_WIDTH, CHAIN_ROWS = 256, 1024
WIDTH, ROWS, DEPTH = 1024, 65536, 32


def _abstract(devices, *shape):
    whole = NamedSharding(Mesh(devices[:1], ("one",)), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)


def _block(weight, x):
    """Its backward pass reads its result, so a second run leaves nothing out: FLOP count runs."""
    return jnp.tanh(x @ weight), None


def chain_gradient(devices, nodes):
    """The gradient of a chain of as many blocks as the plan has, unrolled."""
    count = 1 + max(_stages(nodes))

    def loss(weights, x):
        with blocks.treating(chain_treatment(nodes)):
            x, _ = blocks.run([Call(_block, (weight,)) for weight in weights], x)
        return jnp.sum(x.astype(jnp.float32))

    weights = [_abstract(devices, CHAIN_WIDTH, CHAIN_WIDTH)] * count
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, _abstract(devices, CHAIN_ROWS, CHAIN_WIDTH))


def _stages(nodes):
    for node in nodes:
        yield from (node.stage,) if hasattr(node, "stage") else _stages(node.nodes)


def segments_gradient(devices, layers, segment):
    """The gradient of a scanned stack, each block of which keeps its input, in segments."""
    from flax import nnx

    from jaxscale.layers.linear import Linear
    from jaxscale.layers.stack import Stack

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = (Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x, *, context=None):
            return x + self.down(jnp.tanh(self.up(x)))

    def remat(block, rolled):
        return blocks.run_again(block, rolled=rolled)

    module = nnx.eval_shape(lambda: Stack(Block, layers, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(module)
    treatment = Treatment(remat, segment=segment)

    def loss(params, x):
        with blocks.treating(treatment):
            y = nnx.merge(graphdef, params, copy=True)(x)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    params = jax.tree.map(lambda leaf: _abstract(devices, *leaf.shape), nnx.to_pure_dict(params))
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, _abstract(devices, ROWS, WIDTH))
