r"""Quantized arrays: a low-bit code for each element, and a float32 scale for each block of a column.

A block is `block` consecutive elements along the second-minor dim. Codes have the array's shape, and therefore its
sharding; in the shape of the scales, this dim is divided by the block. On TPU, where arrays lie in tiles of (8, 128)
over the last two dims, XLA fuses quantization without a copy. The usual blocks along the last dim would cost 16 bytes
of temporary memory per element (Dettmers et al. 2021, arXiv 2110.02861, flatten the array and take 256 consecutive
elements).

    scale = max |x| over a block; NaN and infinity count as 0 and become 0
    codes = nearest code to x / scale

Left out: scales in fewer bits, a second level of scales, and the rank-1 scales of Li et al. 2023, which are maxima over
sharded dims.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import UserError
from jaxscale.lowbit.codebooks import MAPS, map_of, neighbor
from jaxscale.typing import Array, Float, Key

LEAST_SCALE = 2.0**-126
"""Least scale to divide by: smaller scales would be flushed to zero, and 0 / 0 is NaN."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["map", "block"])
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized array, as a pytree of two arrays.

    Args:
        codes: codes in the shape of the array and the dtype of the map.
        scale: float32 scales, in the shape of the array with the second-minor dim divided by `block`.
        map: name of the codes' map, in `codebooks.MAPS`.
        block: number of neighboring elements of a column that share a scale.

    Example:
        >>> q = encode(jnp.ones((2, 512, 3)), "soft8", 256)
        >>> q.shape, q.codes.dtype.name, q.scale.shape
        ((2, 512, 3), 'int8', (2, 2, 3))
    """

    codes: Any
    scale: Any
    map: str
    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of dims of the decoded array."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """Number of elements of the decoded array."""
        return math.prod(self.codes.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the decoded array: float32."""
        return jnp.dtype(jnp.float32)


def is_quantized(x: Any) -> bool:
    """Return whether a node of a tree is a quantized array, for use as the argument `is_leaf` of tree functions.

    Example:
        >>> tree = {"moment": encode(jnp.ones((256, 4)), "dynamic8", 256), "step": jnp.int32(1)}
        >>> [is_quantized(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_quantized)]
        [True, False]
    """
    return isinstance(x, Quantized)


def encode(x: Array, map: str, block: int, key: Key | None = None, *, by_rows: bool = False) -> Quantized:
    """Quantize an array.

    Args:
        x: array of two dims or more, of any floating dtype. NaN and infinities become 0.
        map: name of the codes' map, in `codebooks.MAPS`; an unsigned map needs x >= 0.
        block: number of elements of a column that share a scale; it must divide the second-minor dim.
        key: key for stochastic rounding, in which the mean of the decoded array over keys is `x`; `None` rounds to the
            nearest code.
        by_rows: whether to take maxima row by row, as in `compute_scales`.

    Raises:
        UserError: the block does not divide the second-minor dim, the array has fewer than two dims, or no map has
            this name.

    Example:
        >>> x = jnp.array([[0.5, -8.0], [1.0, 4.0]])
        >>> print(decode(encode(x, "soft8", 2)).round(2))
        [[ 0.5  -8.  ]
         [ 1.    4.02]]
    """
    scale = compute_scales(x, map, block, by_rows=by_rows)
    return Quantized(compute_codes(x, scale, map, block, key), scale, map, block)


def compute_scales(x: Array, map: str, block: int, *, by_rows: bool = False) -> Float[Array, "..."]:
    """Return the scale of each block: the largest finite magnitude.

    Args:
        x: array of two dims or more.
        map: name of the codes' map.
        block: number of elements of a column that share a scale.
        by_rows: whether to take the maximum in a loop over a block's rows. Without this loop, XLA for CPU reads the
            array column by column.
    """
    map_of(map)  # refuses an unknown name
    check_block(x.shape, block)
    blocked_shape = _blocked_shape(x.shape, block)
    if by_rows:
        blocked_numbers = _finite_float32(x).reshape(blocked_shape)

        def row_magnitudes(row_index: Any) -> Array:
            """Return the magnitudes of the elements in one row of every block.

            No constant is used here: a constant would lie on the device although `x` may lie in host memory.
            """
            return jnp.abs(jax.lax.dynamic_index_in_dim(blocked_numbers, row_index, x.ndim - 1, keepdims=False))

        maxima = jax.lax.fori_loop(
            1,
            block,
            lambda row_index, running_maxima: jnp.maximum(running_maxima, row_magnitudes(row_index)),
            row_magnitudes(0),
        )
    else:
        maxima = jnp.max(jnp.abs(_finite_float32(x)).reshape(blocked_shape), -2)
    return jnp.minimum(maxima, 1 / LEAST_SCALE)  # the inverse of a larger scale is flushed to zero


def compute_codes(
    x: Array, scale: Array, map: str, block: int, key: Key | None = None, *, repeated: bool = False
) -> Array:
    """Return the codes of an array for these scales; an element beyond its scale gets the lowest or highest code.

    Args:
        x: array of two dims or more.
        scale: scale of each block, as `compute_scales` returns it.
        map: name of the codes' map.
        block: number of elements of a column that share a scale.
        key: key for stochastic rounding; `None` rounds to the nearest code.
        repeated: whether to broadcast the scales to the array's shape, as in `pair_with_scales`.
    """
    code_map = MAPS[map]
    numbers, inverse_scale = pair_with_scales(_finite_float32(x), 1 / jnp.maximum(scale, LEAST_SCALE), repeated)
    ratios = jnp.clip(numbers * inverse_scale, -1.0 if code_map.is_signed else 0.0, 1.0)
    codes = code_map.encode(ratios)
    if key is not None:
        nearest_value = code_map.decode(codes)
        neighbors = neighbor(code_map, codes, ratios > nearest_value)
        gap = code_map.decode(neighbors) - nearest_value
        probability = (ratios - nearest_value) / jnp.where(gap == 0, 1, gap)
        codes = jnp.where(jax.random.uniform(key, ratios.shape) < probability, neighbors, codes)
    return codes.reshape(x.shape)


def decode(q: Quantized, *, repeated: bool = False) -> Float[Array, "..."]:
    """Return the float32 array that a quantized array encodes.

    Args:
        q: the quantized array.
        repeated: whether to broadcast the scales to the array's shape, as in `pair_with_scales`.

    Example:
        >>> decode(zeros((2, 2), "linear4_unsigned", 2)).tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    values, scale = pair_with_scales(MAPS[q.map].decode(q.codes), q.scale, repeated)
    return (values * scale).reshape(q.shape)


def pair_with_scales(x: Array, scale: Array, repeated: bool = False) -> tuple[Array, Array]:
    """Return an array and its scales in shapes that broadcast, so that each element is paired with its scale.

    Args:
        x: array (.., rows, cols).
        scale: scales (.., blocks, cols).
        repeated: whether to broadcast scales to the shape of the array; otherwise the array is reshaped to (.., blocks,
            block, cols). XLA for TPU fuses the broadcast, but stores 16 bytes per element for the reshape if a shard
            has several blocks. XLA for GPU fuses the reshape, but not the broadcast.

    Example:
        >>> [a.shape for a in pair_with_scales(jnp.ones((6, 2)), jnp.ones((3, 2)))]
        [(3, 2, 2), (3, 1, 2)]
        >>> [a.shape for a in pair_with_scales(jnp.ones((6, 2)), jnp.ones((3, 2)), repeated=True)]
        [(6, 2), (6, 2)]
    """
    blocked_shape = _blocked_shape(x.shape, x.shape[-2] // scale.shape[-2])
    if repeated:
        return x, jnp.broadcast_to(scale[..., None, :], blocked_shape).reshape(x.shape)
    return x.reshape(blocked_shape), scale[..., None, :]


def zeros(shape: tuple[int, ...], map: str, block: int) -> Quantized:
    """Return a quantized array of zeros without encoding it: XLA would spend seconds per leaf on folding constants.

    Args:
        shape: shape of the decoded array, of two dims or more.
        map: name of the codes' map.
        block: number of elements of a column that share a scale; it must divide the second-minor dim.
    """
    code_map = map_of(map)
    check_block(shape, block)
    scale = jnp.zeros((*shape[:-2], shape[-2] // block, shape[-1]), jnp.float32)
    return Quantized(jnp.full(shape, code_map.zero_code, code_map.dtype), scale, map, block)


def block_of(row_count: int, max_block: int) -> int:
    """Return the block to use for an array: the number of elements of a column that share a scale.

    The block is the largest divisor of `row_count` up to `max_block`. If this divisor is less than an eighth of
    `max_block`, scales would take more than half a byte per 8-bit element; the block is then the whole column.

    Args:
        row_count: size of the second-minor dim on one device.
        max_block: largest block, unless it is a whole column.

    Example:
        >>> block_of(4096, 256), block_of(688, 256), block_of(8, 256), block_of(2 * 1009, 256)
        (256, 172, 8, 2018)
    """
    divisor = next(n for n in range(min(row_count, max_block), 0, -1) if row_count % n == 0)
    return row_count if divisor < min(row_count, max_block // 8) else divisor


def check_block(shape: tuple[int, ...], block: int) -> None:
    """Raise UserError unless a block divides the second-minor dim of an array.

    Raises:
        UserError: the block does not divide the second-minor dim, or the array has fewer than two dims.
    """
    if len(shape) < 2:
        raise UserError(f"an array of shape {shape} can't be quantized; expected two dims or more")
    if block < 1 or shape[-2] % block:
        raise UserError(
            f"the {shape[-2]} rows of shape {shape} cannot be split evenly into blocks of {block}; expected a divisor, "
            f"such as {block_of(shape[-2], max(block, 1))}"
        )


def _blocked_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return a shape (.., rows, cols) with the second-minor dim split: (.., blocks, block, cols)."""
    return (*shape[:-2], shape[-2] // block, block, shape[-1])


def _finite_float32(x: Array) -> Array:
    """Return an array in float32, with zeros instead of NaN and infinities."""
    numbers = x.astype(jnp.float32)
    return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, 0)
