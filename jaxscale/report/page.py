"""report.html: a run on one self-contained page, written from the files in the run's folder, without JAX.

The page holds its style, its small script and its charts; it opens from disk or from a mail, wide or narrow, light or
dark, and shows its whole content without the script.
"""

import math
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.records.metrics import MetricsRows
from jaxscale.records.record import RunRecord
from jaxscale.records.samples import Sample
from jaxscale.records.storage import run_path
from jaxscale.report.charts import Mark, Series, line_chart, smooth
from jaxscale.report.pictures import memory_bar, mesh_picture, parameter_table
from jaxscale.report.sentences import mesh_of, plan_in_words
from jaxscale.values.units import count, duration, field, number, rate, round_size, short, size

FILE = "report.html"

_STATUS = {
    "finished": "Finished",
    "preempted": "Preempted: start it again to continue",
    "diverged": "Diverged",
    "running": "Running",
    "stopped": "Stopped without a final event",
    "empty": "Nothing measured yet",
}
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
_EVENTS = 60


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
    page = report_html(RunRecord.read(run_dir))
    path.write_bytes(page.encode("utf-8", errors="replace"))
    return path


def report_html(run: RunRecord) -> str:
    """The page of a run."""
    file = Path(__file__)
    style, script = file.with_name("report.css").read_text("utf-8"), file.with_name("report.js").read_text("utf-8")
    sections = [
        _header(run),
        _section("Training", _charts(run)),
        _section("How it was trained", _plan(run)),
        _section("Samples", _samples(run.samples)),
        _section("What happened", _events(run)),
        _section("Make it again", _reproduce(run)),
    ]
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    footer = f"<footer>Written {written} by jaxscale from the files in {escape(run.directory)}.</footer>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.name)} · jaxscale</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}{footer}</main><script>{script}</script></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _header(run: RunRecord) -> str:
    start = next((row["time"] for row in run.metrics if isinstance(row.get("time"), int | float)), None)
    parts = [run.path]
    parts += [f"variant {run.source['variant']}"] if run.source.get("variant") else []
    parts += [f"seed {run.experiment['seed']}"] if "seed" in run.experiment else []
    parts += [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start))] if start is not None else []
    status = run.status
    unread = "".join(f'<p class="warning">Could not be read: {escape(line)}</p>' for line in run.unread)
    title = f'<h1>{escape(run.name)}</h1><span class="status {status}">{_STATUS[status]}</span>'
    return (
        f'<header><div class="title">{title}</div>'
        f"<p>{escape(' · '.join(part for part in parts if part))}</p>{unread}</header>{_figures(run)}"
    )


def _figures(run: RunRecord) -> str:
    """The most important figures of the run."""
    figures: list[tuple[str, str, str]] = []
    if run.best is not None:
        figures.append(("Best held-out loss", number(run.best[1]), f"at step {run.best[0]:,}"))
    if run.final is not None and run.final != run.best:
        figures.append(("Last held-out loss", number(run.final[1]), f"at step {run.final[0]:,}"))
    train = run.rows("train")
    if run.final is None and train:
        figures.append(("Training loss", number(train[-1].get("loss")), f"at step {train[-1]['step']:,}"))
    if run.metrics:
        figures.append(("Steps", f"{run.step:,}", f"of {run.steps:,}" if run.steps else ""))
    if run.tokens is not None:
        figures.append(("Target tokens", count(run.tokens), ""))
    if run.seconds is not None and run.metrics:
        events = run.events("compile")
        seconds = events.column("seconds")
        seconds = float(seconds[np.isfinite(seconds)].sum())
        figures.append(("Time", duration(run.seconds), f"{duration(seconds)} compiling" if seconds else ""))
    if run.tokens_per_second is not None:
        note = f"{run.mfu:.1%} MFU" if run.mfu is not None else ""
        figures.append(("Tokens per second", count(run.tokens_per_second), note))
    if run.parameters is not None:
        figures.append(("Parameters", count(run.parameters), ""))
    if not figures:
        return ""
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in figures
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _charts(run: RunRecord) -> str:
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
    rate_field = "tokens_per_second"
    seconds_field = "step_seconds"
    charts = [
        _metric_chart(train, "learning_rate", "Learning rate", color=3, from_zero=True),
        _metric_chart(
            train,
            rate_field,
            "Throughput",
            unit="target tokens per second",
            color=1,
            text=count,
            ticks_text=short,
            from_zero=True,
        )
        or _metric_chart(train, seconds_field, "Step", color=1, text=duration, ticks_text=duration, from_zero=True),
        _metric_chart(train, "grad_norm", "Gradient norm", color=4),
    ]
    if run.device_memory is not None:
        name, column = run.device_memory
        base = 1024.0 ** math.floor(math.log(max(float(np.nanmax(column)), 1.0), 1024))
        options: dict[str, Any] = {"text": size, "ticks_text": round_size, "ticks_base": base, "from_zero": True}
        charts.append(_metric_chart(train, name, "Device memory", color=5, **options))
    if run.mfu is not None:
        options = {"text": "{:.1%}".format, "ticks_text": "{:.0%}".format, "from_zero": True}
        charts.append(_metric_chart(train, "mfu", "Model FLOP utilization", color=7, **options))
    elif np.isfinite(train.column("flop_per_second")).any():
        options = {"text": lambda v: rate(v, "FLOP/s"), "ticks_text": short, "from_zero": True}
        charts.append(_metric_chart(train, "flop_per_second", "Arithmetic", unit="FLOP/s", color=7, **options))
    charts = [f'<div class="sheet">{chart}</div>' for chart in charts if chart]
    return (f'<div class="sheet">{loss_chart}</div>' if loss_chart else "") + (
        f'<div class="pair">{"".join(charts)}</div>' if charts else ""
    )


def _metric_chart(rows: MetricsRows, name: str, title: str, *, color: int, unit: str = "", **options: Any) -> str:
    steps, values = rows.column("step"), rows.column(name)
    curves = [Series(title.lower(), steps, values, "line", color)]
    if len(values) > 200 and name not in ("learning_rate", "memory_bytes"):
        curves = [Series("each step", steps, values, "faint", color)]
        curves += [Series("smoothed", steps, smooth(values, len(values) / 50), "line", color)]
    return line_chart(title, curves, unit=unit, **options)


def _plan(run: RunRecord) -> str:
    """The plan in words beside the mesh and the memory, above the placement of the biggest parameters."""
    words = plan_in_words(run.plan, run.layout, run.experiment)
    words += [] if run.kernels is None else [(f"Kernels taken on {run.kernels[0]}", run.kernels[1])]
    sizes = mesh_of(run.plan, run.layout)
    stack = ""
    if run.layout.get("mesh") is not None or sizes:
        devices = int(run.layout.get("devices") or 1)
        kind = f" ({run.layout['kind']})" if run.layout.get("kind") else ""
        title = f"Mesh: {devices:,} device{'s' * (devices != 1)}{kind}"
        stack = f'<div class="sheet"><h3>{escape(title)}</h3>{mesh_picture(sizes, devices)}</div>'
    capacity = run.layout.get("capacity_bytes")
    bar = memory_bar(run.memory, float(capacity) if isinstance(capacity, int | float) else None)
    if bar:
        stack += f'<div class="sheet"><h3>Memory per device, of the compiled step</h3>{bar}</div>'
    bar = memory_bar(run.host_memory)
    if bar:
        stack += f'<div class="sheet"><h3>On the host, for each device</h3>{bar}</div>'
    unsplit = run.layout.get("unsplit")
    notes = ""
    if isinstance(unsplit, list) and unsplit:
        names = ", ".join(map(str, unsplit[:8])) + (f" and {len(unsplit) - 8} more" if len(unsplit) > 8 else "")
        notes = f'<p class="warning">Whole on every device, since no dim divides: {escape(names)}</p>'
    topics = "".join(f"<dt>{escape(topic)}</dt><dd>{escape(text)}</dd>" for topic, text in words)
    topics = f'<div class="sheet"><h3>The plan</h3><dl class="words">{topics}</dl>{notes}</div>' if topics else ""
    body = f'<div class="stack">{stack}</div>' if stack else ""
    body = f'<div class="pair top">{topics}{body}</div>' if topics and body else topics + body
    parameters = run.layout.get("parameters")
    table = parameter_table(parameters, sizes) if isinstance(parameters, list) else ""
    return body + (f'<div class="sheet"><h3>How the biggest parameters lie</h3>{table}</div>' if table else "")


def _samples(samples: Iterable[Sample]) -> str:
    newest_first = sorted(samples, key=lambda sample: -sample.step)
    if not newest_first:
        return ""
    newest = [sample for sample in newest_first if sample.step == newest_first[0].step]
    older = [sample for sample in newest_first if sample.step != newest_first[0].step]
    body = "".join(map(_sample, newest[:6]))
    if older:
        # show a few, spread over the run
        selection = [older[i] for i in np.unique(np.linspace(0, len(older) - 1, min(12, len(older))).astype(int))]
        extent = f"{len(selection)} of {len(older)}" if len(selection) < len(older) else str(len(older))
        body += f"<details><summary>Earlier samples ({extent})</summary>{''.join(map(_sample, selection))}</details>"
    return body


def _sample(sample: Sample) -> str:
    text = sample.text[:_SAMPLE_CHARACTERS]
    omitted_count = len(sample.text) - len(text)
    note = f'<small class="faint">… {omitted_count:,} more characters in samples.txt</small>' if omitted_count else ""
    prompt = sample.prompt[:_SAMPLE_CHARACTERS].lstrip("\n")
    body = f"<mark>{_visible(prompt)}</mark>{_visible(text)}" if prompt else _visible(text.lstrip("\n"))
    return f'<div class="sheet"><h3>Step {sample.step:,}</h3><p class="sample">{body}</p>{note}</div>'


def _visible(text: str) -> str:
    """Text for HTML, with symbols for control characters."""
    table = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
    return escape(text.translate(table))


def _events(run: RunRecord) -> str:
    rows = run.rows("event")
    if not rows:
        return ""
    names = list(dict.fromkeys(str(row.get("name")) for row in rows))
    last_step = max(run.step, 1)
    lanes = []
    for name in names:
        steps = [row["step"] for row in rows if row.get("name") == name]
        dot_steps = sorted({steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), 80)).astype(int)})
        color = _EVENT_COLORS.get(name, 6)
        dots = "".join(
            f'<i class="c{color}" style="left:{step / last_step:.2%}" title="step {step:,}"></i>' for step in dot_steps
        )
        repetitions = f' <span class="faint">{len(steps)}</span>' if len(steps) > 1 else ""
        lanes.append(f"<span>{escape(name)}{repetitions}</span><div>{dots}</div>")
    lines = _grouped_events(rows)
    cells = "".join(
        f"<tr><td class=n>{step_text}</td><th scope=row>{escape(name)}</th><td>{escape(details)}</td></tr>"
        for step_text, name, details in lines[-_EVENTS:]
    )
    head = "<thead><tr><th class=n>Step</th><th>Event</th><th></th></tr></thead>"
    table = f'<table class="facts">{head}<tbody>{cells}</tbody></table>'
    extent = f"The last {_EVENTS} of {len(lines)}" if len(lines) > _EVENTS else f"All {len(lines)}"
    return (
        f'<div class="sheet"><div class="lanes">{"".join(lanes)}</div><details{" open" if len(lines) < 13 else ""}>'
        f'<summary>{extent}, in order</summary><div class="scroll">{table}</div></details></div>'
    )


def _grouped_events(rows: MetricsRows) -> list[tuple[str, str, str]]:
    """Step, name and details of events in order; more than three of one name in a row become one line."""
    lines: list[tuple[str, str, str]] = []
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end].get("name") == rows[start].get("name"):
            end += 1
        name = str(rows[start].get("name"))
        if end - start > 3:
            lines.append((f"{rows[start]['step']:,} to {rows[end - 1]['step']:,}", name, f"{end - start} times"))
        else:
            lines += [(f"{row['step']:,}", name, _details(row)) for row in rows[start:end]]
        start = end
    return lines


def _details(row: dict[str, Any]) -> str:
    """The fields of an event, without words that their units imply: "step 30.0 ms, temp 2.96 MiB"."""
    fields: list[str] = []
    for name, value in row.items():
        if name in ("step", "kind", "time", "name") or value is None:
            continue
        for part, item in value.items() if isinstance(value, dict) else [("", value)]:
            label = name if name not in ("seconds", "bytes", "flop", "reason", "path", "by", "memory") else ""
            label = f"{label.removesuffix('_seconds').removesuffix('_bytes').removesuffix('_flop')} {part}"
            unit_name = f"{name}_bytes" if name == "memory" else name
            fields.append(f"{label.replace('_', ' ').strip()} {field(unit_name, item)}".strip())
    return ", ".join(fields)[:600]


def _reproduce(run: RunRecord) -> str:
    command = run.command
    body = f'<pre class="command">{escape(command)}</pre>' if command else ""
    versions = run.source.get("versions")
    facts = {key: run.source[key] for key in ("sha256", "git", "platform") if run.source.get(key)}
    if isinstance(versions, dict):
        facts |= versions
    body += _facts(facts)
    fields = _flat(run.experiment)
    if fields:
        body += f"<details><summary>The experiment, field by field</summary>{_facts(fields)}</details>"
    fields = _flat(run.plan)
    if fields:
        body += f"<details><summary>The plan, field by field</summary>{_facts(fields)}</details>"
    return f'<div class="sheet">{body}</div>' if body else ""


def _facts(facts: dict[str, Any]) -> str:
    rows = (
        f"<tr><th scope=row>{escape(str(key))}</th><td class=mono>{escape(str(value)[:400])}</td></tr>"
        for key, value in facts.items()
    )
    return f'<table class="facts">{"".join(rows)}</table>' if facts else ""


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            leaves |= _flat(item, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = item
    return leaves
