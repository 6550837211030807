"""Draw several runs on one self-contained page, from the files in their folders, without JAX.

The charts have a curve for each run, over steps, target tokens or seconds. The page contains all three versions, and
buttons select one, with CSS only. Tables below show the settings that differ, where the time went, and the machines.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import UserError
from jaxscale.figures.markup import Markup, element, framed, table, write_text
from jaxscale.records.hours import hours
from jaxscale.records.metrics import MetricsRows
from jaxscale.records.record import RunRecord
from jaxscale.records.storage import run_path
from jaxscale.report.charts import Axis, Series, line_chart, smooth
from jaxscale.report.page import flatten, page_of, sheet
from jaxscale.report.pictures import hours_bar
from jaxscale.report.summary import STATUS
from jaxscale.values.units import count, duration, number, short

MAX_RUNS = 7
"""Largest number of runs on a page, one for each color of the palette."""
_MAX_DIFFERENCES = 40
"""Largest number of rows in the table of differing fields."""
_AXES = {
    "Steps": Axis("step"),
    "Target tokens": Axis("target tokens", short),
    "Seconds": Axis("seconds", short),
}
"""The axes of the charts, by the text of their buttons. The seconds do not include pauses between stop and restart."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of several runs, for a notebook or a file. `compare` returns it.

    Args:
        run_dirs: the runs' folders.
    """

    run_dirs: tuple[str, ...]

    def html(self) -> str:
        """Return the page of the runs as HTML, from the current content of their files."""
        return comparison_html([RunRecord.read(run_dir) for run_dir in self.run_dirs])

    def _repr_html_(self) -> str:
        return framed(self.html(), 800)

    def write(self, path: str | Path) -> None:
        """Write the page to a file.

        Raises:
            UserError: the file cannot be written.
        """
        write_text(path, self.html())


def compare(*runs: Any) -> Comparison:
    """Compare several runs: draw their losses on the same axes, and show their differences and where their time went.

    Args:
        runs: from 2 to 7 runs, each as a `Run` or a path of its folder. They may still be running, and any of their
            files may be missing.

    Returns:
        A `Comparison`: a notebook shows it as a page, and its method `write("page.html")` writes the page to a file.

    Raises:
        UserError: the number of runs is too small or too large, a run is given twice, or a folder does not exist.

    Example:
        >>> compare("runs/a")
        Traceback (most recent call last):
        jaxscale.errors.UserError: got 1 run, expected from 2 to 7 to draw on one page
    """
    run_dirs = tuple(str(getattr(run, "dir", run)) for run in runs)
    _check_runs(run_dirs)
    for run_dir in run_dirs:
        if not run_path(run_dir).is_dir():
            raise UserError(f"{run_dir}: there is no such run, expected the folder of a run, or what train returned")
    return Comparison(run_dirs)


def write_comparison(run_dirs: Sequence[Any], path: str | Path) -> None:
    """Write the page of several runs to a file.

    Args:
        run_dirs: the runs' folders, from 2 to `MAX_RUNS`; any of their files may be missing.
        path: the file.

    Raises:
        UserError: the number of runs is too small or too large, a run is named twice, or the file cannot be written.

    Example:
        >>> write_comparison(["runs/a"], "page.html")
        Traceback (most recent call last):
        jaxscale.errors.UserError: got 1 run, expected from 2 to 7 to draw on one page
    """
    _check_runs(run_dirs)
    Comparison(tuple(map(str, run_dirs))).write(path)


def _check_runs(run_dirs: Sequence[Any]) -> None:
    """Raise UserError if there are too few or too many runs, or if one is given twice."""
    if not 2 <= len(run_dirs) <= MAX_RUNS:
        plural = "s" * (len(run_dirs) != 1)
        raise UserError(f"got {len(run_dirs)} run{plural}, expected from 2 to {MAX_RUNS} to draw on one page")
    repeated_dirs = [
        run_dir for run_dir, occurrence_count in Counter(map(str, run_dirs)).items() if occurrence_count > 1
    ]
    if repeated_dirs:
        raise UserError(f"the run {repeated_dirs[0]} is given twice: give it once")


def comparison_html(runs: Sequence[RunRecord]) -> str:
    """Return the page of several runs as HTML."""
    run_names = _run_names(runs)
    with np.errstate(all="ignore"):  # a damaged row may contain any number
        sections = {
            "Training": _chart_panels(runs, run_names),
            "What differs": _difference_table(runs, run_names),
            "Where the time went": _time_sheets(runs, run_names),
            "Where they ran": _origin_table(runs, run_names),
        }
        header = element("header", element("h1", f"{len(runs)} runs"), _figure_table(runs, run_names))
    return page_of(", ".join(run_names), header, sections, ", ".join(run.directory for run in runs))


def _run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: the name of its experiment or, if several runs share that name, the run's folder."""
    run_count_by_name = Counter(run.name for run in runs)
    return [run.name if run_count_by_name[run.name] == 1 else run.directory for run in runs]


def _legend_key(index: int, name: str) -> Markup:
    """Return the name of a run, after a box in the run's color."""
    return element("span", element("i", class_=f"c{index + 1}"), name, class_="key run")


def _figure_table(runs: Sequence[RunRecord], run_names: list[str]) -> Markup:
    """Return a table with a row for each run and its most important figures."""
    metric_names = list(dict.fromkeys(name for run in runs for name in run.own_metric_names))
    format_by_title: dict[str, Callable[[RunRecord], str]] = {
        "Status": lambda run: STATUS[run.status][0].partition(";")[0],
        "Best held-out loss": lambda run: "" if run.best is None else f"{number(run.best[1])} ({run.best[0]:,})",
        **{
            f"Held-out {name}": lambda run, name=name: _last_value_text(run.rows("eval"), name) for name in metric_names
        },
        "Training loss": lambda run: _last_value_text(run.rows("train"), "loss"),
        "Steps": lambda run: f"{run.step:,}",
        "Target tokens": lambda run: "" if run.tokens is None else count(run.tokens),
        "Time": lambda run: "" if run.seconds is None else duration(run.seconds),
        "Tokens per second": lambda run: "" if run.tokens_per_second is None else count(run.tokens_per_second),
        "MFU": lambda run: "" if run.mfu is None else f"{run.mfu:.1%}",
        "Parameters": lambda run: "" if run.parameters is None else count(run.parameters),
    }
    texts_by_title = {title: [text_of(run) for run in runs] for title, text_of in format_by_title.items()}
    return _run_table({title: texts for title, texts in texts_by_title.items() if any(texts)}, run_names)


def _last_value_text(rows: MetricsRows, name: str) -> str:
    """Return the last finite value of a metric, as text; "" if there is none."""
    values = rows.column(name)
    values = values[np.isfinite(values)]
    return number(float(values[-1])) if len(values) else ""


def _run_table(texts_by_title: dict[str, list[str]], run_names: list[str]) -> Markup:
    """Return a sheet with a row for each figure and a column for each run. Narrow windows stack the columns."""
    headings = ("", *(_legend_key(index, name) for index, name in enumerate(run_names)))
    rows = [
        (
            title,
            *(
                element("span", text, class_="value", data_run=name)
                for text, name in zip(texts, run_names, strict=True)
            ),
        )
        for title, texts in texts_by_title.items()
    ]
    grid = table(rows, headings, class_="runs")
    return sheet(None, element("div", grid, class_="scroll"))


def _x_by_button(run: RunRecord, rows: MetricsRows) -> dict[str, np.ndarray]:
    """Return the x coordinates of metrics rows for each axis, float64 [rows], by the text of the axis's button."""
    train_rows = run.rows("train")
    train_steps, train_tokens = train_rows.column("step"), train_rows.column("tokens")
    is_known = np.isfinite(train_tokens)
    row_steps = rows.column("step")
    row_tokens = np.full(len(rows), np.nan)
    if is_known.any():
        row_tokens = np.interp(row_steps, train_steps[is_known], np.maximum.accumulate(train_tokens[is_known]))
    seconds_by_row_id, seconds, previous_time = {}, 0.0, None
    for row in run.metrics:
        row_time = row.get("time")
        if isinstance(row_time, int | float):
            if previous_time is not None and row.get("name") != "resume":
                seconds += max(0.0, row_time - previous_time)
            previous_time = row_time
            seconds_by_row_id[id(row)] = seconds
    row_seconds = np.array([seconds_by_row_id.get(id(row), np.nan) for row in rows], np.float64)
    return {"Steps": row_steps, "Target tokens": row_tokens, "Seconds": row_seconds}


def _chart_panels(runs: Sequence[RunRecord], run_names: list[str]) -> Markup | None:
    """Return the charts of the runs over each axis, with a button for each axis; `None` if there is no chart."""
    panel_elements, button_elements = [], []
    for index, (button_text, axis) in enumerate(_AXES.items()):
        charts = _charts(runs, run_names, button_text, axis)
        if charts:
            identifier = f"axis{index}"
            checked = "checked" if not panel_elements else None
            button_elements.append(element("input", type="radio", name="axis", id=identifier, checked=checked))
            button_elements.append(element("label", button_text, for_=identifier))
            panel_elements.append(element("div", charts, class_="panel"))
    return element("div", button_elements, panel_elements, class_="axes") if panel_elements else None


def _charts(runs: Sequence[RunRecord], run_names: list[str], button_text: str, axis: Axis) -> list[Markup]:
    """Return the charts over one axis: first the two losses, as wide as the page, and then the other metrics."""
    metric_names = list(dict.fromkeys(name for run in runs for name in run.own_metric_names))
    unit = runs[0].loss_unit if len({run.loss_unit for run in runs}) == 1 else ""

    def chart(kind: str, field: str, title: str, **options: Any) -> Markup:
        """Return the chart of one metrics field, from the rows of one kind."""
        curves = []
        for index, (run, name) in enumerate(zip(runs, run_names, strict=True)):
            rows = run.rows(kind)
            x, values = _x_by_button(run, rows)[button_text], rows.column(field)
            if kind == "train" and field != "learning_rate" and len(values) > 20:
                values = smooth(values, max(5.0, len(values) / 40))
            is_known = np.isfinite(x)
            if not np.isfinite(values[is_known]).any():
                continue
            curves.append(Series(name, x[is_known], values[is_known], "line", index + 1))
        if len(curves) == 1:  # a chart of one curve has no legend
            options = {**options, "unit": curves[0].label}
        return line_chart(title, curves, axis=axis, **options)

    wide_charts = [
        chart("eval", "loss", "Held-out loss", unit=unit, is_tall=True),
        chart("train", "loss", "Training loss, smoothed", unit=unit, is_tall=True),
    ]
    narrow_charts = [chart("eval", name, f"Held-out {name}") for name in metric_names]
    narrow_charts += [
        chart(
            "train",
            "tokens_per_second",
            "Target tokens per second",
            from_zero=True,
            format_value=count,
            format_ticks=short,
        ),
        chart("train", "learning_rate", "Learning rate", from_zero=True),
        chart("train", "grad_norm", "Gradient norm"),
    ]
    wide_sheets = [sheet(None, figure) for figure in wide_charts if figure]
    narrow_sheets = [sheet(None, figure) for figure in narrow_charts if figure]
    return wide_sheets + ([element("div", narrow_sheets, class_="pair")] if narrow_sheets else [])


def _difference_table(runs: Sequence[RunRecord], run_names: list[str]) -> Markup | None:
    """Return a table of the fields of experiment and plan that differ between the runs; `None` if no field differs."""
    fields_by_run = [flatten({**run.experiment, "plan": run.plan}) for run in runs]
    field_paths = list(dict.fromkeys(path for fields in fields_by_run for path in fields))
    texts_by_path = {
        path: [str(fields.get(path, ""))[:200] for fields in fields_by_run]
        for path in field_paths
        if path != "plan.version" and len({repr(fields.get(path)) for fields in fields_by_run}) > 1
    }
    if not texts_by_path:
        return None
    shown_texts = dict(list(texts_by_path.items())[:_MAX_DIFFERENCES])
    hidden_count = len(texts_by_path) - len(shown_texts)
    note = element("p", f"and {hidden_count} more fields", class_="faint") if hidden_count else None
    return element("div", _run_table(shown_texts, run_names), note)


def _time_sheets(runs: Sequence[RunRecord], run_names: list[str]) -> Markup | None:
    """Return a sheet for each run, with a bar and a table of its seconds by phase; `None` if nothing is recorded."""
    sheets = []
    for index, (run, name) in enumerate(zip(runs, run_names, strict=True)):
        run_hours = hours(run.directory)
        bar = None if run_hours is None else hours_bar(run_hours)
        sheets += [sheet(None, element("h3", _legend_key(index, name)), bar)] if bar else []
    return element("div", sheets, class_="pair top") if sheets else None


def _origin_table(runs: Sequence[RunRecord], run_names: list[str]) -> Markup:
    """Return a table with the folder, file, commit, devices and versions of each run."""
    facts_by_run = [run.origin for run in runs]
    titles = list(dict.fromkeys(title for facts in facts_by_run for title in facts))
    return _run_table({title: [facts.get(title, "") for facts in facts_by_run] for title in titles}, run_names)
