"""A recipe: the gradient of a scanned stack under a save set, to be compiled for a machine that is not here."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Context, Treatment
from jaxscale.memory.keep_named import keeping
from jaxscale.models.decoder import Decoder
from jaxscale.programs.collect import collect

LAYERS, EMBED, LENGTH, ROWS = 8, 1024, 1024, 8


def stack():
    """Structure, abstract parameters and input of a decoder's layers in bfloat16."""
    config = Decoder(vocab=32, context=LENGTH, layers=LAYERS, embed=EMBED, heads=8, kv_heads=8, mlp=3 * EMBED)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)).blocks))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), nnx.to_pure_dict(state))
    return graphdef, params, jax.ShapeDtypeStruct((ROWS, LENGTH, EMBED), jnp.bfloat16)


def loss(graphdef, params, x):
    """A scalar of what comes out."""
    made = nnx.merge(graphdef, params, copy=True)(x, context=Context(attention="plain"))
    return jnp.sum(jnp.square(made.astype(jnp.float32)))


def graph():
    """Of the block."""
    graphdef, params, x = stack()
    [call] = collect(lambda params, x: loss(graphdef, params, x), params, x)
    return call.graph


def gradient(devices, save):
    """The gradient by parameters and input, the blocks under a save set."""
    graphdef, params, x = stack()
    whole = NamedSharding(Mesh(devices[:1], ("one",)), PartitionSpec())
    params, x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (params, x))

    def of(params, x):
        with blocks.treating(Treatment(keeping([save]))):
            return loss(graphdef, params, x)

    return jax.jit(jax.grad(of, argnums=(0, 1))).lower(params, x)
