"""The dynamic map on TPU: the codes and values that `maps.py` defines, with less arithmetic.

Within a decade, values are a linear function of codes, and codes of values. `maps.py` finds the coefficients by
comparison with every decade. Here they are looked up among 8 sublanes, with an instruction or two of the vector unit.
The decade of a code is the exponent of its distance from the code of zero. The decade of a value is the rounded
logarithm, which need not be exact: values just above and just below the bound between two decades both get the last
code of the lower decade. Values agree with `maps.py` to a relative error of 1e-6. Codes agree, too, except for numbers
whose distance from the midpoint between two values is below 1e-4 of a step; these numbers may get either code.
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
"""Sublanes of a vector register, and entries of a row of a table."""
LANES = 128
"""Lanes of a vector register."""
DECODE_ROWS = 2
"""Number of the first rows of a map's table; for decoding: slope and intercept (both negated for the signed map)."""
ROWS = 6
"""Number of all rows of a map's table; the rest, for encoding: slope, intercept, lower bound and the rank below it."""
MAGIC = 3 * 2.0**22
"""The last bits of the sum of this number and a float32 are that float32, rounded to an integer."""
TINY = 2e-7
"""Smaller magnitudes are replaced by this one: it is in the lowest decade, below the bound of the first value."""


@dataclasses.dataclass(frozen=True)
class Decades:
    """The numbers that a dynamic map needs for each of its decades.

    A rank is the number of steps between a code and the code of zero, as in `maps.py`.

    Args:
        signed: True for the map of first moments, which has codes for negative numbers.
    """

    signed: bool

    @property
    def values(self) -> np.ndarray:
        """The positive values of the map, ascending; the last is 1."""
        return dynamic_values(self.signed)

    @property
    def unit(self) -> float:
        """The factor of magnitudes before they are encoded.

        After multiplication, the rounded logarithm of a magnitude is its decade. For magnitudes above the midpoint of
        the two highest values, it is one decade more; the highest value is 1.
        """
        return 10**-0.5 / (float(self.values[-2] + self.values[-1]) / 2)

    def table(self) -> np.ndarray:
        """The table of the map, float32 (ROWS, 8).

        The last three bits of an integer select the column. In the rows for decoding, this integer is the exponent of
        a rank plus a half. In the rows for encoding, it is the rounded logarithm of a magnitude.
        """
        first_exponent, decades = int(not self.signed), np.arange(DECADES)
        n, power_of_ten = 2.0 ** (decades + first_exponent), 10.0 ** (decades - DECADES + 1)
        table = np.zeros((ROWS, SUBLANES))
        decode_columns = (127 + first_exponent + decades) % SUBLANES
        table[0, decode_columns], table[1, decode_columns] = 0.9 / n * power_of_ten, -0.8 * power_of_ten
        # the values 0 and 1 belong to no decade, and share the column that is left: a line from one to the other
        zero_rank, one_rank = (0.5, 128.5) if self.signed else (1.5, 256.5)
        shared_column = (126 + first_exponent) % SUBLANES
        slope = round(2**29 / (one_rank - zero_rank)) / 2**29  # has so few bits that 0 is exact
        table[0, shared_column], table[1, shared_column] = slope, -zero_rank * slope
        if self.signed:
            table[:DECODE_ROWS] *= -1
        ranks_below = n - n[0]
        midpoints = (self.values[:-1] + self.values[1:]) / 2
        encode_columns = (decades - DECADES) % SUBLANES
        table[2, encode_columns] = n / power_of_ten / 0.9 / self.unit
        table[3, encode_columns] = ranks_below + 0.5 - n / 9
        lower_bounds = np.append(self.values[0] / 2, midpoints[ranks_below[1:].astype(int) - 1])
        table[4, encode_columns] = lower_bounds * self.unit
        table[5, encode_columns] = ranks_below
        table[3, 0] = len(self.values)  # the rank of the value 1
        return table.astype(np.float32)


M, V = Decades(True), Decades(False)
"""The maps of first and of second moments."""


@functools.cache
def tables() -> np.ndarray:
    """Return the tables of both maps, first the one for first moments, with their entries along sublanes.

    Returns:
        float32 (2 * ROWS * 8, 128), the same for every lane.

    Example:
        >>> tables().shape
        (96, 128)
    """
    rows = np.concatenate([M.table(), V.table()]).reshape(-1, 1)
    return np.ascontiguousarray(np.broadcast_to(rows, (len(rows), LANES)))


def look_up(table: Array, index: Array) -> Array:
    """Select an entry of a row of a table for every element of an index.

    Args:
        table: one row of a table, (8, 128).
        index: the selected sublanes, from 0 to 7, int32 (a multiple of 8, a multiple of 128).

    Returns:
        The selected entries, in the shape of `index`.
    """

    def look_up_tile(tile: Array) -> Array:
        return jnp.take_along_axis(table, tile, 0, mode="promise_in_bounds", wrap_negative_indices=False)

    tile_rows = [jnp.split(rows, index.shape[1] // LANES, 1) for rows in jnp.split(index, index.shape[0] // SUBLANES)]
    return jnp.concatenate([jnp.concatenate([look_up_tile(tile) for tile in row], 1) for row in tile_rows])


def _bits(x: Array) -> Array:
    """The bits of float32 numbers, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def _sign(x: Array) -> Array:
    """The sign bits of float32 numbers, as int32 with all other bits 0."""
    return _bits(x) & jnp.int32(-(2**31))


def _decode(shifted_rank: Array, table: Sequence[Array]) -> Array:
    """The values of the ranks `shifted_rank - 1/2` (unsigned map: `- 3/2`), float32; negated for the signed map."""
    slope, intercept = (look_up(row, (_bits(shifted_rank) >> 23) & (SUBLANES - 1)) for row in table[:DECODE_ROWS])
    return shifted_rank * slope + intercept


def decode_m(negated_codes: Array, table: Sequence[Array]) -> Array:
    """Decode first moments.

    Args:
        negated_codes: 127 minus the codes, int32.
        table: the rows of the map of first moments.

    Returns:
        The moments, float32 in [-1, 1].
    """
    negated_ranks = negated_codes.astype(jnp.float32)
    bits = _bits(_decode(jnp.abs(negated_ranks) + 0.5, table)) ^ _sign(negated_ranks)
    return lax.bitcast_convert_type(bits, jnp.float32)


def decode_v(shifted_codes: Array, table: Sequence[Array]) -> Array:
    """Decode second moments.

    Args:
        shifted_codes: the codes minus 128, int32.
        table: the rows of the map of second moments.

    Returns:
        The moments, float32 in [0, 1].
    """
    return _decode(shifted_codes.astype(jnp.float32) + 129.5, table)


def _encode(magnitude: Array, table: Sequence[Array], unit: float) -> Array:
    """The ranks, before rounding, of magnitudes that have been multiplied by `unit`."""
    rounded_log = lax.log(jnp.maximum(magnitude, TINY * unit)) * (1 / math.log(10)) + MAGIC
    slope, intercept, lower_bound, rank_below = (
        look_up(row, _bits(rounded_log) & (SUBLANES - 1)) for row in table[DECODE_ROWS:]
    )
    return jnp.where(magnitude > lower_bound, magnitude * slope + intercept, rank_below)


def encode_m(magnitude: Array, signed: Array, table: Sequence[Array]) -> Array:
    """Encode first moments.

    Args:
        magnitude: magnitudes of the moments times `M.unit`.
        signed: numbers that have the signs of the moments, float32.
        table: the rows of the map of first moments.

    Returns:
        The codes, in the last eight bits of int32.
    """
    ranks = lax.bitcast_convert_type(_bits(_encode(magnitude, table, M.unit)) | _sign(signed), jnp.float32)
    return _bits(jnp.maximum(ranks + (MAGIC + 127), MAGIC))  # there is no code for -1


def encode_v(magnitude: Array, table: Sequence[Array]) -> Array:
    """Encode second moments.

    Args:
        magnitude: the moments times `V.unit`.
        table: the rows of the map of second moments.

    Returns:
        The codes, in the last eight bits of int32.
    """
    return _bits(_encode(magnitude, table, V.unit) + MAGIC)
