"""The k largest elements of each block, and their indices in the block: the definition.

Elements are compared by magnitude; NaN is as large as infinity. Of equal magnitudes, even of zeros, the first in the
block is taken first. Left out: values in fewer bits, thresholds instead of a fixed k.
"""

import jax.numpy as jnp
from jax import Array, lax

FLOP = 7
"""FLOP per element of a block, for each of the k results."""


def magnitude(x: Array) -> Array:
    """The numbers by which elements (float32) are compared: |x|, and infinity for NaN."""
    return jnp.where(x == x, jnp.abs(x), jnp.inf)


def top_k(x: Array, k: int, *, block: int, axis: int) -> tuple[Array, Array]:
    """Select the k largest elements of each block.

    Args:
        x: the matrix (R, C), of any floating dtype.
        k: number of elements to select from each block.
        block: number of elements of a block.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).

    Returns:
        The values in the dtype of `x`, and their indices in the block, int32. Both have the shape of `x`, except that
        along the dim `axis` each block is replaced by k elements, the largest first.
    """
    block_shape, result_shape = list(x.shape), list(x.shape)
    block_shape[axis : axis + 1 or None] = [x.shape[axis] // block, block]
    result_shape[axis] = x.shape[axis] // block * k
    blocks = jnp.moveaxis(x.reshape(block_shape), axis, -1)
    _, indices = lax.top_k(magnitude(blocks.astype(jnp.float32)), k)
    values = jnp.take_along_axis(blocks, indices, -1)
    values, indices = (jnp.moveaxis(array, -1, axis).reshape(result_shape) for array in (values, indices))
    return values, indices
