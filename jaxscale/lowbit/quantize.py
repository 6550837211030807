r"""Arrays in a few bits: a code for each number, and a float32 scale for each block of a column.

A block is `block` consecutive numbers along the second-minor dim. Codes have the array's shape, and so its sharding;
scales have that dim divided by the block. On TPU, whose arrays lie in tiles of (8, 128) over the last two dims, XLA
fuses this without a copy: the usual blocks along the last dim cost 16 bytes of temporary memory for each number
(Dettmers et al. 2021, arXiv 2110.02861, flatten and take 256 in a row).

    scale = max |x|     of a block; NaN and infinity count as 0, and become 0
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
from jaxscale.lowbit.codebooks import MAPS, map_of, neighbour
from jaxscale.typing import Array, Float, Key

LEAST = 2.0**-126
"""Least divisor: smaller scales would be flushed to zero, and 0 / 0 is NaN."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["map", "block"])
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in a few bits, as a pytree of two arrays.

    Args:
        codes: of the array's shape, in the dtype of its map.
        scale: float32, of that shape with the second-minor dim divided by the block.
        map: name of the codes' map, in `codebooks.MAPS`.
        block: numbers of a column that share a scale.

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
        """Dims of the decoded array."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """Elements of the decoded array."""
        return math.prod(self.codes.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the decoded array: float32."""
        return jnp.dtype(jnp.float32)


def is_quantized(x: Any) -> bool:
    """Whether a node of a tree is a quantized array; the `is_leaf` of tree functions."""
    return isinstance(x, Quantized)


def encode(x: Array, map: str, block: int, key: Key | None = None, *, by_rows: bool = False) -> Quantized:
    """An array in a few bits.

    Args:
        x: of two dims or more, any floating dtype. NaN and infinities become 0.
        map: name of the codes' map, in `codebooks.MAPS`; an unsigned one needs x >= 0.
        block: numbers of a column that share a scale; divides the second-minor dim.
        key: rounds stochastically, so that the mean over keys is `x`; `None` rounds to the nearest.
        by_rows: see `scales`.

    Raises:
        UserError: the block does not divide, the array has no columns, or there is no such map.

    Example:
        >>> x = jnp.array([[0.5, -8.0], [1.0, 4.0]])
        >>> print(decode(encode(x, "soft8", 2)).round(2))
        [[ 0.5  -8.  ]
         [ 1.    4.02]]
    """
    scale = scales(x, map, block, by_rows=by_rows)
    return Quantized(codes(x, scale, map, block, key), scale, map, block)


def scales(x: Array, map: str, block: int, *, by_rows: bool = False) -> Float[Array, "..."]:
    """The scale of each block: the largest finite distance from zero.

    Args:
        x: of two dims or more.
        map: name of the codes' map.
        block: numbers of a column that share a scale.
        by_rows: takes the maximum in a loop over a block's rows. XLA for CPU would else read column by column.
    """
    map_of(map)
    check_block(x.shape, block)
    blocked_shape = _blocked(x.shape, block)
    if by_rows:
        blocked = _finite(x).reshape(blocked_shape)

        def row(i: Any) -> Array:  # without a constant, which would not lie in host memory as `x` may
            return jnp.abs(jax.lax.dynamic_index_in_dim(blocked, i, x.ndim - 1, keepdims=False))

        largest = jax.lax.fori_loop(1, block, lambda i, running: jnp.maximum(running, row(i)), row(0))
    else:
        largest = jnp.max(jnp.abs(_finite(x)).reshape(blocked_shape), -2)
    return jnp.minimum(largest, 1 / LEAST)  # the inverse of a larger one is flushed to zero


def codes(x: Array, scale: Array, map: str, block: int, key: Key | None = None, *, repeated: bool = False) -> Array:
    """The codes of an array for given scales; numbers beyond their scale get the last code.

    Args:
        x: of two dims or more.
        scale: of `scales`.
        map: name of the codes' map.
        block: numbers of a column that share a scale.
        key: rounds stochastically.
        repeated: see `beside`.
    """
    m = MAPS[map]
    numbers, inverse = beside(_finite(x), 1 / jnp.maximum(scale, LEAST), repeated)
    ratios = jnp.clip(numbers * inverse, -1.0 if m.signed else 0.0, 1.0)
    nearest = m.encode(ratios)
    if key is not None:
        nearest_value = m.decode(nearest)
        neighbours = neighbour(m, nearest, ratios > nearest_value)
        gap = m.decode(neighbours) - nearest_value
        probability = (ratios - nearest_value) / jnp.where(gap == 0, 1, gap)
        nearest = jnp.where(jax.random.uniform(key, ratios.shape) < probability, neighbours, nearest)
    return nearest.reshape(x.shape)


def decode(q: Quantized, *, repeated: bool = False) -> Float[Array, "..."]:
    """The float32 array that a quantized one encodes.

    Args:
        q: codes and scales.
        repeated: see `beside`.

    Example:
        >>> decode(zeros((2, 2), "linear4_unsigned", 2)).tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    values, scale = beside(MAPS[q.map].decode(q.codes), q.scale, repeated)
    return (values * scale).reshape(q.shape)


def beside(x: Array, scale: Array, repeated: bool = False) -> tuple[Array, Array]:
    """An array and its scales in shapes whose product pairs each number with its scale.

    Args:
        x: (.., rows, cols).
        scale: (.., blocks, cols).
        repeated: broadcast scales to the shape of the array, instead of reshaping the array to (.., blocks, block,
            cols). XLA for TPU fuses the former and keeps 16 bytes a number for the latter if a shard has several
            blocks; on GPU it is the reverse.

    Example:
        >>> [a.shape for a in beside(jnp.ones((6, 2)), jnp.ones((3, 2)))]
        [(3, 2, 2), (3, 1, 2)]
        >>> [a.shape for a in beside(jnp.ones((6, 2)), jnp.ones((3, 2)), repeated=True)]
        [(6, 2), (6, 2)]
    """
    blocked_shape = _blocked(x.shape, x.shape[-2] // scale.shape[-2])
    if repeated:
        return x, jnp.broadcast_to(scale[..., None, :], blocked_shape).reshape(x.shape)
    return x.reshape(blocked_shape), scale[..., None, :]


def zeros(shape: tuple[int, ...], map: str, block: int) -> Quantized:
    """A quantized array of zeros, without encoding: XLA would constant-fold that, for seconds a leaf.

    Args:
        shape: of two dims or more.
        map: name of the codes' map.
        block: divides the second-minor dim.
    """
    m = map_of(map)
    check_block(shape, block)
    scale = jnp.zeros((*shape[:-2], shape[-2] // block, shape[-1]), jnp.float32)
    return Quantized(jnp.full(shape, m.zero, m.dtype), scale, map, block)


def block_of(rows: int, most: int) -> int:
    """Numbers of a column that share a scale.

    The largest divisor of `rows` of at most `most`. If that is less than an eighth of `most`, scales would take more
    than half a byte for each number in 8 bits: then the whole column, which is coarser but keeps the bytes low.

    Args:
        rows: of the second-minor dim on one device.
        most: largest block.

    Example:
        >>> block_of(4096, 256), block_of(688, 256), block_of(8, 256), block_of(2 * 1009, 256)
        (256, 172, 8, 2018)
    """
    best = next(n for n in range(min(rows, most), 0, -1) if rows % n == 0)
    return rows if best < min(rows, most // 8) else best


def check_block(shape: tuple[int, ...], block: int) -> None:
    """Refuse a block that does not divide the columns of an array.

    Raises:
        UserError: such a block, or an array of fewer than two dims.
    """
    if len(shape) < 2:
        raise UserError(f"an array of shape {shape} can't be quantized: blocks lie along the second-last dim of two")
    if block < 1 or shape[-2] % block:
        raise UserError(
            f"blocks of {block} do not divide the {shape[-2]} rows of {shape}: expected a divisor, such as "
            f"{block_of(shape[-2], max(block, 1))}"
        )


def _blocked(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return (*shape[:-2], shape[-2] // block, block, shape[-1])


def _finite(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)
