r"""Floats as whole numbers with a scale for each block: the definition.

With :math:`L = 2^{bits - 1} - 1` and :math:`s = \max |x|` of a block, a code is :math:`\mathrm{round}(x L / s)`, and
stands for :math:`code \cdot s / L`: none is off by more than :math:`s / 2L`. A block whose s is 2^-100 or less is
zeros, for the inverse of s would be flushed. NaN and infinities are for the caller to keep out: maxima ignore a NaN on
some platforms.
Codes of 4 bits lie two in a byte: the first half of each block in the low nibbles, the second in the high ones. Left
out: stochastic rounding, scales in fewer bits.
"""

import jax.numpy as jnp
from jax import Array

FLOP = 8
"""Of a number."""
SMALLEST = 2.0**-100
"""Smallest scale of a block that is not taken for zeros."""


def levels(bits: int) -> int:
    """L: codes lie in [-L, L]."""
    return 2 ** (bits - 1) - 1


def packed(low: Array, high: Array) -> Array:
    """Two codes of 4 bits, int32, in the value of one int8, int32."""
    return jnp.where(low < 0, low + 16, low) + high * 16


def coded(x: Array, inverse: Array, bits: int) -> Array:
    """Codes, int32, of float32 numbers.

    Args:
        x: float32.
        inverse: L / s, of `inverse`, spread over the block.
        bits: of a code.
    """
    most = float(levels(bits))
    return jnp.minimum(jnp.maximum(jnp.round(x * inverse), -most), most).astype(jnp.int32)


def inverse(scale: Array, bits: int) -> Array:
    """L / s, 0 of a block of zeros."""
    return jnp.where(scale > SMALLEST, levels(bits) / jnp.maximum(scale, SMALLEST), 0.0)


def quantize(x: Array, *, bits: int, block: int, axis: int) -> tuple[Array, Array]:
    """Codes and scales.

    Args:
        x: (R, C), any floating dtype.
        bits: of a code, 8 or 4.
        block: numbers that share a scale.
        axis: -2, blocks down the columns, or -1, along the rows.

    Returns:
        Codes int8 in x's shape, of 4 bits with that dim halved; scales float32 with it divided by the block.
    """
    split = list(x.shape)
    split[axis : axis + 1 or None] = [x.shape[axis] // block, block]
    parts = x.astype(jnp.float32).reshape(split)
    scale = jnp.max(jnp.abs(parts), axis)
    codes = coded(parts, jnp.expand_dims(inverse(scale, bits), axis), bits)
    shape = list(x.shape)
    if bits == 4:
        codes = packed(*jnp.split(codes, 2, axis))
        shape[axis] //= 2
    return codes.astype(jnp.int8).reshape(shape), scale


def dequantize(codes: Array, scale: Array, *, bits: int, block: int, axis: int) -> Array:
    """What codes stand for, float32.

    Args:
        codes: of `quantize`.
        scale: of `quantize`.
        bits: of a code.
        block: numbers that share a scale.
        axis: as there.
    """
    held = block // 2 if bits == 4 else block
    split, whole = list(codes.shape), list(codes.shape)
    split[axis : axis + 1 or None] = [codes.shape[axis] // held, held]
    parts = codes.reshape(split)
    if bits == 4:
        parts = jnp.concatenate([(parts << 4) >> 4, parts >> 4], axis)
        whole[axis] *= 2
    return (parts.astype(jnp.float32) * jnp.expand_dims(scale / levels(bits), axis)).reshape(whole)
