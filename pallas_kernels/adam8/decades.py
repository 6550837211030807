"""The dynamic map on TPU: what `maps.py` computes of codes and values, to the bit, with less arithmetic.

What depends on the decade alone (its number of levels, its factors, its lower bound) is looked up among 8 sublanes, an
instruction or two of the vector unit, where `maps.py` compares with every decade. The decade of a code is the exponent
of its distance from zero. That of a value is its logarithm's whole part, which need not be exact: a value just beyond
the bound between two decades, or just below it, has the lower one's last code.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.adam8.maps import DECADES, dynamic_values

SUBLANES = 8
LANES = 128
ROWS = 7
"""Of a map's table: three to decode by, four to encode by."""
NEAR = 2.0**-14
"""Decades by which a value may lie below a bound and be taken for one beyond it: much less than a level, much more than
what a logarithm is off by."""
MAGIC = 3 * 2.0**22
"""A float32 whose last bits count ones."""


@dataclasses.dataclass(frozen=True)
class Decades:
    """A map's numbers by decade.

    Args:
        signed: that of first moments, whose codes are 127 more than a number's distance from zero, or less.
    """

    signed: bool

    @property
    def first(self) -> int:
        """Levels of the lowest decade, as a power of two."""
        return int(not self.signed)

    def table(self) -> np.ndarray:
        """Eight numbers of each row: by the last bits of a float32's exponent, or of a logarithm's whole part."""
        f32, decade = np.float32, np.arange(DECADES)
        n = (2.0 ** (decade + self.first)).astype(f32)
        made = np.zeros((ROWS, SUBLANES), f32)
        at = (127 + self.first + decade) % SUBLANES
        made[0, at], made[1, at], made[2, at] = n, f32(0.9) / n, (10.0 ** (decade - DECADES + 1)).astype(f32)
        # zero and one are on no decade, and share the sublane that is left: a line from one to the other
        lowest, last = (0.5, 128.5) if self.signed else (1.5, 256.5)
        free = (126 + self.first) % SUBLANES
        slope = f32(1 / (last - lowest))
        made[0, free], made[1, free], made[2, free] = f32(lowest) + f32(0.1) / slope, slope, 1
        values = dynamic_values(self.signed)
        middles = (values[:-1] + values[1:]) / f32(2)
        bounds = np.append(values[0] / f32(2), middles[n.astype(int)[1:] - 2**self.first - 1])
        at = (decade - DECADES) % SUBLANES
        made[3, at], made[4, at] = 10.0 ** (DECADES - 1 - decade), n * f32(1 / 0.9)
        made[5, at], made[6, at] = bounds, n - self.first - 1
        made[3:, 0] = made[3:, (-1) % SUBLANES]  # one's
        return made

    @property
    def last(self) -> float:
        """The middle below the highest value, which is one."""
        values = dynamic_values(self.signed)
        return float((values[-2] + values[-1]) / np.float32(2))


M, V = Decades(True), Decades(False)


@functools.cache
def tables() -> np.ndarray:
    """Rows of both maps, first moments' first, along sublanes.

    Returns:
        float32 (2 * ROWS * 8, 128), the same for every lane.

    Example:
        >>> tables().shape
        (112, 128)
    """
    rows = np.concatenate([M.table(), V.table()]).reshape(-1, 1)
    return np.ascontiguousarray(np.broadcast_to(rows, (len(rows), LANES)))


def look_up(table: Array, index: Array) -> Array:
    """Numbers of each lane's table.

    Args:
        table: (8, 128).
        index: (a multiple of 8, a multiple of 128), from 0 to 7.
    """

    def one(part: Array) -> Array:
        return jnp.take_along_axis(table, part, 0, mode="promise_in_bounds")

    rows = [jnp.split(part, index.shape[1] // LANES, 1) for part in jnp.split(index, index.shape[0] // SUBLANES)]
    return jnp.concatenate([jnp.concatenate([one(part) for part in row], 1) for row in rows])


def _value(distance: Array, table: Sequence[Array]) -> Array:
    """Of a distance from zero, and a half."""
    index = (lax.bitcast_convert_type(distance, jnp.int32) >> 23) & (SUBLANES - 1)
    n, step, ten = (look_up(one, index) for one in table[:3])
    return ((distance - n) * step + 0.1) * ten


def _signed(size: Array, sign: Array) -> Array:
    """A size with the sign of another number."""
    bits = lax.bitcast_convert_type(sign, jnp.int32) & jnp.int32(-(2**31))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | bits, jnp.float32)


def decode_m(signed: Array, table: Sequence[Array]) -> Array:
    """Values of first moments.

    Args:
        signed: codes less 128, int32.
        table: the first map's rows.
    """
    distance = signed.astype(jnp.float32) + 1
    return _signed(_value(jnp.abs(distance) + 0.5, table), distance)


def decode_v(signed: Array, table: Sequence[Array]) -> Array:
    """Values of second moments.

    Args:
        signed: codes less 128, int32.
        table: the second map's rows.
    """
    return _value(signed.astype(jnp.float32) + 129.5, table)


def _distance(a: Array, table: Sequence[Array]) -> Array:
    """From zero, of the level nearest to a, but for the highest; of two as near, the lower."""
    ten = float(np.log(10))
    # the constants are apart, for XLA would add them up, and MAGIC has no room for a half
    whole = (lax.log(jnp.maximum(a, 2e-7)) + (NEAR - 0.5) * ten) * (1 / ten) + MAGIC
    index = lax.bitcast_convert_type(whole, jnp.int32) & (SUBLANES - 1)
    up, scale, bound, below = (look_up(one, index) for one in table[3:])
    return below + jnp.where(a > bound, jnp.ceil((a * up - 0.1) * scale), 0)


def _code(number: Array, zero: int) -> Array:
    """A whole number and the code of zero added: int32 of which the last eight bits count."""
    return lax.bitcast_convert_type(number + (MAGIC + zero), jnp.int32)


def encode_m(y: Array, size: Array, table: Sequence[Array]) -> Array:
    """Codes of first moments, as int32 of which the last eight bits count.

    Args:
        y: from -1 to 1.
        size: of y.
        table: the first map's rows.
    """
    return _code(_signed(jnp.where(y > M.last, 128.0, _distance(size, table)), y), 127)


def encode_v(y: Array, table: Sequence[Array]) -> Array:
    """Codes of second moments, as `encode_m`.

    Args:
        y: from 0 to 1.
        table: the second map's rows.
    """
    return _code(jnp.where(y > V.last, 255.0, _distance(y, table)), 0)
