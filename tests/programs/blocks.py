"""Blocks to price, small enough to compile: a decoder's, and one with chunked attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.models.decoder import Decoder
from jaxscale.models.decoder_module import Block


def decoder_block(embed=32, mlp=96, batch=2, length=64, dtype=jnp.float32, attention="plain"):
    """(function, parameters, x): a Llama block and what it is called with, as shapes."""
    config = Decoder(vocab=32, context=length, layers=1, embed=embed, heads=4, kv_heads=2, mlp=mlp)
    module = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0)))
    graphdef, state = nnx.split(module)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), nnx.to_pure_dict(state))

    def block(params, x):
        return nnx.merge(graphdef, params, copy=True)(x, context=Context(attention=attention))

    return block, params, jax.ShapeDtypeStruct((batch, length, embed), dtype)


def drawn(shapes, seed=0):
    """Normal numbers of these shapes."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, leaves, strict=True)])


def loss_of(block, key=0):
    """Gradient of a scalar of the block's result, by everything it is given."""

    def loss(params, x):
        made = block(params, x)
        return jnp.sum(jnp.square(made.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))
