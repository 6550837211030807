"""The k largest numbers of each block, and where they lie: the definition.

Largest is by magnitude; a NaN is as large as an infinity. Among equal ones the first of the block wins, also where all
are zeros. Left out: values in fewer bits, thresholds instead of counts.
"""

import jax.numpy as jnp
from jax import Array, lax

FLOP = 7
"""Of a number, for each that is kept of its block."""


def magnitude(f: Array) -> Array:
    """What numbers are compared by, float32."""
    return jnp.where(f == f, jnp.abs(f), jnp.inf)


def top_k(x: Array, k: int, *, block: int, axis: int) -> tuple[Array, Array]:
    """Values and places.

    Args:
        x: (R, C), any floating dtype.
        k: kept of each block.
        block: numbers of a block.
        axis: -2, blocks down the columns, or -1, along the rows.

    Returns:
        Both with k numbers in the place of each block, the largest first: values in x's dtype, and their places in the
        block, int32.
    """
    split, shape = list(x.shape), list(x.shape)
    split[axis : axis + 1 or None] = [x.shape[axis] // block, block]
    shape[axis] = x.shape[axis] // block * k
    parts = jnp.moveaxis(x.reshape(split), axis, -1)
    _, places = lax.top_k(magnitude(parts.astype(jnp.float32)), k)
    values = jnp.take_along_axis(parts, places, -1)
    values, places = (jnp.moveaxis(one, -1, axis).reshape(shape) for one in (values, places))
    return values, places
