"""How every benchmark shows what it measured: a table for people, one line of JSON for programs.

With `BENCHMARK_RESULTS=append` in the environment the figures also go to `results.jsonl`, as `results.py` describes.
"""

import dataclasses
import json
import operator
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, Literal

import results


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number.

    Args:
        name: names it in the JSON, such as "windows_tokens_per_second".
        value: what was measured.
        unit: of the value: "s", "tokens/s", "x" for a ratio.
        bar: what it should reach; `None` where it is only told.
        compare: how value and bar must stand to each other.

    Example:
        >>> Figure("ratio", 1.02, "x", 1.03).holds, Figure("speed", 10.0, "tokens/s", 20.0, ">=").holds
        (True, False)
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    compare: Literal["<=", ">=", ">"] = "<="

    @property
    def holds(self) -> bool:
        """Whether the bar is reached; a figure without one always holds."""
        if self.bar is None:
            return True
        holds = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}
        return holds[self.compare](self.value, self.bar)

    def columns(self) -> tuple[str, str, str, str, str]:
        """Name, value, unit, bar and verdict as a table shows them."""
        if self.bar is None:
            return self.name, _short(self.value), self.unit, "", ""
        bar = f"{self.compare} {_short(self.bar)}"
        return self.name, _short(self.value), self.unit, bar, "holds" if self.holds else "FAILS"


def show(figures: Iterable[Figure], title: str) -> bool:
    """Print the table and, as the last line, the JSON object `{name: {value, unit, bar, holds}}`; append if asked to.

    Returns:
        Whether every figure reaches its bar.
    """
    figures = list(figures)
    cells = [("figure", "value", "unit", "bar", ""), *(figure.columns() for figure in figures)]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    print(f"\n{title}\n")
    for number, (name, value, *others) in enumerate(cells):
        columns = (name.ljust(widths[0]), value.rjust(widths[1]), *map(str.ljust, others, widths[2:]))
        print("  " + "  ".join(columns).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths[:4]))
    print()
    told = {f.name: {"value": f.value, "unit": f.unit, "bar": f.bar, "holds": f.holds} for f in figures}
    print(json.dumps(told), flush=True)
    if results.asked():
        records = [{**dataclasses.asdict(figure), "holds": figure.holds} for figure in figures]
        results.append(results.FILE, title, records, sys.argv)
    return all(figure.holds for figure in figures)


def figures_of_command(words: list[str], **environment: str) -> dict[str, Any]:
    """Run a command, and return the JSON object that is its last line; {} if it prints nothing.

    Args:
        words: the command.
        environment: variables of the environment that differ for it.
    """
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1]) if ended.stdout.strip() else {}


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
