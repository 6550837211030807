r"""Maps between low-bit codes and values of magnitude at most 1, for quantized arrays.

* `soft8` for first moments and `sqrt8` for second moments compress the range of values by arithmetic (FlashOptim,
  Gonzalez Ortiz et al. 2026, arXiv 2602.23349). In contrast to that paper, no value of `sqrt8` is zero, as Li et al.
  recommend: a root that is rounded to zero makes an update many times too large.
* `dynamic8`, `dynamic8_unsigned` and `dynamic4` have decades (powers of ten), each with twice as many values as the
  decade below (Dettmers et al. 2021, arXiv 2110.02861); the values equal `bitsandbytes.functional.create_dynamic_map`.
* `linear4_unsigned` has the values :math:`(k + 1) / 16`, in four bits and without zero (Li et al. 2023, arXiv
  2309.01507).
* `e4m3` and `sqrt_e4m3` are eight-bit floating point, for a first moment and for the root of a second moment.
* `nf4` is for weights: its values are quantiles of the normal distribution (Dettmers et al. 2023, "QLoRA", arXiv
  2305.14314); `linear4` and `linear8` are for weights too, with equal steps.

Every map is computed by elementwise arithmetic: on TPU a table lookup is a gather, which costs three thousand times
the traffic. The table `Map.table` defines the map. Left out: quantile maps, which need a sort.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import UserError, unknown
from jaxscale.typing import Array

Elementwise = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Map:
    """A map between low-bit codes and float32 values.

    Args:
        name: key of the map in `MAPS`.
        dtype: dtype of the codes.
        is_signed: whether values are from -1 to 1; otherwise, they are from 0 to 1.
        zero_code: code of every element of an array of zeros. It need not decode to 0, because the array's scale is 0.
        encode: function from float32 values of magnitude at most 1 to the nearest codes; ties go to the lower code in
            dynamic maps and in `nf4`, and to the even code in all other maps.
        decode: function from codes to float32 values.

    Example:
        >>> m = MAPS["dynamic8"]
        >>> int(m.encode(jnp.float32(0.5))), round(float(m.decode(jnp.uint8(255))), 3), m.bits
        (219, 1.0, 8)
    """

    name: str
    dtype: np.dtype
    is_signed: bool
    zero_code: int
    encode: Elementwise
    decode: Elementwise

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return int(jnp.iinfo(self.dtype).bits if self.is_integer else jnp.finfo(self.dtype).bits)

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, so that neighboring values have consecutive codes."""
        return bool(jnp.issubdtype(self.dtype, jnp.integer))

    @property
    def code_limits(self) -> tuple[int, int]:
        """The lowest and the highest code of a map with integer codes."""
        highest_code = int(jnp.iinfo(self.dtype).max)
        return -highest_code if jnp.issubdtype(self.dtype, jnp.signedinteger) else 0, highest_code

    @property
    def table(self) -> np.ndarray:
        """The float32 values of all codes, in ascending order; for dynamic maps, exactly those of bitsandbytes."""
        if self.name.startswith("dynamic"):
            return dynamic_table(self.bits, self.is_signed)
        if self.is_integer:
            lowest_code, highest_code = self.code_limits
            codes = np.arange(lowest_code, highest_code + 1)
        else:
            codes = np.arange(2**self.bits, dtype=np.uint8).view(self.dtype).astype(np.float32)
            codes = codes[np.isfinite(codes) & (codes >= (-np.inf if self.is_signed else 0))]
        with jax.ensure_compile_time_eval():
            return np.unique(np.asarray(self.decode(jnp.asarray(codes).astype(self.dtype))))


def dynamic_table(bits: int, is_signed: bool) -> np.ndarray:
    r"""Return the values of a dynamic map in ascending order, float32.

    For :math:`b` bits, decade :math:`i = 0 \dots b - 2` has :math:`n = 2^i` values, or :math:`2^{i + 1}` if unsigned:
    the midpoints of :math:`n` equal parts of :math:`[0.1, 1]`, times :math:`10^{i - b + 2}`. The values 0 and 1 are
    added, but not -1.

    Args:
        bits: number of bits of a code.
        is_signed: whether half of the codes are for numbers below 0.

    Returns:
        `2**bits` values, bit for bit those of bitsandbytes. There, `torch.linspace` counts up from the start to the
        middle and down from the end to the middle, in multiples of a float32 step, by a fused multiply-add.

    Example:
        >>> dynamic_table(4, True).round(4)[7:].tolist()  # doctest: +NORMALIZE_WHITESPACE
        [0.0, 0.005499999970197678, 0.032499998807907104, 0.07750000059604645, 0.21250000596046448, 0.4375,
         0.6625000238418579, 0.887499988079071, 1.0]
    """
    values = [0.0, 1.0]
    decade_count = bits - 1
    for decade in range(decade_count):
        n = 2 ** (decade if is_signed else decade + 1)
        step, first_edge = np.float64(np.float32(1 - np.float32(0.1)) / np.float32(n)), np.float64(np.float32(0.1))
        edge_indices = np.arange(n + 1)
        edges = np.where(
            edge_indices < (n + 1) // 2, first_edge + step * edge_indices, 1.0 - step * (n - edge_indices)
        ).astype(np.float32)
        midpoints = np.float32(10.0 ** (decade - decade_count + 1)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += midpoints.tolist() + ((-midpoints).tolist() if is_signed else [])
    return np.sort(np.asarray(values, np.float32))


def _dynamic_map(name: str, bits: int, is_signed: bool, dtype: type) -> Map:
    """Return a dynamic map, which encodes and decodes by arithmetic instead of by a table.

    A decade has n bins: 2**first_exponent in the first decade, and twice as many in each further decade. The distance
    of a code from the code of zero is n + bin - first_exponent.
    """
    table = dynamic_table(bits, is_signed)
    decade_count, first_exponent = bits - 1, 0 if is_signed else 1
    positive_values = table[table > 0]  # the last is 1
    midpoints = (positive_values[:-1] + positive_values[1:]) / np.float32(2)
    # the greatest magnitude that rounds to 0, and the greatest one that rounds to the value next below 1
    zero_limit, one_limit = float(positive_values[0] / np.float32(2)), float(midpoints[-1])
    # midpoints between the last value of a decade and the first of the next
    decade_limits = [
        float(midpoints[2 ** (i + first_exponent) - 2**first_exponent - 1]) for i in range(1, decade_count)
    ]
    decade_tops = [float(np.float32(10.0 ** (i - decade_count + 1))) for i in range(decade_count)]
    zero_code, top_distance = (2**decade_count - 1, 2**decade_count) if is_signed else (0, 2**bits - 1)

    def encode(numbers: Array) -> Array:
        """Return the codes of float32 values of magnitude at most 1."""
        magnitude = jnp.abs(numbers)
        decade = jnp.zeros(magnitude.shape, jnp.int32)
        inverse_top = jnp.full(magnitude.shape, 10.0 ** (decade_count - 1), jnp.float32)
        for i, decade_limit in enumerate(decade_limits, 1):
            is_above = magnitude > decade_limit
            decade = jnp.where(is_above, i, decade)
            inverse_top = jnp.where(is_above, float(10 ** (decade_count - 1 - i)), inverse_top)
        # 2**(decade + first_exponent), made from the bits of a float32
        bin_count = jax.lax.bitcast_convert_type((decade + (first_exponent + 127)) << 23, jnp.float32)
        bin_index = jnp.clip(jnp.ceil((magnitude * inverse_top - 0.1) * (bin_count * (1 / 0.9))) - 1, 0, bin_count - 1)
        distance = (bin_count + bin_index).astype(jnp.int32) - first_exponent
        distance = jnp.where(magnitude > one_limit, top_distance, jnp.where(magnitude > zero_limit, distance, 0))
        if not is_signed:
            return distance.astype(dtype)
        signed_distance = jnp.where(numbers < 0, -jnp.minimum(distance, top_distance - 1), distance)
        return (zero_code + signed_distance).astype(dtype)

    def decode(codes: Array) -> Array:
        """Return the float32 values of codes."""
        signed_distance = codes.astype(jnp.int32) - zero_code
        count_plus_index = jnp.abs(signed_distance) + first_exponent
        exponent = jax.lax.bitcast_convert_type(jnp.maximum(count_plus_index, 1).astype(jnp.float32), jnp.int32) >> 23
        inverse_bin_count = jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)  # 1 / n
        decade_top = jnp.full(signed_distance.shape, decade_tops[-1], jnp.float32)
        for i in range(decade_count - 2, -1, -1):
            decade_top = jnp.where(exponent <= 127 + first_exponent + i, decade_tops[i], decade_top)
        magnitude = decade_top * (0.1 + 0.9 * ((count_plus_index.astype(jnp.float32) + 0.5) * inverse_bin_count - 1))
        magnitude = jnp.where(signed_distance == top_distance, 1.0, jnp.where(signed_distance == 0, 0.0, magnitude))
        return jnp.where(signed_distance < 0, -magnitude, magnitude) if is_signed else magnitude

    return Map(name, jnp.dtype(dtype), is_signed, zero_code, encode, decode)


def _soft8_encode(numbers: Array) -> Array:
    return jnp.round(numbers * 254 / (1 + jnp.abs(numbers))).astype(jnp.int8)


def _soft8_decode(codes: Array) -> Array:
    float_codes = codes.astype(jnp.float32)
    # 127 decodes to exactly 1, so that an array that is decoded and encoded again is unchanged
    return float_codes / (254 - jnp.abs(float_codes))


def _sqrt8_encode(numbers: Array) -> Array:
    return (jnp.maximum(jnp.round(jnp.sqrt(numbers) * 256), 1) - 1).astype(jnp.uint8)


def _sqrt8_decode(codes: Array) -> Array:
    return jnp.square((codes.astype(jnp.float32) + 1) * (1 / 256))


def _linear4_encode(numbers: Array) -> Array:
    return (jnp.maximum(jnp.round(numbers * 16), 1) - 1).astype(jnp.int32).astype(jnp.uint4)


def _linear4_decode(codes: Array) -> Array:
    return (codes.astype(jnp.int32).astype(jnp.float32) + 1) * (1 / 16)


NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of `nf4` in ascending order: Dettmers et al. 2023, arXiv 2305.14314, appendix E."""


def _nf4_encode(numbers: Array) -> Array:
    table = np.asarray(NF4_VALUES, np.float32)
    codes = jnp.zeros(numbers.shape, jnp.int32)
    for midpoint in (table[:-1] + table[1:]) / np.float32(2):
        codes += (numbers > float(midpoint)).astype(jnp.int32)
    return codes.astype(jnp.uint4)


def _nf4_decode(codes: Array) -> Array:
    # Each bit of the code halves the candidates: of each pair, the product with the bit or with its opposite is 0.
    # `jnp.where` would need arrays of constants, which a scan over layers keeps in memory.
    remaining_bits = codes.astype(jnp.int32)
    candidates: list[Any] = list(NF4_VALUES)
    while len(candidates) > 1:
        bit, remaining_bits = (remaining_bits & 1).astype(jnp.float32), remaining_bits >> 1
        opposite = 1 - bit
        candidates = [even * opposite + odd * bit for even, odd in zip(candidates[::2], candidates[1::2], strict=True)]
    return candidates[0]


def _linear_map(name: str, dtype: type) -> Map:
    """Return the map from codes of a signed integer dtype to evenly spaced values from -1 to 1, including 0."""
    top = float(jnp.iinfo(dtype).max)
    return Map(
        name,
        jnp.dtype(dtype),
        True,
        0,
        lambda numbers: jnp.round(numbers * top).astype(jnp.int32).astype(dtype),
        lambda codes: codes.astype(jnp.int32).astype(jnp.float32) / top,
    )


def _e4m3_encode(numbers: Array) -> Array:
    return (numbers * 448).astype(jnp.float8_e4m3fn)


def _e4m3_decode(codes: Array) -> Array:
    return codes.astype(jnp.float32) * (1 / 448)


def _sqrt_e4m3_encode(numbers: Array) -> Array:
    return (jnp.sqrt(numbers) * 448).astype(jnp.float8_e4m3fn)


def _sqrt_e4m3_decode(codes: Array) -> Array:
    return jnp.square(codes.astype(jnp.float32) * (1 / 448))


_ALL_MAPS = (
    Map("soft8", jnp.dtype(jnp.int8), True, 0, _soft8_encode, _soft8_decode),
    Map("sqrt8", jnp.dtype(jnp.uint8), False, 0, _sqrt8_encode, _sqrt8_decode),
    _dynamic_map("dynamic8", 8, True, jnp.uint8),
    _dynamic_map("dynamic8_unsigned", 8, False, jnp.uint8),
    _dynamic_map("dynamic4", 4, True, jnp.uint4),
    Map("linear4_unsigned", jnp.dtype(jnp.uint4), False, 0, _linear4_encode, _linear4_decode),
    Map("nf4", jnp.dtype(jnp.uint4), True, NF4_VALUES.index(0.0), _nf4_encode, _nf4_decode),
    _linear_map("linear4", jnp.int4),
    _linear_map("linear8", jnp.int8),
    Map("e4m3", jnp.dtype(jnp.float8_e4m3fn), True, 0, _e4m3_encode, _e4m3_decode),
    Map("sqrt_e4m3", jnp.dtype(jnp.float8_e4m3fn), False, 0, _sqrt_e4m3_encode, _sqrt_e4m3_decode),
)

MAPS: Mapping[str, Map] = {m.name: m for m in _ALL_MAPS}
"""Every map by name."""


def map_of(name: str) -> Map:
    """Return the map with this name.

    Raises:
        UserError: the name is unknown.
    """
    if name not in MAPS:
        raise unknown("map", name, MAPS)
    return MAPS[name]


def encode_by_table(numbers: Array, map: Map) -> Array:
    """Return, for each input value, the index of the nearest value in a map's table; this defines `Map.encode`.

    Args:
        numbers: float32 values of magnitude at most 1.
        map: any map; ties go to the lower value.
    """
    midpoints = (map.table[:-1] + map.table[1:]) / np.float32(2)
    return jnp.searchsorted(jnp.asarray(midpoints), numbers, side="left")


def neighbor(map: Map, codes: Array, is_above: Array) -> Array:
    """Return the next higher or lower codes, to which stochastic rounding may round instead of the nearest codes.

    A code stays unchanged if it is the highest code and a higher one is requested, or the lowest and a lower one is.

    Args:
        map: map with integer codes.
        codes: codes of this map.
        is_above: bool array like `codes`, true for the next higher code, false for the next lower one.

    Raises:
        UserError: the map has floating-point codes.
    """
    if not map.is_integer:
        raise UserError(f"map {map.name!r} can't round stochastically; use a map with integer codes, such as 'soft8'")
    neighbors = codes.astype(jnp.int32) + jnp.where(is_above, 1, -1)
    return jnp.clip(neighbors, *map.code_limits).astype(map.dtype)
