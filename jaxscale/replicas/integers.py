"""Encode floats as integers with a float32 scale for each block, for the codecs int8, int4 and QSGD.

With L = 2^(bits-1) - 1 levels on each side of zero, a block x with the scale s = max|x| has the codes round(x L / s).
The codes decode to codes * s / L, with an error of at most s / 2L. Codes of 4 bits or fewer are stored two in a byte,
because XLA sends a whole byte for each int4. If the chip has a kernel (`pallas_kernels.quantize`, with the same
definition), the kernel computes codes of 8 or 4 bits, rounded to the nearest integer. Left out: entropy coding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.typing import Array, Float, Int, Key
from pallas_kernels.dispatch import Explanation, is_noting, note
from pallas_kernels.quantize.api import quantize
from pallas_kernels.quantize.reference import max_code
from pallas_kernels.target import target


class IntegerCodes(NamedTuple):
    """Blocks encoded as integers.

    Args:
        codes: int8 array of the codes; codes of 4 bits or fewer are stored two in a byte.
        scale: for each block, its largest magnitude.
    """

    codes: Int[Array, "*rows block"]
    scale: Float[Array, "*rows"]


def encode_integers(x: Float[Array, "... elements"], bits: int, block: int, key: Key | None) -> IntegerCodes:
    """Encode each block of the last dim as integer codes and a scale.

    Args:
        x: float32 array, whose last dim is a multiple of `block`.
        bits: number of bits of each code, 2 to 8.
        block: number of elements that share a scale; it must be even if codes are stored two in a byte.
        key: random key. With a key, a number is rounded up with a probability equal to its fractional part, so that the
            expected value is exact; `None`: numbers are rounded to the nearest integer.

    Example:
        >>> decode_integers(encode_integers(jnp.array([7.0, -3.4, 0.0, 1.0]), 4, 4, None), 4)
        Array([ 7., -3.,  0.,  1.], dtype=float32)
    """
    assert 2 <= bits <= 8
    assert block % 2 == 0 or bits > 4
    blocks = x.reshape(*x.shape[:-1], -1, block)
    if key is None and bits in (8, 4) and x.size:
        codes, scale = quantize(blocks.reshape(-1, block), bits=bits, block=block, axis=-1)
        return IntegerCodes(codes.reshape(*blocks.shape[:-1], -1), scale.reshape(blocks.shape[:-1]))
    if is_noting() and x.size:
        rounding_text = "at random" if key is not None else f"to {bits} bits"
        reason = f"kernels round to the nearest code of 8 or 4 bits, but this codec rounds {rounding_text}"
        note(Explanation("quantize", target(), "reference", {}, reason))
    scale = jnp.max(jnp.abs(blocks), -1)
    # a block becomes zeros if its scale is zero or has an infinite inverse
    codes_per_unit = jnp.where(scale > 2.0**-100, max_code(bits) / scale, 0.0)
    raw_codes = blocks * codes_per_unit[..., None]
    integers = jnp.round(raw_codes) if key is None else jnp.floor(raw_codes + jax.random.uniform(key, raw_codes.shape))
    codes = jnp.clip(integers, -max_code(bits), max_code(bits)).astype(jnp.int8)
    return IntegerCodes(_pack_nibbles(codes) if bits <= 4 else codes, scale)


def decode_integers(coded: IntegerCodes, bits: int) -> Float[Array, "... elements"]:
    """Return the floats that codes stand for, as a float32 array with all blocks in its last dim.

    Args:
        coded: codes and scales from `encode_integers`.
        bits: number of bits of each code.
    """
    codes = _unpack_nibbles(coded.codes) if bits <= 4 else coded.codes
    blocks = codes.astype(jnp.float32) * (coded.scale / max_code(bits))[..., None]
    return blocks.reshape(*blocks.shape[:-2], -1)


def _pack_nibbles(codes: Array) -> Array:
    """Return codes packed two in a byte: the first half of each block in the low four bits, the second in the high."""
    low_codes, high_codes = jnp.split(codes, 2, axis=-1)
    return (low_codes & 15) | (high_codes << 4)


def _unpack_nibbles(packed_codes: Array) -> Array:
    """Return the codes that `_pack_nibbles` packed, one in each int8."""
    return jnp.concatenate([(packed_codes << 4) >> 4, packed_codes >> 4], axis=-1)
