"""The gradients of a convolution as products of patches, the values that a kernel covers at each output position.

This is im2col (Chellapilla et al. 2006):

    y = patches(x) w,    dw = patches(x)^T dy,    dx = the sum over all positions of dy w^T, where the patches lie.

For `dw`, the patches of a few images at a time are made and stay in the cache. They are made transposed, so that a
kernel position copies whole rows of an image, and are summed per shard of the batch, so that shards are summed once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.layers.shards import batch_shard_count
from jaxscale.sharding.place import constrain
from jaxscale.typing import Array, Float

POSITIONS_PER_CHUNK = 512
"""Output positions whose patches are made at once for `dw`, at least one image: 512 `h w C` floats, 1.2 MB for 3 x 3
kernels of 64 channels. For the stages of a ResNet-18 on images of 32 x 32, other sizes from 256 to 2,048 are less than
3 % faster."""


def _span(count: int, stride: int) -> int:
    """Return the number of rows from the first to the last of `count` rows at a distance of `stride`."""
    return (count - 1) * stride + 1


def _transposed_patches(
    images: Float[Array, "D N I J C"], window: Sequence[int], strides: Sequence[int], pads: Any, output: Sequence[int]
) -> Float[Array, "D K M"]:
    """Return the patches of images as columns, (shards, h w C, positions); positions are ordered (row, image, column).

    Args:
        images: images of each shard.
        window, strides: height and width of the kernel, and the steps between output positions.
        pads: (low, high) for rows and columns.
        output: rows and columns of the output.
    """
    shards, image_count, channels = images.shape[0], images.shape[1], images.shape[4]
    zero = jnp.zeros((), images.dtype)
    rows_span, columns_span = (_span(count, stride) for count, stride in zip(output, strides, strict=True))
    channels_first = images.transpose(0, 4, 2, 1, 3)
    padded = jax.lax.pad(channels_first, zero, ((0, 0, 0), (0, 0, 0), (*pads[0], 0), (0, 0, 0), (*pads[1], 0)))
    shifted = jnp.stack(
        [
            jax.lax.slice_in_dim(padded, column, column + columns_span, strides[1], axis=4)
            for column in range(window[1])
        ],
        axis=1,
    )
    # without the barrier, XLA:CPU would pad and shift again for each row of the kernel
    shifted = jax.lax.optimization_barrier(shifted)
    patches = jnp.stack(
        [jax.lax.slice_in_dim(shifted, row, row + rows_span, strides[0], axis=3) for row in range(window[0])], axis=1
    )
    return patches.reshape(shards, window[0] * window[1] * channels, output[0] * image_count * output[1])


def kernel_gradient(
    x: Float[Array, "B I J C"], dy: Float[Array, "B P Q O"], window: Sequence[int], strides: Sequence[int], pads: Any
) -> Float[Array, "h w C O"]:
    """Return the gradient of the kernel of a convolution, in the type of `x`.

    Args:
        x: images.
        dy: gradient of the output.
        window: height and width of the kernel.
        strides: steps between output positions, for rows and columns.
        pads: (low, high) for rows and columns.
    """
    shards = batch_shard_count(x.shape)
    local_count, output, out_channels = x.shape[0] // shards, dy.shape[1:3], dy.shape[3]
    chunk_size = min(local_count, max(1, POSITIONS_PER_CHUNK // (output[0] * output[1])))
    chunk_count, rest = divmod(local_count, chunk_size)
    x_shards, dy_shards = (array.reshape(shards, local_count, *array.shape[1:]) for array in (x, dy))

    def add_images(sums: Any, start: Any, count: int) -> Any:
        """Add the products of `count` images of each shard."""
        images, image_gradients = (
            jax.lax.dynamic_slice_in_dim(array, start, count, axis=1) for array in (x_shards, dy_shards)
        )
        patches = _transposed_patches(images, window, strides, pads, output)
        gradient_rows = image_gradients.transpose(0, 2, 1, 3, 4).reshape(shards, -1, out_channels)
        # a sum per shard: the shards are summed after the loop
        return constrain(sums + jnp.einsum("dkm,dmo->dko", patches, gradient_rows), "batch", None, "channels")

    zeros = jnp.zeros((shards, window[0] * window[1] * x.shape[3], out_channels), x.dtype)
    sums = jax.lax.fori_loop(
        0,
        chunk_count,
        lambda index, sums: add_images(sums, index * chunk_size, chunk_size),
        constrain(zeros, "batch", None, "channels"),
    )
    if rest:
        sums = add_images(sums, chunk_count * chunk_size, rest)
    return sums.sum(0).reshape(*window, x.shape[3], out_channels)


def input_gradient(
    dy: Float[Array, "B P Q O"], w: Float[Array, "h w C O"], size: Sequence[int], strides: Sequence[int], pads: Any
) -> Float[Array, "B I J C"]:
    """Return the gradient of the input of a convolution, in the type of `dy`.

    Args:
        dy: gradient of the output.
        w: kernel.
        size: height and width of the input.
        strides: steps between output positions, for rows and columns.
        pads: (low, high) for rows and columns.
    """
    zero, channels = jnp.zeros((), dy.dtype), w.shape[2]
    patches = jnp.einsum("bpqo,ko->bpqk", dy, w.reshape(-1, w.shape[3]))
    total = None
    for row in range(w.shape[0]):
        for column in range(w.shape[1]):
            start = (row * w.shape[1] + column) * channels
            patch_values = jax.lax.slice_in_dim(patches, start, start + channels, axis=3)
            offsets = (row - pads[0][0], column - pads[1][0])
            # the low padding is negative if the position of the kernel starts in the padding of the image
            high_pads = [size[dim] - offsets[dim] - _span(dy.shape[1 + dim], strides[dim]) for dim in range(2)]
            dims = [(offsets[dim], high_pads[dim], strides[dim] - 1) for dim in range(2)]
            placed = jax.lax.pad(patch_values, zero, ((0, 0, 0), *dims, (0, 0, 0)))
            total = placed if total is None else total + placed
    assert total is not None
    return total
