"""report.html, a self-contained page about a run, written from the files in the run's folder, without JAX.

The page contains its style, its small script and its charts. It can be opened from disk or from a mail, in a wide or
narrow window, light or dark, and shows its whole content without the script.
"""

import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.figures.axes import spread
from jaxscale.figures.markup import Markup, element, joined, page, table
from jaxscale.records.metrics import MetricsRows
from jaxscale.records.record import RunRecord
from jaxscale.records.samples import Sample
from jaxscale.records.storage import run_path
from jaxscale.report.charts import Mark, Series, line_chart, smooth
from jaxscale.report.pictures import memory_bar, mesh_picture, parameter_table
from jaxscale.report.sentences import mesh_of, plan_in_words
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
    "finished": 3,
}
_SAMPLE_CHARACTERS = 4000
"""Largest number of characters of a sample on the page."""
_EVENTS = 60
"""Largest number of lines of events on the page."""


def write_report(run_dir: Any) -> Any:
    """Writes the report of a run beside its files.

    Args:
        run_dir: the run's folder; any of its files may be missing.

    Returns:
        The path of report.html.

    Raises:
        UserError: metrics.jsonl has a broken line in its middle.

    Example:
        >>> import tempfile
        >>> write_report(tempfile.mkdtemp()).name
        'report.html'
    """
    path = run_path(run_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(report_html(RunRecord.read(run_dir)).encode("utf-8", errors="replace"))
    return path


def report_html(run: RunRecord) -> str:
    """The report of a run as HTML."""
    file = Path(__file__)
    style, script = file.with_name("report.css").read_text("utf-8"), file.with_name("report.js").read_text("utf-8")
    sections = {
        "Training": _charts(run),
        "How it was trained": _plan(run),
        "Samples": _samples(run.samples),
        "What happened": _events(run),
        "Make it again": _reproduce(run),
    }
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    body = element(
        "main",
        _header(run),
        [element("section", element("h2", title), content) for title, content in sections.items() if content],
        element("footer", f"Written {written} by jaxscale from the files in {run.directory}."),
    )
    return page(f"{run.name} · jaxscale", body, style=style, script=script)


def _sheet(title: str | None, *content: Any) -> Markup:
    """A box of the page, with a heading."""
    return element("div", element("h3", title) if title else None, content, class_="sheet")


def _header(run: RunRecord) -> Markup:
    """Name, status and origin of the run, the files that could not be read, and the most important figures."""
    start = next((row["time"] for row in run.metrics if isinstance(row.get("time"), int | float)), None)
    origin_texts = [run.path]
    origin_texts += [f"variant {run.source['variant']}"] if run.source.get("variant") else []
    origin_texts += [f"seed {run.experiment['seed']}"] if "seed" in run.experiment else []
    origin_texts += [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start))] if start is not None else []
    status_text = STATUS[run.status][0]
    status = element("span", status_text[0].upper() + status_text[1:], class_=f"status {run.status}")
    header = element(
        "header",
        element("div", element("h1", run.name), status, class_="title"),
        element("p", " · ".join(fact for fact in origin_texts if fact)),
        [element("p", f"Could not be read: {line}", class_="warning") for line in run.unread],
    )
    return joined([header, _figures(run)])


def _figures(run: RunRecord) -> Markup | None:
    """The most important figures of the run."""
    train = run.rows("train")
    losses: dict[str, tuple[int, Any] | None] = {"Best held-out loss": run.best}
    if run.final != run.best:
        losses["Last held-out loss"] = run.final
    if run.final is None and train:
        losses["Training loss"] = train[-1]["step"], train[-1].get("loss")
    figures = [(name, number(point[1]), f"at step {point[0]:,}") for name, point in losses.items() if point is not None]
    if run.metrics:
        figures.append(("Steps", f"{run.step:,}", f"of {run.steps:,}" if run.steps else ""))
    if run.tokens is not None:
        figures.append(("Target tokens", count(run.tokens), ""))
    if run.seconds is not None and run.metrics:
        compile_seconds = float(np.nansum(run.events("compile").column("seconds")))
        compile_note = f"{duration(compile_seconds)} compiling" if compile_seconds else ""
        figures.append(("Time", duration(run.seconds), compile_note))
    if run.tokens_per_second is not None:
        note = f"{run.mfu:.1%} MFU" if run.mfu is not None else ""
        figures.append(("Tokens per second", count(run.tokens_per_second), note))
    if run.parameters is not None:
        figures.append(("Parameters", count(run.parameters), ""))
    cells = [
        element("div", element("dt", name), element("dd", value, element("small", note) if note else None))
        for name, value, note in figures
    ]
    return element("dl", cells, class_="figures") if cells else None


def _charts(run: RunRecord) -> list[Markup]:
    """The loss over the whole width, and smaller charts of other metrics below it."""
    train, held_out = run.rows("train"), run.rows("eval")
    steps = train.column("step")
    loss = train.column("loss")
    marks = [
        Mark(row["step"], str(row["name"]))
        for row in run.metrics
        if row["kind"] == "event" and row.get("name") in ("resume", "preempted", "skipped", "diverged")
    ]
    curves = []
    if len(loss) > 20:
        curves = [Series("each step", steps, loss, "faint", 1)]
        curves += [Series("smoothed", steps, smooth(loss, min(500.0, max(5.0, len(loss) / 40))), "line", 1)]
    elif len(loss):
        curves = [Series("training", steps, loss, "line", 1)]
    if held_out:
        curves.append(Series("held out", held_out.column("step"), held_out.column("loss"), "dots", 2))
    loss_chart = line_chart("Loss", curves, unit="nats per target token", marks=marks, tall=True)
    speed_formats: dict[str, Any] = {"unit": "target tokens per second", "format_value": count, "format_ticks": short}
    charts = [
        _metric_chart(train, "learning_rate", "Learning rate", color=3),
        _metric_chart(train, "tokens_per_second", "Throughput", color=1, **speed_formats)
        or _metric_chart(train, "step_seconds", "Step", color=1, format_value=duration, format_ticks=duration),
        _metric_chart(train, "grad_norm", "Gradient norm", color=4, from_zero=False),
    ]
    if run.device_memory is not None:
        name, column = run.device_memory
        unit_bytes = 1024.0 ** math.floor(math.log(max(float(np.nanmax(column)), 1.0), 1024))
        bytes_format: dict[str, Any] = {"format_value": size, "format_ticks": round_size, "ticks_base": unit_bytes}
        charts.append(_metric_chart(train, name, "Device memory", color=5, **bytes_format))
    if run.mfu is not None:
        formats: dict[str, Any] = {"format_value": "{:.1%}".format, "format_ticks": "{:.0%}".format}
        charts.append(_metric_chart(train, "mfu", "Model FLOP utilization", color=7, **formats))
    else:
        formats = {"format_value": lambda flop: rate(flop, "FLOP/s"), "format_ticks": short}
        charts.append(_metric_chart(train, "flop_per_second", "Arithmetic", unit="FLOP/s", color=7, **formats))
    sheets = [_sheet(None, chart) for chart in charts if chart]
    sections = [_sheet(None, loss_chart)] if loss_chart else []
    return sections + ([element("div", sheets, class_="pair")] if sheets else [])


def _metric_chart(
    rows: MetricsRows, name: str, title: str, *, color: int, from_zero: bool = True, **options: Any
) -> Markup:
    """The chart of the field `name` of the metrics; empty without a finite value."""
    steps, values = rows.column("step"), rows.column(name)
    curves = [Series(title.lower(), steps, values, "line", color)]
    if len(values) > 200 and name not in ("learning_rate", "memory_bytes"):
        curves = [Series("each step", steps, values, "faint", color)]
        curves += [Series("smoothed", steps, smooth(values, len(values) / 50), "line", color)]
    return line_chart(title, curves, from_zero=from_zero, **options)


def _plan(run: RunRecord) -> list[Markup]:
    """The plan in words beside pictures of mesh and memory, and a table of the biggest parameters below."""
    topics = plan_in_words(run.plan, run.layout, run.experiment)
    topics += [] if run.kernels is None else [(f"Kernels taken on {run.kernels[0]}", run.kernels[1])]
    sizes = mesh_of(run.plan, run.layout)
    pictures = []
    if run.layout.get("mesh") is not None or sizes:
        devices = int(run.layout.get("devices") or 1)
        kind = f" ({run.layout['kind']})" if run.layout.get("kind") else ""
        title = f"Mesh: {devices:,} device{'s' * (devices != 1)}{kind}"
        pictures.append(_sheet(title, mesh_picture(sizes, devices)))
    capacity = run.layout.get("capacity_bytes")
    bar = memory_bar(run.memory, float(capacity) if isinstance(capacity, int | float) else None)
    pictures += [_sheet("Memory per device, of the compiled step", bar)] if bar else []
    bar = memory_bar(run.host_memory)
    pictures += [_sheet("On the host, for each device", bar)] if bar else []
    unsplit = run.layout.get("unsplit")
    warning = None
    if isinstance(unsplit, list) and unsplit:
        names = ", ".join(map(str, unsplit[:8])) + (f" and {len(unsplit) - 8} more" if len(unsplit) > 8 else "")
        warning = element("p", f"Whole on every device, since no dim can be split evenly: {names}", class_="warning")
    topic_list = element("dl", [(element("dt", topic), element("dd", text)) for topic, text in topics], class_="words")
    columns = [_sheet("The plan", topic_list, warning)] if topics else []
    columns += [element("div", pictures, class_="stack")] if pictures else []
    sections = [element("div", columns, class_="pair top")] if len(columns) == 2 else columns
    parameters = run.layout.get("parameters")
    parameter_grid = parameter_table(parameters, sizes) if isinstance(parameters, list) else None
    return sections + ([_sheet("How the biggest parameters lie", parameter_grid)] if parameter_grid else [])


def _samples(samples: Iterable[Sample]) -> list[Markup]:
    """The newest samples, and a section that opens to show some of the earlier ones."""
    newest_first = sorted(samples, key=lambda sample: -sample.step)
    newest = [sample for sample in newest_first if sample.step == newest_first[0].step]
    earlier = newest_first[len(newest) :]
    sheets = [_sample(sample) for sample in newest[:6]]
    if earlier:
        # show a few, spread over the run
        shown = [earlier[index] for index in spread(len(earlier), 12)]
        extent = f"{len(shown)} of {len(earlier)}" if len(shown) < len(earlier) else str(len(earlier))
        sheets.append(element("details", element("summary", f"Earlier samples ({extent})"), map(_sample, shown)))
    return sheets


def _sample(sample: Sample) -> Markup:
    """A sample with its prompt marked, cut to the page's limit."""
    text, prompt = sample.text[:_SAMPLE_CHARACTERS], sample.prompt[:_SAMPLE_CHARACTERS].lstrip("\n")
    omitted_count = len(sample.text) - len(text)
    note = f"… {omitted_count:,} more characters in samples.txt"
    body = [element("mark", _visible(prompt)), _visible(text)] if prompt else _visible(text.lstrip("\n"))
    return _sheet(
        f"Step {sample.step:,}",
        element("p", body, class_="sample"),
        element("small", note, class_="faint") if omitted_count else None,
    )


def _visible(text: str) -> str:
    """Text with symbols for control characters."""
    return text.translate({code: 0x2400 + code for code in range(32) if code not in (9, 10)})


def _events(run: RunRecord) -> Markup | None:
    """A row with a dot for each event of a name, for each name; below it, the events in order."""
    rows = run.rows("event")
    if not rows:
        return None
    last_step = max(run.step, 1)
    lanes = []
    for name in dict.fromkeys(str(row.get("name")) for row in rows):
        steps = [row["step"] for row in rows if row.get("name") == name]
        dot_steps = sorted({steps[index] for index in spread(len(steps), 80)})
        color = f"c{_EVENT_COLORS.get(name, 6)}"
        dots = [
            element("i", class_=color, style=f"left:{step / last_step:.2%}", title=f"step {step:,}")
            for step in dot_steps
        ]
        repetitions = (" ", element("span", len(steps), class_="faint")) if len(steps) > 1 else None
        lanes.append((element("span", name, repetitions), element("div", dots)))
    lines = _grouped_events(rows)
    grid = table(lines[-_EVENTS:], ("Step", "Event", ""), numeric=(0,), name_column=1, class_="facts")
    extent = f"The last {_EVENTS} of {len(lines)}" if len(lines) > _EVENTS else f"All {len(lines)}"
    summary = element("summary", f"{extent}, in order")
    details = element("details", summary, element("div", grid, class_="scroll"), open="" if len(lines) < 13 else None)
    return _sheet(None, element("div", lanes, class_="lanes"), details)


def _grouped_events(rows: MetricsRows) -> list[tuple[str, str, str]]:
    """Step, name and details of the events in order; more than three successive events of one name become one line."""
    lines: list[tuple[str, str, str]] = []
    for name, group in itertools.groupby(rows, lambda row: str(row.get("name"))):
        events = list(group)
        if len(events) > 3:
            lines.append((f"{events[0]['step']:,} to {events[-1]['step']:,}", name, f"{len(events)} times"))
        else:
            lines += [(f"{row['step']:,}", name, _details(row)) for row in events]
    return lines


def _details(row: dict[str, Any]) -> str:
    """The fields of an event without the words that units imply, such as "step 30.0 ms, temp 2.96 MiB"."""
    fields: list[str] = []
    for name, value in row.items():
        if name in ("step", "kind", "time", "name") or value is None:
            continue
        for key, key_value in value.items() if isinstance(value, dict) else [("", value)]:
            label = name if name not in ("seconds", "bytes", "flop", "reason", "path", "by", "memory") else ""
            label = f"{label.removesuffix('_seconds').removesuffix('_bytes').removesuffix('_flop')} {key}"
            unit_name = f"{name}_bytes" if name == "memory" else name
            fields.append(f"{label.replace('_', ' ').strip()} {field(unit_name, key_value)}".strip())
    return ", ".join(fields)[:600]


def _reproduce(run: RunRecord) -> Markup | None:
    """The command, the versions, and every field of the experiment and the plan."""
    versions = run.source.get("versions")
    facts = {key: run.source[key] for key in ("sha256", "git", "platform") if run.source.get(key)}
    facts |= versions if isinstance(versions, dict) else {}
    content = [element("pre", run.command, class_="command")] if run.command else []
    content += [_facts(facts)] if facts else []
    for name, values in (("experiment", run.experiment), ("plan", run.plan)):
        if values:
            summary = element("summary", f"The {name}, field by field")
            content.append(element("details", summary, _facts(_flat(values))))
    return _sheet(None, content) if content else None


def _facts(facts: dict[str, Any]) -> Markup:
    """A table of names and values."""
    rows = [(key, element("span", str(value)[:400], class_="mono")) for key, value in facts.items()]
    return table(rows, class_="facts")


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested JSON objects by dotted path."""
    leaves: dict[str, Any] = {}
    for name, content in record.items():
        leaves |= _flat(content, f"{prefix}{name}.") if isinstance(content, dict) else {f"{prefix}{name}": content}
    return leaves
