"""Conversion of texts such as `1.5GiB` or `200MB` to numbers of bytes, and back without loss."""

import re
from decimal import Decimal

from jaxscale.errors import UserError, near_miss

UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
}
"""Number of bytes in each unit: 1 KiB is 1024 bytes, and 1 KB is 1000 bytes."""


def parse_bytes(text: str, quantity: str = "bytes") -> int:
    """Return the number of bytes in a text such as "1.5GiB".

    Args:
        text: a number and a unit; "0" needs no unit.
        quantity: name of the quantity, for the beginning of error messages.

    Raises:
        UserError: the text is not a number >= 0 with a known unit, or is not a whole number of bytes.

    Example:
        >>> parse_bytes("1.5GiB"), parse_bytes("200 MB"), parse_bytes("0")
        (1610612736, 200000000, 0)
        >>> parse_bytes("12Gb", "--limit")
        Traceback (most recent call last):
        jaxscale.errors.UserError: --limit '12Gb': unknown unit 'Gb'; did you mean 'GB'? (B, KiB to PiB, KB to PB)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise UserError(f"{quantity} {text!r}: expected a number of bytes with its unit, such as 136MiB or 1.5GiB")
    number, unit = Decimal(match[1]), match[2]
    if not unit and number:
        raise UserError(f"{quantity} {text!r}: a unit is missing; write {match[1]}GiB, {match[1]}MiB or {match[1]}B")
    if unit and unit not in UNITS:
        same_letter_unit = next((known_unit for known_unit in UNITS if known_unit.lower() == unit.lower()), None)
        suggestion = near_miss(unit, UNITS) if same_letter_unit is None else f"; did you mean {same_letter_unit!r}?"
        raise UserError(f"{quantity} {text!r}: unknown unit {unit!r}{suggestion} (B, KiB to PiB, KB to PB)")
    byte_count = number * UNITS[unit or "B"]
    if unit in ("", "B") and byte_count != int(byte_count):
        raise UserError(f"{quantity} {text!r}: expected a whole number of bytes, got a fraction of a byte")
    return int(byte_count)


def limit_bytes(limit: int | str | None, name: str) -> int | None:
    """Return the number of bytes that a limit specifies; `None` for no limit.

    Args:
        limit: a number of bytes, a text such as "12GiB", or `None`.
        name: name of the argument, for messages.

    Raises:
        UserError: the text is not a number of bytes, or the limit is below one byte.

    Example:
        >>> limit_bytes("12GiB", "limit"), limit_bytes(4096, "limit"), limit_bytes(None, "limit")
        (12884901888, 4096, None)
    """
    if limit is not None and not isinstance(limit, int | str):
        raise UserError(f"{name}: got {limit!r}, expected a whole number of bytes, or a text such as 12GiB")
    byte_count = parse_bytes(limit, name) if isinstance(limit, str) else limit
    if byte_count is not None and byte_count < 1:
        raise UserError(
            f"{name}: got {byte_count} bytes, expected at least 1; omit {name} to allow all the memory that programs "
            "may use"
        )
    return byte_count


def bytes_text(byte_count: int) -> str:
    """Return the shortest text from which `parse_bytes` returns exactly this number of bytes.

    Example:
        >>> bytes_text(1610612736), bytes_text(200_000_000), bytes_text(1001), bytes_text(0)
        ('1.5GiB', '200MB', '1001B', '0B')
    """
    exact_texts = [f"{byte_count}B"]
    for unit, unit_bytes in UNITS.items():
        if byte_count >= unit_bytes > 1:
            number_text = f"{(Decimal(byte_count) / unit_bytes).normalize():f}"
            if parse_bytes(number_text + unit) == byte_count:
                exact_texts.append(number_text + unit)
    return min(exact_texts, key=len)


def bytes_at_least(byte_count: int) -> str:
    """Return a readable text for a budget that is at least `byte_count` bytes, and at most 1 % larger.

    Example:
        >>> bytes_at_least(5_308_186_624), bytes_at_least(27136), bytes_at_least(12)
        ('4.95GiB', '26.5KiB', '12B')
    """
    unit = next((name for name in ("PiB", "TiB", "GiB", "MiB", "KiB") if byte_count >= UNITS[name]), "B")
    hundredths = -(-byte_count * 100 // UNITS[unit])  # number of hundredths of the unit, rounded up
    return f"{(Decimal(hundredths) / 100).normalize():f}{unit}"


def short_budget(byte_count: int) -> int:
    """Round a budget up by at most 0.8 %, to a number of bytes whose `bytes_text` is short.

    Example:
        >>> bytes_text(1_215_968_048), bytes_text(short_budget(1_215_968_048)), short_budget(96)
        ('1215968048B', '1160MiB', 96)
    """
    power_of_two = 2 ** max(byte_count.bit_length() - 8, 0)
    return -(-byte_count // power_of_two) * power_of_two
