"""The dynamic map on TPU: what `maps.py` defines of codes and values, with less arithmetic.

Within a decade values are a line over codes, and codes a line over values. What depends on the decade alone is looked
up among 8 sublanes, an instruction or two of the vector unit, where `maps.py` compares with every decade. The decade of
a code is the exponent of its distance from zero. That of a value is its logarithm's whole part, which need not be
exact: a value just beyond the bound between two decades, or just below it, has the lower one's last code. Values are
those of `maps.py` to 1e-6 of each. So are codes, but where a number is within 1e-4 of a step of the middle between two:
there they may be either.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.adam8.maps import DECADES, dynamic_values

SUBLANES = 8
LANES = 128
LINE = 2
"""Rows of a map's table to decode by: slope, start; of the signed map with their signs turned."""
ROWS = 6
"""Of a map's table: those, and to encode by slope, start, lower bound, last distance below."""
MAGIC = 3 * 2.0**22
"""A float32 whose last bits count ones."""
TINY = 2e-7
"""A size below all bounds but the lowest, of which the decade is known."""


@dataclasses.dataclass(frozen=True)
class Decades:
    """A map's numbers by decade.

    Args:
        signed: that of first moments, whose codes are 127 more than a number's distance from zero, or less.
    """

    signed: bool

    @property
    def values(self) -> np.ndarray:
        """Those above zero, ascending; the last is one."""
        return dynamic_values(self.signed)

    @property
    def unit(self) -> float:
        """What sizes are multiplied by before they are encoded.

        With it the logarithm rounds to a decade, and to the next from the middle below one, the highest value, on.
        """
        return 10**-0.5 / (float(self.values[-2] + self.values[-1]) / 2)

    def table(self) -> np.ndarray:
        """Eight numbers of each row: by the last bits of a float32's exponent, or of a logarithm's whole part."""
        first, decade = int(not self.signed), np.arange(DECADES)
        n, ten = 2.0 ** (decade + first), 10.0 ** (decade - DECADES + 1)
        table = np.zeros((ROWS, SUBLANES))
        at = (127 + first + decade) % SUBLANES
        table[0, at], table[1, at] = 0.9 / n * ten, -0.8 * ten
        # zero and one are on no decade, and share the sublane that is left: a line from one to the other
        lowest, last = (0.5, 128.5) if self.signed else (1.5, 256.5)
        free = (126 + first) % SUBLANES
        slope = round(2**29 / (last - lowest)) / 2**29  # of so few bits that zero is exact
        table[0, free], table[1, free] = slope, -lowest * slope
        if self.signed:
            table[:LINE] *= -1
        below = n - n[0]
        middles = (self.values[:-1] + self.values[1:]) / 2
        at = (decade - DECADES) % SUBLANES
        table[2, at], table[3, at] = n / ten / 0.9 / self.unit, below + 0.5 - n / 9
        table[4, at] = np.append(self.values[0] / 2, middles[below[1:].astype(int) - 1]) * self.unit
        table[5, at] = below
        table[3, 0] = len(self.values)  # one's
        return table.astype(np.float32)


M, V = Decades(True), Decades(False)


@functools.cache
def tables() -> np.ndarray:
    """Rows of both maps, first moments' first, along sublanes.

    Returns:
        float32 (2 * ROWS * 8, 128), the same for every lane.

    Example:
        >>> tables().shape
        (96, 128)
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
        return jnp.take_along_axis(table, part, 0, mode="promise_in_bounds", wrap_negative_indices=False)

    rows = [jnp.split(part, index.shape[1] // LANES, 1) for part in jnp.split(index, index.shape[0] // SUBLANES)]
    return jnp.concatenate([jnp.concatenate([one(part) for part in row], 1) for row in rows])


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _sign(x: Array) -> Array:
    return _bits(x) & jnp.int32(-(2**31))


def _value(distance: Array, table: Sequence[Array]) -> Array:
    """Of a distance from zero, and a half."""
    slope, start = (look_up(one, (_bits(distance) >> 23) & (SUBLANES - 1)) for one in table[:LINE])
    return distance * slope + start


def decode_m(less: Array, table: Sequence[Array]) -> Array:
    """Values of first moments.

    Args:
        less: 127 less codes, int32.
        table: the first map's rows.
    """
    distance = less.astype(jnp.float32)
    turned = _bits(_value(jnp.abs(distance) + 0.5, table)) ^ _sign(distance)
    return lax.bitcast_convert_type(turned, jnp.float32)


def decode_v(less: Array, table: Sequence[Array]) -> Array:
    """Values of second moments.

    Args:
        less: codes less 128, int32.
        table: the second map's rows.
    """
    return _value(less.astype(jnp.float32) + 129.5, table)


def _distance(a: Array, table: Sequence[Array], unit: float) -> Array:
    """From zero, of the level nearest to a, but for up to a half."""
    whole = lax.log(jnp.maximum(a, TINY * unit)) * (1 / math.log(10)) + MAGIC
    slope, start, bound, below = (look_up(one, _bits(whole) & (SUBLANES - 1)) for one in table[LINE:])
    return jnp.where(a > bound, a * slope + start, below)


def encode_m(size: Array, sign: Array, table: Sequence[Array]) -> Array:
    """Codes of first moments, as int32 of which the last eight bits count.

    Args:
        size: from 0 to `M.unit`.
        sign: numbers that have the moments'.
        table: the first map's rows.
    """
    distance = lax.bitcast_convert_type(_bits(_distance(size, table, M.unit)) | _sign(sign), jnp.float32)
    return _bits(jnp.maximum(distance + (MAGIC + 127), MAGIC))  # one has no opposite


def encode_v(size: Array, table: Sequence[Array]) -> Array:
    """Codes of second moments, as `encode_m`.

    Args:
        size: from 0 to `V.unit`.
        table: the second map's rows.
    """
    return _bits(_distance(size, table, V.unit) + MAGIC)
