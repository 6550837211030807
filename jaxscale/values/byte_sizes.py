"""Numbers of bytes as users write them, `1.5GiB` or `200MB`, and back without loss."""

import re
from decimal import Decimal

from jaxscale.errors import UserError, near_miss

UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
}
"""Bytes of each unit: KiB is 1024 bytes, KB is 1000."""


def parse_bytes(text: str, quantity: str = "bytes") -> int:
    """Read a number of bytes from a text such as "1.5GiB".

    Args:
        text: a number and a unit; "0" alone needs no unit.
        quantity: name of the quantity, which begins error messages.

    Raises:
        UserError: the text is no number >= 0 with a known unit, or is a fraction of a byte.

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
        suggestion = next((f"; did you mean {known!r}?" for known in UNITS if known.lower() == unit.lower()), None)
        suggestion = suggestion or near_miss(unit, UNITS)
        raise UserError(f"{quantity} {text!r}: unknown unit {unit!r}{suggestion} (B, KiB to PiB, KB to PB)")
    count = number * UNITS[unit or "B"]
    if unit in ("", "B") and count != int(count):
        raise UserError(f"{quantity} {text!r}: expected a whole number of bytes, got a fraction of a byte")
    return int(count)


def limit_bytes(limit: int | str | None, name: str) -> int | None:
    """The bytes of a limit, which is a number, or a text such as "12GiB"; `None` without a limit.

    Args:
        limit: the limit.
        name: name of the argument, for messages.

    Raises:
        UserError: the text is no number of bytes, or the limit is below one byte.

    Example:
        >>> limit_bytes("12GiB", "limit"), limit_bytes(4096, "limit"), limit_bytes(None, "limit")
        (12884901888, 4096, None)
    """
    if limit is not None and not isinstance(limit, int | str):
        raise UserError(f"{name}: got {limit!r}, expected a whole number of bytes, or a text such as 12GiB")
    count = parse_bytes(limit, name) if isinstance(limit, str) else limit
    if count is not None and count < 1:
        raise UserError(f"{name}: got {count} bytes, expected at least 1; leave it out for what programs may use")
    return count


def bytes_text(count: int) -> str:
    """Return the shortest text that `parse_bytes` reads back as exactly this number.

    Example:
        >>> bytes_text(1610612736), bytes_text(200_000_000), bytes_text(1001), bytes_text(0)
        ('1.5GiB', '200MB', '1001B', '0B')
    """
    exact_texts = [f"{count}B"]
    for unit, scale in UNITS.items():
        if count >= scale > 1:
            number_text = f"{(Decimal(count) / scale).normalize():f}"
            if parse_bytes(number_text + unit) == count:
                exact_texts.append(number_text + unit)
    return min(exact_texts, key=len)


def bytes_at_least(count: int) -> str:
    """Return a readable text of a budget of at least `count` bytes, and of at most 1 % more.

    Example:
        >>> bytes_at_least(5_308_186_624), bytes_at_least(27136), bytes_at_least(12)
        ('4.95GiB', '26.5KiB', '12B')
    """
    unit = next((name for name in ("PiB", "TiB", "GiB", "MiB", "KiB") if count >= UNITS[name]), "B")
    hundredths = -(-count * 100 // UNITS[unit])
    return f"{(Decimal(hundredths) / 100).normalize():f}{unit}"


def short_budget(count: int) -> int:
    """Return a budget of at least `count` bytes, and of at most 0.8 % more, whose `bytes_text` is short.

    Example:
        >>> bytes_text(1_215_968_048), bytes_text(short_budget(1_215_968_048)), short_budget(96)
        ('1215968048B', '1160MiB', 96)
    """
    multiple = 2 ** max(count.bit_length() - 8, 0)
    return -(-count // multiple) * multiple
