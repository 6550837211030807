"""Write report.html, a self-contained page about a run, from the files in the run's folder, without JAX.

The page contains its style, its small script and its charts. It can be opened from disk or from an email, in a wide or
narrow window, in light or dark mode. It shows all its content even if scripts are disabled. The page has sections, and
a section consists of "sheets": boxes with a heading.
"""

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.figures.axes import spread_indices
from jaxscale.figures.markup import Markup, element, joined, page, table
from jaxscale.records.hours import hours
from jaxscale.records.metrics import MetricsRows
from jaxscale.records.record import RunRecord
from jaxscale.records.samples import Sample
from jaxscale.records.storage import run_path, write_whole
from jaxscale.report.charts import Mark, Series, line_chart, smooth
from jaxscale.report.pictures import hours_bar, memory_bar, mesh_picture, parameter_table
from jaxscale.report.sentences import axis_sizes_of_run, plan_in_words
from jaxscale.report.summary import FILE, STATUS
from jaxscale.values.units import count, duration, field, number, rate, round_size, short, size

_EVENT_COLORS = {
    "compile": 1,
    "kernels": 1,
    "checkpoint": 3,
    "resume": 7,
    "preempted": 5,
    "skipped": 2,
    "diverged": 4,
    "stuck": 4,
    "finished": 3,
}
_FOR_DEVELOPERS = ("compile", "kernels", "predicted", "hours")
"""Events whose content is shown elsewhere on the page, or is useful only to developers of jaxscale."""
_SAMPLE_CHARACTERS = 4000
"""Largest number of characters of a sample that the page shows."""
_MAX_EVENT_ROWS = 60
"""Largest number of rows in the table of events."""


def write_report(run_dir: Any) -> Any:
    """Write the report of a run to the run's folder.

    Args:
        run_dir: the run's folder; any of its files may be missing.

    Returns:
        The path of report.html.

    Example:
        >>> import tempfile
        >>> write_report(tempfile.mkdtemp()).name
        'report.html'
    """
    path = run_path(run_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, report_html(RunRecord.read(run_dir)).encode("utf-8", errors="replace"))
    return path


def report_html(run: RunRecord) -> str:
    """Return the report of a run as an HTML page."""
    with np.errstate(all="ignore"):  # a damaged row may contain any number
        header = _header(run)
        sections = {
            "Training": _chart_sheets(run),
            "How it was trained": _plan_sheets(run),
            "Where the time went": _time_sheet(run),
            "Samples": _sample_sheets(run.samples),
            "What happened": _event_sheet(run),
            "Make it again": _reproduction_sheet(run),
        }
    return page_of(run.name, header, sections, run.directory)


def page_of(title: str, header: Markup, sections: Mapping[str, Any], directories_text: str) -> str:
    """Return a report as an HTML page.

    Args:
        title: title of the page.
        header: the content above the sections.
        sections: the content of each section, by the section's title; a section without content is left out.
        directories_text: text with the run directories, for the last line of the page.
    """
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("report.css", "report.js"))
    time_text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    body = element(
        "main",
        header,
        [element("section", element("h2", heading), content) for heading, content in sections.items() if content],
        element("footer", f"Written {time_text} by jaxscale from the files in {directories_text}."),
    )
    return page(f"{title} · jaxscale", body, style=style, script=script)


def sheet(title: str | None, *content: Any) -> Markup:
    """Return a sheet, a box on the page, with a heading if `title` is not `None`."""
    return element("div", element("h3", title) if title else None, content, class_="sheet")


def _header(run: RunRecord) -> Markup:
    """Return the top of the page: the run's name, status, origin and figures, and notes on unreadable files."""
    start_time = next((row["time"] for row in run.metrics if isinstance(row.get("time"), int | float)), None)
    origin_texts = [run.path]
    origin_texts += [f"variant {run.source['variant']}"] if run.source.get("variant") else []
    origin_texts += [f"seed {run.experiment['seed']}"] if "seed" in run.experiment else []
    origin_texts += [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start_time))] if start_time is not None else []
    status_text = STATUS[run.status][0]
    status_tag = element("span", status_text[0].upper() + status_text[1:], class_=f"status {run.status}")
    header = element(
        "header",
        element("div", element("h1", run.name), status_tag, class_="title"),
        element("p", " · ".join(text for text in origin_texts if text)),
        element("p", f"Initial weights of {run.initial_weights}") if run.initial_weights else None,
        [element("p", f"Could not be read: {line}", class_="warning") for line in run.unread],
    )
    return joined([header, _figure_list(run)])


def _figure_list(run: RunRecord) -> Markup | None:
    """Return a list of the run's most important figures, each with a name and a note; `None` if there are none."""
    train_rows = run.rows("train")
    # step and value of each loss, by the name of the loss
    losses: dict[str, tuple[int, Any] | None] = {f"Best held-out {run.measure}": run.best}
    if run.final != run.best:
        losses[f"Last held-out {run.measure}"] = run.final
    if run.final is None and train_rows:
        losses["Training loss"] = train_rows[-1]["step"], train_rows.column("loss")[-1]
    # name, value and note of each figure, as texts
    figures = [(name, number(loss[1]), f"at step {loss[0]:,}") for name, loss in losses.items() if loss is not None]
    if run.metrics:
        figures.append(("Steps", f"{run.step:,}", f"of {run.steps:,}" if run.steps else ""))
    if run.tokens is not None:
        figures.append(("Target tokens", count(run.tokens), ""))
    if run.seconds is not None and run.metrics:
        compile_seconds = float(np.nansum(run.events("compile").column("seconds")))
        compile_note = f"{duration(compile_seconds)} compiling" if compile_seconds else ""
        figures.append(("Time", duration(run.seconds), compile_note))
    run_hours = hours(run.directory)
    if run_hours is not None and run_hours.lost:
        lost_seconds = sum(seconds for _, seconds in run_hours.lost)
        restart_note = f"{len(run_hours.lost)} restart{'s' * (len(run_hours.lost) > 1)}"
        figures.append(("Lost to restarts", duration(lost_seconds), restart_note))
    if run.tokens_per_second is not None:
        mfu_note = f"{run.mfu:.1%} MFU" if run.mfu is not None else ""
        figures.append(("Tokens per second", count(run.tokens_per_second), mfu_note))
    if run.parameters is not None:
        figures.append(("Parameters", count(run.parameters), ""))
    figure_elements = [
        element("div", element("dt", name), element("dd", value, element("small", note) if note else None))
        for name, value, note in figures
    ]
    return element("dl", figure_elements, class_="figures") if figure_elements else None


def _chart_sheets(run: RunRecord) -> list[Markup]:
    """Return the chart of the loss, as wide as the page, and then smaller charts of other metrics."""
    train_rows, held_out_rows = run.rows("train"), run.rows("eval")
    steps = train_rows.column("step")
    losses = train_rows.column("loss")
    marks = [
        Mark(row["step"], str(row["name"]))
        for row in run.metrics
        if row["kind"] == "event" and row.get("name") in ("resume", "preempted", "skipped", "diverged", "stuck")
    ]
    curves = []
    if len(losses) > 20:
        curves = [Series("each step", steps, losses, "faint", 1)]
        curves += [Series("smoothed", steps, smooth(losses, min(500.0, max(5.0, len(losses) / 40))), "line", 1)]
    elif len(losses):
        curves = [Series("training", steps, losses, "line", 1)]
    held_out_steps = held_out_rows.column("step")
    set_names = held_out_set_names(held_out_rows)
    if held_out_rows:
        curves.append(Series("held out", held_out_steps, held_out_rows.column("loss"), "dots", 2))
    curves += [
        Series(name, held_out_steps, held_out_rows.column(f"{name}/loss"), "dots", 3 + index % 5)
        for index, name in enumerate(set_names)
    ]
    loss_chart = line_chart("Loss", curves, unit=run.loss_unit, marks=marks, is_tall=True)
    speed_options: dict[str, Any] = {"unit": "target tokens per second", "format_value": count, "format_ticks": short}
    charts = [
        *_own_metric_charts(run, set_names),
        _rate_chart(train_rows),
        _metric_chart(train_rows, "tokens_per_second", "Throughput", color=1, **speed_options)
        or _metric_chart(train_rows, "step_seconds", "Step", color=1, format_value=duration, format_ticks=duration),
        _metric_chart(train_rows, "grad_norm", "Gradient norm", color=4, from_zero=False),
    ]
    if run.device_memory is not None:
        field_name, bytes_by_row = run.device_memory
        most_bytes = float(bytes_by_row[np.isfinite(bytes_by_row)].max())
        unit_bytes = 1024.0 ** math.floor(math.log(max(most_bytes, 1.0), 1024))
        bytes_options: dict[str, Any] = {"format_value": size, "format_ticks": round_size, "ticks_base": unit_bytes}
        charts.append(_metric_chart(train_rows, field_name, "Device memory", color=5, **bytes_options))
    if run.mfu is not None:
        mfu_options: dict[str, Any] = {"format_value": "{:.1%}".format, "format_ticks": "{:.0%}".format}
        charts.append(_metric_chart(train_rows, "mfu", "Model FLOP utilization", color=7, **mfu_options))
    else:
        flop_options: dict[str, Any] = {"format_value": lambda flop: rate(flop, "FLOP/s"), "format_ticks": short}
        chart = _metric_chart(train_rows, "flop_per_second", "Arithmetic", unit="FLOP/s", color=7, **flop_options)
        charts.append(chart)
    metric_sheets = [sheet(None, chart) for chart in charts if chart]
    loss_sheets = [sheet(None, loss_chart)] if loss_chart else []
    return loss_sheets + ([element("div", metric_sheets, class_="pair")] if metric_sheets else [])


def held_out_set_names(rows: MetricsRows) -> list[str]:
    """Return the names of the held-out sets whose losses are in the rows."""
    return sorted({name.removesuffix("/loss") for row in rows for name in row if name.endswith("/loss")})


def _own_metric_charts(run: RunRecord, set_names: list[str]) -> list[Markup]:
    """Return a chart for each evaluation metric other than the loss, with a curve for each held-out set."""
    rows = run.rows("eval")
    charts = []
    for metric_name in dict.fromkeys(name.rpartition("/")[2] for name in run.own_metric_names):
        if metric_name == "loss":
            continue
        column_by_label = {"held out": metric_name} | {name: f"{name}/{metric_name}" for name in set_names}
        curves = [
            Series(label, rows.column("step"), rows.column(column), "line", 2 + index % 6)
            for index, (label, column) in enumerate(column_by_label.items())
        ]
        charts.append(line_chart(f"Held-out {metric_name}", curves))
    return charts


def _metric_chart(
    rows: MetricsRows, field_name: str, title: str, *, color: int, from_zero: bool = True, **options: Any
) -> Markup:
    """Return the chart of one field of the metrics; "" if no value is finite. `options` are those of `line_chart`."""
    steps, values = rows.column("step"), rows.column(field_name)
    curves = [Series(title.lower(), steps, values, "line", color)]
    if len(values) > 200 and field_name not in ("learning_rate", "memory_bytes"):
        curves = [Series("each step", steps, values, "faint", color)]
        curves += [Series("smoothed", steps, smooth(values, len(values) / 50), "line", color)]
    return line_chart(title, curves, from_zero=from_zero, **options)


def _rate_chart(rows: MetricsRows) -> Markup:
    """Return the chart of the learning rate. A group of parameters with its own learning rate has its own curve."""
    prefix = "learning_rate/"
    column_names = list(
        dict.fromkeys(column_name for row in rows for column_name in row if column_name.startswith(prefix))
    )[:6]
    if not column_names:
        return _metric_chart(rows, "learning_rate", "Learning rate", color=3)
    curves = [
        Series(
            column_name.removeprefix(prefix) if index else "the others",
            rows.column("step"),
            rows.column(column_name),
            "line",
            color,
        )
        for index, (column_name, color) in enumerate(
            zip(["learning_rate", *column_names], (3, 1, 2, 4, 5, 6, 7), strict=False)
        )
    ]
    return line_chart("Learning rate", curves)


def _plan_sheets(run: RunRecord) -> list[Markup]:
    """Return sheets about the plan: its effects in words, pictures of mesh and memory, and the largest parameters."""
    topics_and_sentences = plan_in_words(run.plan, run.layout, run.experiment)
    topics_and_sentences += [] if run.kernels is None else [(f"Kernels used on {run.kernels[0]}", run.kernels[1])]
    axis_sizes = axis_sizes_of_run(run.plan, run.layout)
    pictures = []
    if run.layout.get("mesh") is not None or axis_sizes:
        device_count = int(run.layout.get("devices") or 1)
        kind_text = f" ({run.layout['kind']})" if run.layout.get("kind") else ""
        title = f"Mesh: {device_count:,} device{'s' * (device_count != 1)}{kind_text}"
        pictures.append(sheet(title, mesh_picture(axis_sizes, device_count)))
    capacity_bytes = run.layout.get("capacity_bytes")
    device_bar = memory_bar(run.memory, float(capacity_bytes) if isinstance(capacity_bytes, int | float) else None)
    pictures += [sheet("Memory per device, of the compiled step", device_bar)] if device_bar else []
    host_bar = memory_bar(run.host_memory)
    pictures += [sheet("On the host, for each device", host_bar)] if host_bar else []
    unsplit_names = run.layout.get("unsplit")
    warning = None
    if isinstance(unsplit_names, list) and unsplit_names:
        more_text = f" and {len(unsplit_names) - 8} more" if len(unsplit_names) > 8 else ""
        names_text = ", ".join(map(str, unsplit_names[:8])) + more_text
        warning_text = f"Whole on every device, since no dim can be split evenly: {names_text}"
        warning = element("p", warning_text, class_="warning")
    topic_list = element(
        "dl", [(element("dt", topic), element("dd", text)) for topic, text in topics_and_sentences], class_="words"
    )
    column_elements = [sheet("The plan", topic_list, warning)] if topics_and_sentences else []
    column_elements += [element("div", pictures, class_="stack")] if pictures else []
    content_elements = (
        [element("div", column_elements, class_="pair top")] if len(column_elements) == 2 else column_elements
    )
    parameter_entries = run.layout.get("parameters")
    largest_parameters_table = (
        parameter_table(parameter_entries, axis_sizes) if isinstance(parameter_entries, list) else None
    )
    return content_elements + (
        [sheet("Placement of the largest parameters", largest_parameters_table)] if largest_parameters_table else []
    )


def _time_sheet(run: RunRecord) -> Markup | None:
    """Return a sheet with the seconds in each phase and the seconds lost to failures; `None` if none are recorded."""
    run_hours = hours(run.directory)
    bar = None if run_hours is None else hours_bar(run_hours)
    return sheet(None, bar) if bar else None


def _sample_sheets(samples: Iterable[Sample]) -> list[Markup]:
    """Return sheets with the newest samples, and a collapsed section with some of the earlier samples."""
    sorted_samples = sorted(samples, key=lambda sample: -sample.step)
    newest_samples = [sample for sample in sorted_samples if sample.step == sorted_samples[0].step]
    older_samples = sorted_samples[len(newest_samples) :]
    sheets = [_sample_sheet(sample) for sample in newest_samples[:6]]
    if older_samples:
        # show a few earlier samples, spread over the run
        shown_samples = [older_samples[index] for index in spread_indices(len(older_samples), 12)]
        shown_text = f"{len(shown_samples)} of " if len(shown_samples) < len(older_samples) else ""
        heading = element("summary", f"Earlier samples ({shown_text}{len(older_samples)})")
        sheets.append(element("details", heading, map(_sample_sheet, shown_samples)))
    return sheets


def _sample_sheet(sample: Sample) -> Markup:
    """Return a sheet with a sample. The prompt is highlighted, and the text is cut to `_SAMPLE_CHARACTERS`."""
    text, prompt = sample.text[:_SAMPLE_CHARACTERS], sample.prompt[:_SAMPLE_CHARACTERS].lstrip("\n")
    omitted_count = len(sample.text) - len(text)
    note = f"… {omitted_count:,} more characters in samples.txt"
    body = [element("mark", _visible_text(prompt)), _visible_text(text)] if prompt else _visible_text(text.lstrip("\n"))
    return sheet(
        f"Step {sample.step:,}",
        element("p", body, class_="sample"),
        element("small", note, class_="faint") if omitted_count else None,
    )


def _visible_text(text: str) -> str:
    """Return a text with visible symbols in place of control characters, except tabs and line breaks."""
    return text.translate({code: 0x2400 + code for code in range(32) if code not in (9, 10)})


def _event_sheet(run: RunRecord) -> Markup | None:
    """Return a sheet with a timeline for the events of each name, and tables of the events; `None` without events."""
    all_rows = run.rows("event")
    if not all_rows:
        return None
    user_rows = MetricsRows(row for row in all_rows if row.get("name") not in _FOR_DEVELOPERS)
    last_step = max(run.step, 1)
    lanes = []
    for name in dict.fromkeys(str(row.get("name")) for row in user_rows):
        steps = [row["step"] for row in user_rows if row.get("name") == name]
        dot_steps = sorted({steps[index] for index in spread_indices(len(steps), 80)})
        color_class = f"c{_EVENT_COLORS.get(name, 6)}"
        dots = [
            element("i", class_=color_class, style=f"left:{step / last_step:.2%}", title=f"step {step:,}")
            for step in dot_steps
        ]
        count_tag = (" ", element("span", len(steps), class_="faint")) if len(steps) > 1 else None
        lanes.append((element("span", name, count_tag), element("div", dots)))
    event_lists = (
        [element("div", lanes, class_="lanes"), _event_list(user_rows, "All", is_open=True)] if user_rows else []
    )
    developer_rows = MetricsRows(row for row in all_rows if row.get("name") in _FOR_DEVELOPERS)
    event_lists += [_event_list(developer_rows, "For developers:", is_open=False)] if developer_rows else []
    return sheet(None, event_lists)


def _event_list(rows: MetricsRows, title: str, *, is_open: bool) -> Markup:
    """Return a section with a table of events, which can be folded away.

    Args:
        rows: the events.
        title: beginning of the section's heading.
        is_open: whether the section is open at first, if its table is short.
    """
    event_rows = _grouped_events(rows)
    event_grid = table(
        event_rows[-_MAX_EVENT_ROWS:], ("Step", "Event", ""), numeric=(0,), name_column=1, class_="facts"
    )
    extent_text = (
        f"the last {_MAX_EVENT_ROWS} of {len(event_rows)}"
        if len(event_rows) > _MAX_EVENT_ROWS
        else f"{len(event_rows)}"
    )
    summary = element("summary", f"{title} {extent_text}, in order")
    is_open = is_open and len(event_rows) < 13
    return element("details", summary, element("div", event_grid, class_="scroll"), open="" if is_open else None)


def _grouped_events(rows: MetricsRows) -> list[tuple[str, str, str]]:
    """Return the step, name and details of the events in order, as texts.

    More than three successive events with the same name become one row.
    """
    event_rows: list[tuple[str, str, str]] = []
    for name, group in itertools.groupby(rows, lambda row: str(row.get("name"))):
        events = list(group)
        if len(events) > 3:
            event_rows.append((f"{events[0]['step']:,} to {events[-1]['step']:,}", name, f"{len(events)} times"))
        else:
            event_rows += [(f"{row['step']:,}", name, _detail_text(row)) for row in events]
    return event_rows


def _detail_text(row: dict[str, Any]) -> str:
    """Return the fields of an event as text, such as "step 30.0 ms, temp 2.96 MiB", without words that units imply."""
    field_texts: list[str] = []
    for name, value in row.items():
        if name in ("step", "kind", "time", "name") or value is None:
            continue
        is_implied = name in ("seconds", "bytes", "flop", "reason", "path", "by", "memory")
        short_name = "" if is_implied else name.removesuffix("_seconds").removesuffix("_bytes").removesuffix("_flop")
        unit_name = f"{name}_bytes" if name == "memory" else name
        for part_name, part_value in value.items() if isinstance(value, dict) else [("", value)]:
            label = f"{short_name} {part_name}".replace("_", " ").strip()
            field_texts.append(f"{label} {field(unit_name, part_value)}".strip())
    return ", ".join(field_texts)[:600]


def _reproduction_sheet(run: RunRecord) -> Markup | None:
    """Return a sheet that shows how to reproduce the run: command, source, and fields of the experiment and plan.

    Return `None` if the record has none of them.
    """
    sha256 = run.source.get("sha256")
    source_facts = {"SHA-256 of the file": sha256} if sha256 else {}
    source_facts |= run.origin
    content_elements = [element("pre", run.command, class_="command")] if run.command else []
    content_elements += [_fact_table(source_facts)] if source_facts else []
    for name, fields in (("experiment", run.experiment), ("plan", run.plan)):
        if fields:
            summary = element("summary", f"The {name}, field by field")
            content_elements.append(element("details", summary, _fact_table(flatten(fields))))
    return sheet(None, content_elements) if content_elements else None


def _fact_table(facts: dict[str, Any]) -> Markup:
    """Return a table with two columns: the name and the value of each fact."""
    rows = [(name, element("span", str(value)[:400], class_="mono")) for name, value in facts.items()]
    return table(rows, class_="facts")


def flatten(json_object: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested JSON object, by dotted path. Every path begins with `prefix`."""
    value_by_path: dict[str, Any] = {}
    for name, value in json_object.items():
        value_by_path |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return value_by_path
