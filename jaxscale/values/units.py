"""Numbers as texts for people, with few digits: counts, bytes, rates, durations. Programs do not parse these texts."""

import math
from collections.abc import Sequence

_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_BYTES = ((1024.0**5, "PiB"), (1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, digits: int = 4) -> str:
    """Return a measured number as text, with `digits` significant digits; "" for `None`.

    Example:
        >>> number(1.46872), number(0.000123456), number(float("nan")), number(None), number(1234567.0)
        ('1.469', '0.0001235', 'nan', '', '1,235,000')
    """
    if value is None:
        return ""
    if text := _text_beyond_floats(value):
        return text
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 9:
        mantissa, _, exponent_text = f"{value:.{digits - 1}e}".partition("e")
        return f"{_with_minus(mantissa)}e{int(exponent_text)}"
    rounded_value = round(value, digits - 1 - magnitude)
    decimal_count = max(0, digits - 1 - magnitude)
    return _with_minus(f"{rounded_value:,.{decimal_count}f}")


def count(value: float) -> str:
    """Return a count as text. Below 100,000 it is exact; from 100,000 on, it is rounded and has a decimal prefix.

    Example:
        >>> count(12), count(98765), count(1_536_000), count(8.03e9)
        ('12', '98,765', '1.54 M', '8.03 B')
    """
    if text := _text_beyond_floats(value):
        return text
    scaled_value, prefix = _scaled_value_and_unit(value, _COUNTS)
    if prefix:
        return f"{_three_digits(scaled_value)} {prefix}"
    return f"{value / 1e3:.0f} k" if abs(value) >= 1e5 else f"{round(value):,}"


def size(value: float) -> str:
    """Return a number of bytes as text, with a binary prefix.

    Example:
        >>> size(512), size(1_572_864), size(80 * 2**30)
        ('512 B', '1.50 MiB', '80.0 GiB')
    """
    if text := _text_beyond_floats(value):
        return f"{text} B"
    scaled_value, unit = _scaled_value_and_unit(value, _BYTES)
    return f"{_three_digits(scaled_value)} {unit}" if unit else f"{value:.0f} B"


def round_size(value: float) -> str:
    """Return a round number of bytes as text, for the ticks of an axis.

    Example:
        >>> round_size(20 * 2**30), round_size(0)
        ('20 GiB', '0')
    """
    scaled_value, unit = _scaled_value_and_unit(value, _BYTES)
    return f"{scaled_value:.4g} {unit or 'B'}" if value else "0"


def rate(value: float, unit: str) -> str:
    """Return a rate as text, with a decimal prefix before its unit.

    Example:
        >>> rate(3.21e12, "FLOP/s")
        '3.21 TFLOP/s'
    """
    if text := _text_beyond_floats(value):
        return f"{text} {unit}"
    scaled_value, prefix = _scaled_value_and_unit(value, _DECIMAL)
    return f"{_three_digits(scaled_value)} {prefix}{unit}"


def short(value: float) -> str:
    """Return a round number as text with a decimal prefix, for the ticks of an axis.

    Example:
        >>> short(20_000), short(2.5e9), short(0)
        ('20 k', '2.5 G', '0')
    """
    scaled_value, prefix = _scaled_value_and_unit(value, _DECIMAL)
    return f"{_with_minus(f'{scaled_value:.4g}')} {prefix}".rstrip()


def duration(seconds: float) -> str:
    """Return a duration as text, in one or two units from microseconds to days.

    Example:
        >>> duration(0.0042), duration(3.25), duration(75), duration(8000), duration(200_000)
        ('4.20 ms', '3.25 s', '1 min 15 s', '2 h 13 min', '2 d 7 h')
    """
    if _text_beyond_floats(seconds):
        return "unknown"
    if seconds < 60:
        if abs(seconds) >= 0.1:
            return f"{_three_digits(seconds)} s"
        is_short = 0 < abs(seconds) < 1e-5  # three digits of milliseconds would be 0.00
        return f"{_three_digits(seconds * 1e6)} us" if is_short else f"{_three_digits(seconds * 1e3)} ms"
    # (seconds in a unit, seconds in the next smaller unit, names of both units)
    scales = ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))
    for unit_seconds, smaller_seconds, unit, smaller_unit in scales:
        if seconds >= unit_seconds:
            smaller_count = int(seconds % unit_seconds // smaller_seconds)
            return f"{int(seconds // unit_seconds)} {unit} {smaller_count} {smaller_unit}"
    raise AssertionError(seconds)


def field(name: str, value: object) -> str:
    """Return the value of a metrics field as text, in the unit that the end of the field's name specifies.

    Example:
        >>> field("step_seconds", 0.25), field("temp_bytes", 2048), field("path", "checkpoints/500")
        ('250 ms', '2.00 KiB', 'checkpoints/500')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if text := _text_beyond_floats(value):
        return text
    if name.endswith("seconds"):
        return duration(value) if abs(value) >= 0.5 else f"{_three_digits(value * 1e3)} ms"
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("flop"):
        return rate(value, "FLOP")
    return count(value) if isinstance(value, int) else number(value)


def _text_beyond_floats(value: float) -> str:
    """Return "inf", "-inf" or "nan" if a number is not finite or beyond the range of floats; "" for other numbers."""
    try:
        return "" if math.isfinite(value) else _with_minus(repr(float(value)))
    except OverflowError:
        return _with_minus("inf" if value > 0 else "-inf")


def _scaled_value_and_unit(value: float, scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return a value in the largest unit that it reaches, and that unit; (value, "") if it is below all scales."""
    return next(((value / scale, unit) for scale, unit in scales if abs(value) >= scale), (value, ""))


def _three_digits(value: float) -> str:
    """Return a number as text with three significant digits, without an exponent."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - max(0, math.floor(math.log10(abs(value)))))}f}"


def _with_minus(text: str) -> str:
    """Return a text with minus signs instead of hyphens."""
    return text.replace("-", "\N{MINUS SIGN}")
