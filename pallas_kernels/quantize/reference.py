r"""Quantization of floats to integers with one scale per block: the definition.

With :math:`L = 2^{bits - 1} - 1` and the scale :math:`s = \max |x|` of a block, the code of an element is
:math:`\mathrm{round}(x L / s)`. A code stands for :math:`code \cdot s / L`, so the error is at most :math:`s / 2L`. All
codes of a block with s <= 2^-100 are zero, because the inverse of s might be flushed to zero. The caller must keep out
NaN and infinities: on some platforms a maximum ignores NaN.
Two codes of 4 bits share a byte: the low nibbles have the first half of each block, the high nibbles the second half.
Left out: stochastic rounding, scales in fewer bits.
"""

import jax.numpy as jnp
from jax import Array

FLOP = 8
"""FLOP per element."""
MIN_SCALE = 2.0**-100
"""If the scale of a block is not above this number, all codes of the block are zero."""


def max_code(bits: int) -> int:
    """Return L, the largest code: codes are integers in [-L, L]."""
    return 2 ** (bits - 1) - 1


def pack_nibbles(low: Array, high: Array) -> Array:
    """Pack pairs of 4-bit codes (int32) into numbers in the range of int8 (int32), `low` into the low nibbles."""
    return jnp.where(low < 0, low + 16, low) + high * 16


def encode(x: Array, inverse: Array, bits: int) -> Array:
    """Encode float32 numbers.

    Args:
        x: the numbers, float32.
        inverse: the result of `inverse_step` for the block of each number; it broadcasts to `x`.
        bits: bits of a code.

    Returns:
        The codes, int32.
    """
    limit = float(max_code(bits))
    return jnp.minimum(jnp.maximum(jnp.round(x * inverse), -limit), limit).astype(jnp.int32)


def inverse_step(scale: Array, bits: int) -> Array:
    """The inverse L / s of the distance between the numbers of successive codes; 0 for a block of zeros."""
    return jnp.where(scale > MIN_SCALE, max_code(bits) / jnp.maximum(scale, MIN_SCALE), 0.0)


def quantize(x: Array, *, bits: int, block: int, axis: int) -> tuple[Array, Array]:
    """Quantize a matrix in blocks.

    Args:
        x: the matrix (R, C), of any floating dtype.
        bits: bits of a code, 8 or 4.
        block: number of consecutive elements that share a scale.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).

    Returns:
        The codes, int8, and the scales, float32. Both have the shape of `x`, except that the dim `axis` is halved for
        codes of 4 bits, and divided by the block for scales.
    """
    block_shape = list(x.shape)
    block_shape[axis : axis + 1 or None] = [x.shape[axis] // block, block]
    blocks = x.astype(jnp.float32).reshape(block_shape)
    scales = jnp.max(jnp.abs(blocks), axis)
    codes = encode(blocks, jnp.expand_dims(inverse_step(scales, bits), axis), bits)
    code_shape = list(x.shape)
    if bits == 4:
        codes = pack_nibbles(*jnp.split(codes, 2, axis))
        code_shape[axis] //= 2
    return codes.astype(jnp.int8).reshape(code_shape), scales


def dequantize(codes: Array, scale: Array, *, bits: int, block: int, axis: int) -> Array:
    """Compute the numbers for which codes stand.

    Args:
        codes, scale: the results of `quantize`.
        bits, block, axis: the arguments of `quantize`.

    Returns:
        The numbers, float32, in the shape of the matrix that was quantized.
    """
    bytes_per_block = block // 2 if bits == 4 else block
    block_shape, shape = list(codes.shape), list(codes.shape)
    block_shape[axis : axis + 1 or None] = [codes.shape[axis] // bytes_per_block, bytes_per_block]
    blocks = codes.reshape(block_shape)
    if bits == 4:
        blocks = jnp.concatenate([(blocks << 4) >> 4, blocks >> 4], axis)
        shape[axis] *= 2
    return (blocks.astype(jnp.float32) * jnp.expand_dims(scale / max_code(bits), axis)).reshape(shape)
