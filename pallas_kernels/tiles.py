"""Tiles of a kernel on a chip: the tuned ones, from `tiles/<chip>.json`, else those of the kernel's own rule.

A file is a list of entries; an entry holds the kernel and the case, the tiles, and how they were measured:

    {"kernel": "attention.forward", "case": {"dtype": "bfloat16", "T": 4096, "H": 128, "mask": "causal"},
     "tiles": {"q": 512, "kv": 512}, "measured": "...", "date": "2026-11-22", "jax": "0.12.0.1", "command": "..."}

Lookup: the nearest entry with the same texts and every number within a factor of two (by the sum of distances in
powers of two), else the rule: an entry is no evidence for cases farther away. Nothing is tuned while a program runs.
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

Case = Mapping[str, int | str]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one step of the grid works on, where that is a rectangle of one array.

    Args:
        rows: of the array.
        cols: of the array.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"got tiles of {self.rows} by {self.cols}, expected 1 or more of each; or leave tiles out")


def check(kernel: str, tiles: T, implementation: str | None, allowed: Sequence[T]) -> None:
    """Refuse tiles that a case cannot use, or that no kernel would read.

    Args:
        kernel: its name, for the message.
        tiles: given.
        implementation: that the caller names.
        allowed: those that can run the case.

    Raises:
        ValueError: tiles of no named TPU kernel, or not among those allowed.

    Example:
        >>> check("quantize", Tiles(96, 128), "tpu", [Tiles(128, 128)])
        Traceback (most recent call last):
        ValueError: quantize: got tiles Tiles(rows=96, cols=128), expected for these shapes one of \
Tiles(rows=128, cols=128); or leave tiles out
    """
    if implementation != "tpu":
        raise ValueError(
            f"{kernel}: tiles belong to the named kernel 'tpu', and not to {implementation!r}: "
            "say implementation='tpu'; or leave tiles out"
        )
    if tiles not in allowed:
        raise ValueError(
            f"{kernel}: got tiles {tiles}, expected for these shapes one of {', '.join(map(str, allowed[:4]))}"
            f"{', ..' * (len(allowed) > 4)}; or leave tiles out"
        )


@functools.cache
def entries(chip: str) -> tuple[Mapping[str, Any], ...]:
    """All that was tuned for a chip; nothing where there is no file."""
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
    """The tiles for a case: those of the nearest entry that is near enough, else the rule's.

    Args:
        kernel: "attention.forward", ..
        chip: "v5e", "h200", ..; None: the rule.
        case: facts that tiles depend on, the same names in every entry of a kernel: positive numbers, for which an
            entry holds from a half to twice its own; and texts, for which it holds alone.
        make: the kernel's frozen `Tiles` class, which checks what it is given.
        rule: the kernel's own choice.
        fits: whether tiles that were found for another shape can run this one.

    Example:
        >>> tiles("none", "v5e", {"T": 3}, dict, lambda: {"q": 8})
        {'q': 8}
    """
    near: list[tuple[float, Mapping[str, Any]]] = []
    for entry in entries(chip) if chip else ():
        facts = entry["case"]
        if entry["kernel"] == kernel and facts.keys() == case.keys():
            away = sum(_distance(facts[name], case[name]) for name in case)
            near += [(away, entry["tiles"])] if math.isfinite(away) else []
    for _, facts in sorted(near, key=lambda one: one[0]):
        candidate = make(**{name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()})
        if fits(candidate):
            return candidate
    return rule()


def _distance(a: int | str, b: int | str) -> float:
    """Between two values of a case, in powers of two; infinite past one, and between different texts."""
    if isinstance(a, str) or isinstance(b, str):
        return 0.0 if a == b else math.inf
    away = abs(math.log2(a / b))
    return away if away <= 1 else math.inf
