r"""Maps between moments and 8-bit codes, in arithmetic that TPU and GPU kernels can lower: no tables, no `ceil`.

* `soft8`: m = code / (254 - |code|), signed; v = ((code + 1) / 256)^2, which is never zero (FlashOptim, Gonzalez Ortiz
  et al. 2026, arXiv 2602.23349).
* `dynamic8`: seven decades, each with twice as many values as the decade below (Dettmers et al. 2021, arXiv
  2110.02861). They are the values of `bitsandbytes.functional.create_dynamic_map`, up to float32 arithmetic.

`jaxscale.lowbit.codebooks` has the same maps as tables (its int8 is `soft8` for m, and its `sqrt8` is `soft8` for v).
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

DECADES = 7
"""Number of decades of both dynamic maps."""


@dataclasses.dataclass(frozen=True)
class CodeMap:
    """The functions between codes and moments that are divided by the largest magnitude in their block.

    Args:
        m_dtype: dtype of the codes of first moments.
        m_zero: the code of a first moment of zero.
        decode_m: converts codes to first moments, float32 in [-1, 1].
        encode_m: converts first moments in [-1, 1] to codes, int32.
        decode_v: converts codes to second moments, float32 in [0, 1].
        encode_v: converts second moments in [0, 1] to codes, int32; the second argument is a square root function.
    """

    m_dtype: np.dtype
    m_zero: int
    decode_m: Callable[[Array], Array]
    encode_m: Callable[[Array], Array]
    decode_v: Callable[[Array], Array]
    encode_v: Callable[[Array, Callable[[Array], Array]], Array]


def _soft_decode_m(codes: Array) -> Array:
    """First moments from codes of `soft8`."""
    float_codes = codes.astype(jnp.float32)
    return float_codes / (254 - jnp.abs(float_codes))


def _soft_encode_m(m: Array) -> Array:
    """Codes of `soft8` from first moments."""
    return jnp.round(m * 254 / (1 + jnp.abs(m))).astype(jnp.int32)


def _soft_decode_v(codes: Array) -> Array:
    """Second moments from codes of `soft8`."""
    return jnp.square((codes.astype(jnp.float32) + 1) * (1 / 256))


def _soft_encode_v(v: Array, sqrt: Callable[[Array], Array]) -> Array:
    """Codes of `soft8` from second moments."""
    return jnp.round(jnp.maximum(sqrt(v) * 256, 1)).astype(jnp.int32) - 1


def dynamic_values(signed: bool) -> np.ndarray:
    """Return the positive values of the 8-bit dynamic map, ascending, float32; the last is 1.

    Decade i = 0 .. 6 has n = 2^i values in the signed map, and n = 2^(i + 1) in the unsigned map. The values are the
    midpoints of n equal parts of [0.1, 1], times 10^(i - 6).

    Args:
        signed: whether half of the codes are for negative numbers.

    Example:
        >>> dynamic_values(True)[-2:].round(4).tolist(), len(dynamic_values(True)), len(dynamic_values(False))
        ([0.9929999709129333, 1.0], 128, 255)
    """
    values = []
    for decade in range(DECADES):
        n = 2 ** (decade + (not signed))
        step, start = np.float64(np.float32(1 - np.float32(0.1)) / np.float32(n)), np.float64(np.float32(0.1))
        index = np.arange(n + 1)
        edges = np.where(index < (n + 1) // 2, start + step * index, 1.0 - step * (n - index)).astype(np.float32)
        values.append(np.float32(10.0 ** (decade - DECADES + 1)) * ((edges[:-1] + edges[1:]) / np.float32(2)))
    return np.append(np.concatenate(values), np.float32(1))


def _dynamic(signed: bool) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """The functions `decode` (ranks to magnitudes) and `encode` (magnitudes to ranks).

    A rank is the number of steps between a code and the code of zero. Value k of a decade with n values has the rank
    n + k in the signed map, and n + k - 1 in the unsigned map.
    """
    first_exponent, values = int(not signed), dynamic_values(signed)
    midpoints = (values[:-1] + values[1:]) / np.float32(2)
    zero_bound, one_bound, max_rank = float(values[0] / np.float32(2)), float(midpoints[-1]), len(values)
    # midpoints between the last value of a decade and the first of the next
    decade_bounds = [float(midpoints[2 ** (i + first_exponent) - 2**first_exponent - 1]) for i in range(1, DECADES)]
    powers_of_ten = [float(np.float32(10.0 ** (i - DECADES + 1))) for i in range(DECADES)]

    def encode(magnitude: Array) -> Array:
        n = jnp.full(magnitude.shape, float(2**first_exponent), jnp.float32)
        inverse_power = jnp.full(magnitude.shape, 10.0 ** (DECADES - 1), jnp.float32)
        for i, bound in enumerate(decade_bounds, 1):
            n = jnp.where(magnitude > bound, float(2 ** (i + first_exponent)), n)
            inverse_power = jnp.where(magnitude > bound, float(10 ** (DECADES - 1 - i)), inverse_power)
        position = (magnitude * inverse_power - 0.1) * (n * (1 / 0.9))
        floor = position.astype(jnp.int32).astype(jnp.float32)
        # halfway between two values, take the lower one
        k = jnp.minimum(jnp.maximum(jnp.where(floor == position, floor - 1, floor), 0.0), n - 1)
        rank = (n + k).astype(jnp.int32) - first_exponent
        return jnp.where(magnitude > one_bound, max_rank, jnp.where(magnitude > zero_bound, rank, 0))

    def decode(rank: Array) -> Array:
        n_plus_k = (rank + first_exponent).astype(jnp.float32)
        inverse_n = jnp.full(rank.shape, 0.5**first_exponent, jnp.float32)
        power_of_ten = jnp.full(rank.shape, powers_of_ten[0], jnp.float32)
        for i in range(1, DECADES):
            is_in_or_above = n_plus_k >= float(2 ** (i + first_exponent))
            inverse_n = jnp.where(is_in_or_above, 0.5 ** (i + first_exponent), inverse_n)
            power_of_ten = jnp.where(is_in_or_above, powers_of_ten[i], power_of_ten)
        magnitude = power_of_ten * (0.1 + 0.9 * ((n_plus_k + 0.5) * inverse_n - 1))
        return jnp.where(rank == max_rank, 1.0, jnp.where(rank == 0, 0.0, magnitude))

    return decode, encode


_ZERO_CODE = 2**DECADES - 1
"""The code of zero in the signed map."""
_DECODE_SIGNED, _ENCODE_SIGNED = _dynamic(True)
_DECODE_UNSIGNED, _ENCODE_UNSIGNED = _dynamic(False)


def _dynamic_decode_m(codes: Array) -> Array:
    """First moments from codes of `dynamic8`."""
    signed_ranks = codes.astype(jnp.int32) - _ZERO_CODE
    magnitudes = _DECODE_SIGNED(jnp.abs(signed_ranks))
    return jnp.where(signed_ranks < 0, -magnitudes, magnitudes)


def _dynamic_encode_m(m: Array) -> Array:
    """Codes of `dynamic8` from first moments; there is no code for -1."""
    ranks = _ENCODE_SIGNED(jnp.abs(m))
    return _ZERO_CODE + jnp.where(m < 0, -jnp.minimum(ranks, _ZERO_CODE), ranks)


def _dynamic_decode_v(codes: Array) -> Array:
    """Second moments from codes of `dynamic8`."""
    return _DECODE_UNSIGNED(codes.astype(jnp.int32))


def _dynamic_encode_v(v: Array, sqrt: Callable[[Array], Array]) -> Array:
    """Codes of `dynamic8` from second moments; the square root is not needed."""
    return _ENCODE_UNSIGNED(v)


MAPS: Mapping[str, CodeMap] = {
    "soft8": CodeMap(np.dtype(np.int8), 0, _soft_decode_m, _soft_encode_m, _soft_decode_v, _soft_encode_v),
    "dynamic8": CodeMap(
        np.dtype(np.uint8), _ZERO_CODE, _dynamic_decode_m, _dynamic_encode_m, _dynamic_decode_v, _dynamic_encode_v
    ),
}
"""All maps, by name."""
