"""The summary of a run for the terminal, with the most important figures and the path of the report."""

import io
import shutil
from typing import Any

import numpy as np

from jaxscale.records.hours import hours
from jaxscale.records.record import RunRecord, Status
from jaxscale.records.storage import run_path
from jaxscale.report.sentences import plan_in_words
from jaxscale.values.units import count, duration, number, rate, size

FILE = "report.html"
"""Name of the report in the run's folder."""
STATUS: dict[Status, tuple[str, str]] = {
    "finished": ("finished", "green"),
    "preempted": ("preempted; start it again to continue", "yellow"),
    "diverged": ("diverged", "red"),
    "stuck": ("a step waited without end; start it again to continue", "red"),
    "running": ("running", "blue"),
    "stopped": ("stopped without a final event; start it again to continue", "yellow"),
    "empty": ("nothing measured yet", "dim"),
}
"""Description and terminal color of each status."""


def summary(run_dir: Any, *, color: bool = False, width: int | None = None) -> str:
    """Return a few lines of text about a run, for the terminal.

    Args:
        run_dir: the run's folder; any of its files may be missing.
        color: whether to use terminal colors.
        width: number of columns; by default the width of the terminal, but at most 100.

    Returns:
        The text, without a newline at the end.

    Example:
        >>> import tempfile
        >>> print(summary(tempfile.mkdtemp(prefix="run-"), width=60).split("  ")[-1])
        nothing measured yet
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run = RunRecord.read(run_dir)
    column_count = width or min(100, shutil.get_terminal_size().columns)
    console = Console(
        file=io.StringIO(),
        width=column_count,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
    )
    status_text, status_color = STATUS[run.status]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(run.name, style="bold not dim"), Text(status_text, style=f"bold {status_color}"))
    with np.errstate(all="ignore"):  # a damaged row may contain any number
        rows = _summary_rows(run)
    for name, text in rows:
        table.add_row(name, Text(text))
    console.print(table)
    report_path = run_path(run_dir) / FILE
    if report_path.exists():
        # the path is not wrapped, so that it can be copied
        indent = max(len(name) for name in [run.name, "report", *(name for name, _ in rows)]) + 2
        console.print(Text.assemble(("report".ljust(indent), "dim"), str(report_path)), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n"))


def _summary_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the run's most important figures, as pairs of a name and a text."""
    rows: list[tuple[str, str]] = []
    train_rows = run.rows("train")
    if run.best is not None and run.final is not None:
        best_step, best_loss = run.best
        final_text = "" if run.final == run.best else f"; last {number(run.final[1])} at step {run.final[0]:,}"
        unit_text = f" {run.loss_unit}" if run.loss_unit else ""
        rows.append((f"held-out {run.measure}", f"{number(best_loss)}{unit_text} at step {best_step:,}{final_text}"))
    for name in run.own_metric_names:
        values = run.rows("eval").column(name)
        rows.append((f"held-out {name}", f"{number(values[-1])} at step {run.rows('eval')[-1]['step']:,}"))
    if train_rows:
        rows.append(("training loss", f"{number(train_rows.column('loss')[-1])} at step {train_rows[-1]['step']:,}"))
        token_text = f", {count(run.tokens)} target tokens" if run.tokens is not None else ""
        rows.append(("steps", f"{run.step:,}{f' of {run.steps:,}' if run.steps else ''}{token_text}"))
    if run.initial_weights is not None:
        rows.append(("started from", run.initial_weights))
    if run.seconds is not None and train_rows:
        compile_column = run.events("compile").column("seconds")
        compile_seconds = compile_column[np.isfinite(compile_column)]
        compile_text = f"; compiling took {duration(float(compile_seconds.sum()))}" if compile_seconds.size else ""
        rows.append(("time", f"{duration(run.seconds)}{compile_text}"))
    run_hours = hours(run.directory)
    if run_hours is not None:
        rows.append(("hours", str(run_hours)))
    if run.tokens_per_second is not None:
        flop_rates = train_rows.column("flop_per_second")  # FLOP/s of each row
        flop_text = f", {rate(float(np.nanmedian(flop_rates)), 'FLOP/s')}" if np.isfinite(flop_rates).any() else ""
        mfu_text = f", {run.mfu:.1%} MFU" if run.mfu is not None else ""
        rows.append(("speed", f"{count(run.tokens_per_second)} target tokens per second{flop_text}{mfu_text}"))
    measured_seconds, modeled_seconds = run.step_seconds
    if measured_seconds and modeled_seconds:
        error_text = f"{modeled_seconds / measured_seconds - 1:+.0%}"
        rows.append(
            ("step", f"{duration(measured_seconds)} measured, {duration(modeled_seconds)} modeled ({error_text})")
        )
    skip_count = len(run.events("skipped"))
    if skip_count:
        rows.append(("skipped", f"{skip_count} step{'s' * (skip_count > 1)}"))
    bytes_by_kind = run.memory
    if bytes_by_kind:
        total_bytes = sum(bytes_by_kind.values())
        main_kinds = [kind for kind, kind_bytes in bytes_by_kind.items() if kind_bytes >= 0.005 * total_bytes]
        kinds_text = ", ".join(f"{kind} {size(bytes_by_kind[kind])}" for kind in main_kinds)
        rows.append(("memory", f"{size(total_bytes)} per device: {kinds_text}"))
    if run.host_memory:
        host_text = ", ".join(f"{kind} {size(kind_bytes)}" for kind, kind_bytes in run.host_memory.items())
        rows.append(("host memory", f"{size(sum(run.host_memory.values()))} for each device: {host_text}"))
    mesh_texts = [text for topic, text in plan_in_words(run.plan, run.layout, run.experiment) if topic == "Mesh"]
    if mesh_texts:
        rows.append(("mesh", mesh_texts[0]))
    if run.kernels is not None:
        rows.append(("kernels", f"{run.kernels[1]}, on {run.kernels[0]}"))
    rows += [("unread", line) for line in run.unread]
    return rows
