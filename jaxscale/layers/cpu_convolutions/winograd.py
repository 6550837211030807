"""Convolutions with 3 x 3 kernels and stride 1 by minimal filtering, F(2 x 2, 3 x 3), and their gradients.

A tile of 2 x 2 outputs depends on a tile d of 4 x 4 inputs. With the kernel g,

    y = A^T (U * V) A,    U = G g G^T,    V = B^T d B,

where `*` is the product of entries or, with channels, 16 products of matrices, (tiles, C) by (C, O). For an even size
they have 16 / 36 of the FLOP of the sum; the transforms are sums of entries. The gradient of the kernel is
G^T (V * (A dy A^T)) G, summed over all tiles. That of the input is the same convolution of `dy` with the flipped
kernel, whose U is that of the kernel in another order. The tiles of a few images at a time are made, so that they stay
in the cache.

References:
    Winograd: Arithmetic Complexity of Computations, 1980. Lavin, Gray: Fast Algorithms for Convolutional Neural
    Networks, 2016 (arXiv 1509.09308).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.layers.shards import batch_shard_count
from jaxscale.sharding.place import constrain
from jaxscale.typing import Array, Float

TILES_PER_CHUNK = 512
"""The most tiles that are made at once, but at least the tiles of one image. For the stages of a ResNet-18 on images of
32 x 32, 256 and 1,024 take as long, and 2,048 up to twice as long."""
_FLIPPED = (3, 1, 2, 0)
"""Index into U, along one dim, of each entry of the U of the flipped kernel."""

_Columns = list[Array]
"""The 4 columns of entries of tiles, each (4 rows, D, tiles, channels), or of transformed kernels, each (4, C, O)."""


def convolve(x: Float[Array, "B I J C"], w: Float[Array, "3 3 C O"], pads: Any) -> Float[Array, "B P Q O"]:
    """Return the cross-correlation of `x` with `w`, in their type.

    Args:
        x: images.
        w: kernel.
        pads: (low, high) for rows and columns.

    Example:
        >>> convolve(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)), ((1, 1), (1, 1)))[0, :, :, 0].tolist()
        [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    kernels = _of_both_dims(w)
    return _filtered(x, pads, lambda column, tiles: jnp.einsum("rdmc,rco->rdmo", tiles, kernels[column]))


def input_gradient(
    dy: Float[Array, "B P Q O"], w: Float[Array, "3 3 C O"], size: tuple[int, int], pads: Any
) -> Float[Array, "B I J C"]:
    """Return the gradient of the images of `convolve`, which have the given height and width."""
    kernels = _of_both_dims(w)
    dy_pads = [(2 - pads[dim][0], size[dim] + pads[dim][0] - dy.shape[1 + dim]) for dim in range(2)]

    def product(column: int, tiles: Array) -> Array:
        return jnp.einsum("rdmo,rco->rdmc", tiles, kernels[_FLIPPED[column]][jnp.array(_FLIPPED)])

    return _filtered(dy, dy_pads, product)


def kernel_gradient(x: Float[Array, "B I J C"], dy: Float[Array, "B P Q O"], pads: Any) -> Float[Array, "3 3 C O"]:
    """Return the gradient of the kernel of `convolve`."""
    output = dy.shape[1:3]

    def sum_tiles(images: Array, image_gradients: Array) -> _Columns:
        """Return the sums over the tiles of some images, a column of entries each, (4, D, C, O)."""
        return [
            # a sum per shard: the shards are summed after the loop
            constrain(jnp.einsum("rdmc,rdmo->rdco", *pair), None, "batch", None, "channels")
            for pair in zip(_image_columns(images, pads, output), _gradient_columns(image_gradients), strict=True)
        ]

    chunks, rest = _chunks((x, dy), output)
    zeros = jnp.zeros((4, chunks[0].shape[1], x.shape[3], dy.shape[3]), x.dtype)
    sums = [constrain(zeros, None, "batch", None, "channels")] * 4
    if chunks[0].shape[0] == 1:
        sums = sum_tiles(*(array[0] for array in chunks))
    else:
        sums, _ = jax.lax.scan(lambda sums, chunk: (jax.tree.map(jnp.add, sums, sum_tiles(*chunk)), None), sums, chunks)
    if rest[0].shape[1] > 0:
        sums = jax.tree.map(jnp.add, sums, sum_tiles(*rest))
    columns = [_to_kernel(*entries.sum(1)) for entries in sums]
    return jnp.stack([jnp.stack(_to_kernel(*row)) for row in zip(*columns, strict=True)])


def _filtered(x: Float[Array, "B I J C"], pads: Any, product: Callable[[int, Array], Array]) -> Array:
    """Return the outputs of all tiles of `x`; `product(column, tiles)` multiplies by a column of U."""
    output = tuple(x.shape[1 + dim] + sum(pads[dim]) - 2 for dim in range(2))

    def filter_images(images: Array) -> Array:
        """Return the outputs (D, N, P, Q, O) of some images."""
        tiles = _image_columns(images, pads, output)
        shape = (*images.shape[:2], *_tile_counts(output), -1)
        products = [product(column, entries) for column, entries in enumerate(tiles)]
        columns = [_to_output(*(entry.reshape(shape) for entry in entries)) for entries in products]
        rows = [jnp.stack(_to_output(*row), axis=4) for row in zip(*columns, strict=True)]
        outputs = jnp.stack(rows, axis=3).reshape(*shape[:2], 2 * shape[2], 2 * shape[3], -1)
        return constrain(outputs[:, :, : output[0], : output[1]], "batch", None, None, None, "channels")

    (chunks,), (rest,) = _chunks((x,), output)
    if chunks.shape[0] == 1:
        outputs = filter_images(chunks[0])
    else:
        _, outputs_by_chunk = jax.lax.scan(lambda _, images: (None, filter_images(images)), None, chunks)
        by_shard = outputs_by_chunk.swapaxes(0, 1)
        outputs = by_shard.reshape(by_shard.shape[0], -1, *by_shard.shape[3:])
    if rest.shape[1] > 0:
        outputs = jnp.concatenate([outputs, filter_images(rest)], axis=1)
    return outputs.reshape(x.shape[0], *outputs.shape[2:])


def _tile_counts(output: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns of tiles of an output."""
    return (output[0] + 1) // 2, (output[1] + 1) // 2


def _chunks(arrays: tuple[Array, ...], output: tuple[int, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Divide batches of images (B, I, J, C) into chunks of equal size and a rest.

    Args:
        arrays: images, or gradients of their outputs.
        output: rows and columns of an output.

    Returns:
        For each array, the chunks (chunks, shards of the batch, images, I, J, C), and the rest (shards, images, I, J,
        C), which may have no images.
    """
    shards = batch_shard_count(arrays[0].shape)
    image_count = arrays[0].shape[0] // shards
    tile_rows, tile_columns = _tile_counts(output)
    most_images = max(1, TILES_PER_CHUNK // (tile_rows * tile_columns))
    chunk_size = -(-image_count // -(-image_count // most_images))
    chunk_count = image_count // chunk_size
    chunks, rests = [], []
    for array in arrays:
        by_shard = array.reshape(shards, image_count, *array.shape[1:])
        whole, rest = jnp.split(by_shard, [chunk_count * chunk_size], axis=1)
        whole_chunks = whole.reshape(shards, chunk_count, chunk_size, *array.shape[1:]).swapaxes(0, 1)
        chunks.append(constrain(whole_chunks, None, "batch", None, None, None, None))
        rests.append(constrain(rest, "batch", None, None, None, None))
    return tuple(chunks), tuple(rests)


def _image_columns(images: Float[Array, "D N I J C"], pads: Any, output: tuple[int, ...]) -> _Columns:
    """Return V of all tiles of some images."""
    tile_rows, tile_columns = _tile_counts(output)
    dims = [
        (pads[dim][0], 2 * count + 2 - images.shape[2 + dim] - pads[dim][0], 0)
        for dim, count in enumerate((tile_rows, tile_columns))
    ]
    padded = jax.lax.pad(images, jnp.zeros((), images.dtype), ((0, 0, 0), (0, 0, 0), *dims, (0, 0, 0)))
    rows = jnp.stack(_of_input(*(padded[:, :, row : row + 2 * tile_rows - 1 : 2] for row in range(4))))
    rows = jax.lax.optimization_barrier(rows)
    return _as_tiles(_of_input(*(rows[:, :, :, :, column : column + 2 * tile_columns - 1 : 2] for column in range(4))))


def _gradient_columns(dy: Float[Array, "D N P Q O"]) -> _Columns:
    """Return A dy A^T of all tiles of the outputs' gradient for some images."""
    dims = ((0, 0, 0), (0, 0, 0), (0, dy.shape[2] % 2, 0), (0, dy.shape[3] % 2, 0), (0, 0, 0))
    padded = jax.lax.pad(dy, jnp.zeros((), dy.dtype), dims)
    rows = jax.lax.optimization_barrier(jnp.stack(_of_output(padded[:, :, ::2], padded[:, :, 1::2])))
    return _as_tiles(_of_output(rows[:, :, :, :, ::2], rows[:, :, :, :, 1::2]))


def _as_tiles(columns: Any) -> _Columns:
    """Reshape entries (4, D, N, rows, columns, channels) to (4, D, tiles, channels)."""
    tiles = [entries.reshape(*entries.shape[:2], -1, entries.shape[5]) for entries in columns]
    # without the barrier, XLA:CPU would transform the tiles inside each product
    return jax.lax.optimization_barrier(tiles)


def _of_both_dims(w: Float[Array, "3 3 C O"]) -> _Columns:
    """Return U."""
    rows = jax.lax.optimization_barrier(jnp.stack(_of_kernel(*w)))
    return jax.lax.optimization_barrier(list(_of_kernel(*(rows[:, column] for column in range(3)))))


def _of_input(d0: Any, d1: Any, d2: Any, d3: Any) -> tuple[Any, ...]:
    """Return B^T d."""
    return d0 - d2, d1 + d2, d2 - d1, d1 - d3


def _of_kernel(g0: Any, g1: Any, g2: Any) -> tuple[Any, ...]:
    """Return G g."""
    return g0, (g0 + g1 + g2) * 0.5, (g0 - g1 + g2) * 0.5, g2


def _of_output(y0: Any, y1: Any) -> tuple[Any, ...]:
    """Return A y."""
    return y0, y0 + y1, y0 - y1, -y1


def _to_output(m0: Any, m1: Any, m2: Any, m3: Any) -> tuple[Any, ...]:
    """Return A^T m."""
    return m0 + m1 + m2, m1 - m2 - m3


def _to_kernel(u0: Any, u1: Any, u2: Any, u3: Any) -> tuple[Any, ...]:
    """Return G^T u."""
    return u0 + (u1 + u2) * 0.5, (u1 - u2) * 0.5, (u1 + u2) * 0.5 + u3
