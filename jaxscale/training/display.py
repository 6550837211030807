"""The progress of a run on the screen: one live line in a terminal or a notebook, or a line every 20 s in a file.

The display is called after every step, but updates the screen a few times per second at most, so a call after a fast
step takes only microseconds.
"""

import datetime
import sys
import time
from collections.abc import Mapping
from typing import Any

from jaxscale.records.directory import is_disk_full
from jaxscale.values.units import count

_LIVE_SECONDS, _FILE_SECONDS = 0.2, 20.0


class Display:
    """The progress of one run.

    Args:
        steps: number of updates in the run.
        quiet: whether to show nothing at all.
        name: name of the run.

    Attributes:
        is_live: whether the output is a terminal or a notebook, where a line can be updated in place.
    """

    def __init__(self, steps: int, *, quiet: bool, name: str) -> None:
        self._step_count, self._quiet, self._name = steps, quiet, name
        self._progress: Any = None  # rich's progress bar, once it is shown
        self._task_id: Any = None  # rich's id for the bar's only task
        self._is_notebook = "ipykernel" in sys.modules
        self.is_live = self._is_notebook or sys.stdout.isatty()
        self._interval_seconds = _LIVE_SECONDS if self.is_live else _FILE_SECONDS
        self._last_update_time = 0.0  # by time.monotonic
        self._has_open_line = False

    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
            return
        self._end_line()
        _print(text)

    def show(self, step: int, row: Mapping[str, Any]) -> None:
        """Update the live line, or print a line to a file; do nothing if the last update was too recent.

        Args:
            step: number of updates so far.
            row: metrics of the step, as in metrics.jsonl.
        """
        if self._quiet or (
            time.monotonic() - self._last_update_time < self._interval_seconds and step < self._step_count
        ):
            return
        self._last_update_time = time.monotonic()
        metrics_text = f"loss {row['loss']:.4f}  {count(row.get('tokens_per_second', 0.0))} tokens/s"
        if "mfu" in row:
            metrics_text += f"  mfu {row['mfu']:.1%}"
        if self._is_notebook:
            seconds_left = round((self._step_count - step) * row.get("step_seconds", 0.0))
            time_left = datetime.timedelta(seconds=seconds_left)
            _print(f"\rstep {step}/{self._step_count}  {metrics_text}  {time_left} left ", end="")
            self._has_open_line = True
        elif self.is_live:
            self._terminal_progress().update(self._task_id, completed=step, text=metrics_text)
        else:
            _print(f"step {step}/{self._step_count}  {metrics_text}")

    def close(self) -> None:
        """End the live line and restore the terminal."""
        self._end_line()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _terminal_progress(self) -> Any:
        """Return the progress bar of a terminal; the first call creates and starts it."""
        if self._progress is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn(self._name, markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(),
                refresh_per_second=5,
            )
            self._task_id = self._progress.add_task("", total=self._step_count, text="")
            self._progress.start()
        return self._progress

    def _end_line(self) -> None:
        """End the live line of a notebook, if there is one."""
        if self._has_open_line:
            _print("")
            self._has_open_line = False


def _print(text: str, end: str = "\n") -> None:
    """Print a text and flush it. If stdout is a file on a full disk, the text is lost, and the run goes on."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        if not is_disk_full(error):
            raise
