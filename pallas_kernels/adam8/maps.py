r"""The codes of 8 bits that stand for moments, by arithmetic that TPU and GPU kernels lower: no table, no `ceil`.

* `soft8`, of both moments: m = code / (254 - |code|), signed; v = ((code + 1) / 256)^2 (FlashOptim, Gonzalez Ortiz et
  al. 2026, arXiv 2602.23349; no zero among the levels of v).
* `dynamic8`: seven decades, each with twice the levels of the one below (Dettmers et al. 2021, arXiv 2110.02861), value
  for value those of `bitsandbytes.functional.create_dynamic_map`, so far as float32 arithmetic gives them.

`jaxscale.lowbit.codebooks` has the same maps (its int8 is `soft8` of m and `sqrt8` of v), with their tables.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

DECADES = 7
"""Of both dynamic maps."""


@dataclasses.dataclass(frozen=True)
class CodeMap:
    """How first and second moments, divided by the largest of their block, are kept.

    Args:
        m_dtype: of the codes of m.
        m_zero: the code of zero.
        decode_m: from codes to float32 in [-1, 1].
        encode_m: from float32 in [-1, 1] to codes, as int32.
        decode_v: from codes to float32 in [0, 1].
        encode_v: from float32 in [0, 1] to codes, as int32; takes the square root to use.
    """

    m_dtype: np.dtype
    m_zero: int
    decode_m: Callable[[Array], Array]
    encode_m: Callable[[Array], Array]
    decode_v: Callable[[Array], Array]
    encode_v: Callable[[Array, Callable[[Array], Array]], Array]


def _soft_decode(code: Array) -> Array:
    t = code.astype(jnp.float32)
    return t / (254 - jnp.abs(t))


def _soft_encode(y: Array) -> Array:
    return jnp.round(y * 254 / (1 + jnp.abs(y))).astype(jnp.int32)


def _root_decode(code: Array) -> Array:
    return jnp.square((code.astype(jnp.float32) + 1) * (1 / 256))


def _root_encode(y: Array, sqrt: Callable[[Array], Array]) -> Array:
    return jnp.round(jnp.maximum(sqrt(y) * 256, 1)).astype(jnp.int32) - 1


def dynamic_values(signed: bool) -> np.ndarray:
    """The values above zero of the dynamic map of 8 bits, ascending, float32; the last is 1.

    Decade i = 0 .. 6 has n = 2^i of them (of the unsigned map 2^(i + 1)): the middles of n equal parts of [0.1, 1],
    times 10^(i - 6).

    Args:
        signed: half of the codes for numbers below 0.

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
    """Decode and encode of a code's distance from zero, which is n + k for bin k of the n of its decade."""
    first, values = int(not signed), dynamic_values(signed)
    middles = (values[:-1] + values[1:]) / np.float32(2)
    lowest, last, top = float(values[0] / np.float32(2)), float(middles[-1]), len(values)
    # between the last value of a decade and the first of the next
    bounds = [float(middles[2 ** (i + first) - 2**first - 1]) for i in range(1, DECADES)]
    tens = [float(np.float32(10.0 ** (i - DECADES + 1))) for i in range(DECADES)]

    def encode(a: Array) -> Array:
        n = jnp.full(a.shape, float(2**first), jnp.float32)
        up = jnp.full(a.shape, 10.0 ** (DECADES - 1), jnp.float32)
        for i, bound in enumerate(bounds, 1):
            n = jnp.where(a > bound, float(2 ** (i + first)), n)
            up = jnp.where(a > bound, float(10 ** (DECADES - 1 - i)), up)
        z = (a * up - 0.1) * (n * (1 / 0.9))
        whole = z.astype(jnp.int32).astype(jnp.float32)
        k = jnp.minimum(jnp.maximum(jnp.where(whole == z, whole - 1, whole), 0.0), n - 1)  # of two as near, the lower
        distance = (n + k).astype(jnp.int32) - first
        return jnp.where(a > last, top, jnp.where(a > lowest, distance, 0))

    def decode(code: Array) -> Array:
        distance = (code + first).astype(jnp.float32)
        inverse = jnp.full(code.shape, 0.5**first, jnp.float32)
        ten = jnp.full(code.shape, tens[0], jnp.float32)
        for i in range(1, DECADES):
            above = distance >= float(2 ** (i + first))
            inverse = jnp.where(above, 0.5 ** (i + first), inverse)
            ten = jnp.where(above, tens[i], ten)
        value = ten * (0.1 + 0.9 * ((distance + 0.5) * inverse - 1))
        return jnp.where(code == top, 1.0, jnp.where(code == 0, 0.0, value))

    return decode, encode


_MIDDLE = 2**DECADES - 1
_DECODE_SIGNED, _ENCODE_SIGNED = _dynamic(True)
_DECODE_UNSIGNED, _ENCODE_UNSIGNED = _dynamic(False)


def _dynamic_decode_m(code: Array) -> Array:
    code = code.astype(jnp.int32) - _MIDDLE
    value = _DECODE_SIGNED(jnp.abs(code))
    return jnp.where(code < 0, -value, value)


def _dynamic_encode_m(y: Array) -> Array:
    distance = _ENCODE_SIGNED(jnp.abs(y))
    return _MIDDLE + jnp.where(y < 0, -jnp.minimum(distance, _MIDDLE), distance)


def _dynamic_decode_v(code: Array) -> Array:
    return _DECODE_UNSIGNED(code.astype(jnp.int32))


def _dynamic_encode_v(y: Array, sqrt: Callable[[Array], Array]) -> Array:
    return _ENCODE_UNSIGNED(y)


MAPS: Mapping[str, CodeMap] = {
    "soft8": CodeMap(np.dtype(np.int8), 0, _soft_decode, _soft_encode, _root_decode, _root_encode),
    "dynamic8": CodeMap(
        np.dtype(np.uint8), _MIDDLE, _dynamic_decode_m, _dynamic_encode_m, _dynamic_decode_v, _dynamic_encode_v
    ),
}
"""Every map by name."""
