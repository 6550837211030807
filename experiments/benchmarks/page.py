"""Write the measured figures into `docs/reference/benchmarks.md`.

    python experiments/benchmarks/page.py

Between two comments the page shows the newest entry of each command in `results.jsonl`: its day, machine and versions,
and its figures. What stands outside of them is written by hand.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import results
from figures import Figure

PAGE = results.ROOT / "docs" / "reference" / "benchmarks.md"
FIELDS = [field.name for field in dataclasses.fields(Figure)]
START, END = "<!-- results -->", "<!-- end of results -->"


def section(entries: Iterable[dict[str, Any]]) -> str:
    """The markdown of the newest entries."""
    return "\n".join(map(_measured, results.newest(entries)))


def write(page: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Put the section between the comments of a page."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page.name} has no {START} with {END} after it; put the two comments where the figures go")
    page.write_text(f"{before}{START}\n\n{section(entries)}\n{END}{after}")


def _measured(entry: dict[str, Any]) -> str:
    figures = [Figure(**{name: figure[name] for name in FIELDS}) for figure in entry["figures"]]
    failing = sum(not figure.holds for figure in figures)
    barred = sum(figure.bar is not None for figure in figures)
    verdict = f"{barred - failing} of {barred} bars hold" if barred else "no bars"
    verdict += f", **{failing} fail**" if failing else ""
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return (
        f"### `{entry['command']}`\n\n"
        f"{entry['title']}: {verdict}.\n"
        f"Measured on {entry['date']}, {entry['machine']}; {versions}.\n\n"
        "| figure | value | unit | bar | holds |\n|---|---:|---|---|---|\n" + "".join(map(_row, figures))
    )


def _row(figure: Figure) -> str:
    *cells, verdict = (cell.replace("|", r"\|") for cell in figure.columns())
    cells.append({"holds": "yes", "FAILS": "**FAILS**"}.get(verdict, ""))
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    write(PAGE, results.read(results.FILE))
