"""The summary of a run for the terminal, with its most important figures and the path of its report."""

import io
import shutil
from typing import Any

import numpy as np

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
    "running": ("running", "blue"),
    "stopped": ("stopped without a final event; start it again to continue", "yellow"),
    "empty": ("nothing measured yet", "dim"),
}
"""Description and terminal colour of each status."""


def summary(run_dir: Any, *, color: bool = False, width: int | None = None) -> str:
    """A run in a few lines, for the terminal.

    Args:
        run_dir: the run's folder; any of its files may be missing.
        color: whether to use terminal colours.
        width: number of columns; by default those of the terminal, at most 100.

    Returns:
        The text, without a newline at its end.

    Example:
        >>> import tempfile
        >>> print(summary(tempfile.mkdtemp(prefix="run-"), width=60).split("  ")[-1])
        nothing measured yet
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run = RunRecord.read(run_dir)
    columns = width or min(100, shutil.get_terminal_size().columns)
    screen = Console(
        file=io.StringIO(),
        width=columns,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
    )
    status_text, style = STATUS[run.status]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(run.name, style="bold not dim"), Text(status_text, style=f"bold {style}"))
    lines = _lines(run)
    for name, text in lines:
        table.add_row(name, Text(text))
    screen.print(table)
    report = run_path(run_dir) / FILE
    if report.exists():
        # a path is not wrapped, so that it can be copied
        indent = max(len(name) for name in [run.name, "report", *(name for name, _ in lines)]) + 2
        screen.print(Text.assemble(("report".ljust(indent), "dim"), str(report)), soft_wrap=True)
    assert isinstance(screen.file, io.StringIO)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().rstrip("\n").split("\n"))


def _lines(run: RunRecord) -> list[tuple[str, str]]:
    """Names and texts of the run's most important figures."""
    lines: list[tuple[str, str]] = []
    rows = run.rows("train")
    if run.best is not None and run.final is not None:
        step, loss = run.best
        final_text = "" if run.final == run.best else f"; last {number(run.final[1])} at step {run.final[0]:,}"
        lines.append(("held-out loss", f"{number(loss)} nats per target token at step {step:,}{final_text}"))
    if rows:
        lines.append(("training loss", f"{number(rows[-1].get('loss'))} at step {rows[-1]['step']:,}"))
        token_text = f", {count(run.tokens)} target tokens" if run.tokens is not None else ""
        lines.append(("steps", f"{run.step:,}{f' of {run.steps:,}' if run.steps else ''}{token_text}"))
    if run.seconds is not None and rows:
        compile_seconds = run.events("compile").column("seconds")
        compile_seconds = compile_seconds[np.isfinite(compile_seconds)]
        compile_text = f", {duration(float(compile_seconds.sum()))} of it compiling" if compile_seconds.size else ""
        lines.append(("time", f"{duration(run.seconds)}{compile_text}"))
    if run.tokens_per_second is not None:
        flop = rows.column("flop_per_second")
        flop_text = f", {rate(float(np.nanmedian(flop)), 'FLOP/s')}" if np.isfinite(flop).any() else ""
        mfu_text = f", {run.mfu:.1%} MFU" if run.mfu is not None else ""
        lines.append(("speed", f"{count(run.tokens_per_second)} target tokens per second{flop_text}{mfu_text}"))
    skip_count = len(run.events("skipped"))
    if skip_count:
        lines.append(("skipped", f"{skip_count} step{'s' * (skip_count > 1)}"))
    memory = run.memory
    if memory:
        shown_bytes = {kind: value for kind, value in memory.items() if value >= 0.005 * sum(memory.values())}
        kind_texts = ", ".join(f"{kind} {size(value)}" for kind, value in shown_bytes.items())
        lines.append(("memory", f"{size(sum(memory.values()))} per device: {kind_texts}"))
    if run.host_memory:
        kind_texts = ", ".join(f"{kind} {size(value)}" for kind, value in run.host_memory.items())
        lines.append(("host memory", f"{size(sum(run.host_memory.values()))} for each device: {kind_texts}"))
    mesh_texts = [words for topic, words in plan_in_words(run.plan, run.layout, run.experiment) if topic == "Mesh"]
    if mesh_texts:
        lines.append(("mesh", mesh_texts[0]))
    if run.kernels is not None:
        lines.append(("kernels", f"{run.kernels[1]}, on {run.kernels[0]}"))
    lines += [("unread", line) for line in run.unread]
    return lines
