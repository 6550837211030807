"""Tiles of a kernel on a chip: tuned tiles from `tiles/<chip>.json`, or else tiles by the kernel's own rule.

A file is a list of entries. An entry has the kernel, the case, the tiles, and how the tiles were measured:

    {"kernel": "attention.forward", "case": {"dtype": "bfloat16", "T": 4096, "H": 128, "mask": "causal"},
     "tiles": {"q": 512, "kv": 512}, "measured": "...", "date": "2026-11-22", "jax": "0.12.0.1", "command": "..."}

An entry applies to a case if all texts in the two cases are equal, and all numbers are within a factor of two of each
other. If several entries apply, the nearest is used: the entry with the smallest sum of |log2| ratios of the numbers.
If none applies, the kernel's rule is used. Nothing is tuned while a program runs.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

FOLDER = pathlib.Path(__file__).parent / "tiles"

T = TypeVar("T")
"""A kernel's `Tiles` class."""

Case = Mapping[str, int | str]
"""The facts about a case on which tiles depend, by name."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The rectangle of an array that one step of the grid works on.

    Args:
        rows: number of rows of the rectangle.
        cols: number of columns of the rectangle.

    Raises:
        ValueError: a number is less than 1.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"got tiles of {self.rows} by {self.cols}, expected 1 or more of each; or leave tiles out")


def check_tiles(kernel: str, tiles: T, implementation: str | None, allowed: Sequence[T]) -> None:
    """Refuse tiles that the case does not allow, or that the implementation would ignore.

    Args:
        kernel: name of the kernel, for the error message.
        tiles: the tiles that the caller passed.
        implementation: the implementation that the caller named; only "tpu" uses tiles.
        allowed: all tiles that can run the case.

    Raises:
        ValueError: the implementation is not "tpu", or the tiles are not among the allowed ones.

    Example:
        >>> check_tiles("quantize", Tiles(96, 128), "tpu", [Tiles(128, 128)])
        Traceback (most recent call last):
        ValueError: quantize: got tiles Tiles(rows=96, cols=128), expected for these shapes one of \
Tiles(rows=128, cols=128); or leave tiles out
    """
    if implementation != "tpu":
        raise ValueError(
            f"{kernel}: tiles belong to the named kernel 'tpu', and not to {implementation!r}: "
            "pass implementation='tpu', or leave tiles out"
        )
    if tiles not in allowed:
        raise ValueError(
            f"{kernel}: got tiles {tiles}, expected for these shapes one of {', '.join(map(str, allowed[:4]))}"
            f"{', ..' * (len(allowed) > 4)}; or leave tiles out"
        )


@functools.cache
def entries(chip: str) -> tuple[Mapping[str, Any], ...]:
    """Read the entries of a chip's file; an empty tuple if there is no file."""
    file = FOLDER / f"{chip}.json"
    return tuple(json.loads(file.read_text())) if file.is_file() else ()


def tiles(
    kernel: str,
    chip: str | None,
    case: Case,
    make: Callable[..., T],
    rule: Callable[[], T],
    fits: Callable[[T], bool] = lambda tiles: True,
) -> T:
    """Choose the tiles for a case: those of the nearest usable entry, or else those of `rule`.

    Args:
        kernel: name of the kernel: "attention.forward", ..
        chip: "v5e", "h200", ..; None if the chip is unknown: then `rule` applies.
        case: the facts on which tiles depend: positive numbers and texts, by the names that all entries of the kernel
            use.
        make: the kernel's frozen `Tiles` class, which checks its arguments.
        rule: a function that returns the kernel's own choice.
        fits: a function that returns whether tiles can run this case; the tiles of an entry may be for another shape.

    Example:
        >>> tiles("none", "v5e", {"T": 3}, dict, lambda: {"q": 8})
        {'q': 8}
    """
    distances_and_fields: list[tuple[float, Mapping[str, Any]]] = []
    for entry in entries(chip) if chip else ():
        entry_case = entry["case"]
        if entry["kernel"] == kernel and entry_case.keys() == case.keys():
            distance = sum(_distance(entry_case[name], case[name]) for name in case)
            distances_and_fields += [(distance, entry["tiles"])] if math.isfinite(distance) else []
    for _, fields in sorted(distances_and_fields, key=lambda pair: pair[0]):
        candidate = make(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
        if fits(candidate):
            return candidate
    return rule()


def _distance(a: int | str, b: int | str) -> float:
    """Distance |log2(a / b)| between two facts; infinite if it is more than 1, or between different texts."""
    if isinstance(a, str) or isinstance(b, str):
        return 0.0 if a == b else math.inf
    distance = abs(math.log2(a / b))
    return distance if distance <= 1 else math.inf
