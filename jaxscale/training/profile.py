"""Trace chosen steps of a run with JAX's profiler, and write a summary beside the trace.

JAX writes the trace, as `profile/plugins/...` for TensorBoard or Perfetto. `device_times.py` summarizes the trace.
"""

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.records.storage import is_remote
from jaxscale.training.device_times import KINDS, Summary, summary_of

FOLDER = "profile"
SUMMARY = "summary.txt"


@dataclasses.dataclass(frozen=True)
class ProfileRange:
    """Steps to trace: from `first` up to, but not including, `stop`.

    Example:
        >>> ProfileRange.parse("10:13")
        ProfileRange(first=10, stop=13)
        >>> str(ProfileRange.parse("10"))
        '10:11'
    """

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 1 <= self.first < self.stop:
            raise UserError(
                f"profile {self.first}:{self.stop}: expected FIRST:STOP with 1 <= FIRST < STOP, such as 10:13 for the "
                "steps 10, 11 and 12"
            )

    @classmethod
    def parse(cls, text: str) -> "ProfileRange":
        """Return the range for a text such as "10:13" (steps 10, 11 and 12) or "10" (step 10 alone)."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text)
        if match is None:
            raise UserError(f"profile {text!r}: expected FIRST:STOP, such as 10:13 for the steps 10, 11 and 12")
        first = int(match[1])
        return cls(first, first + 1 if match[2] is None else int(match[2]))

    def within(self, steps: int) -> "ProfileRange":
        """Return this range if a run of `steps` steps reaches it.

        Raises:
            UserError: the range begins after the last step.
        """
        if self.first > steps:
            raise UserError(f"profile {self}: the run has {steps} steps, expected FIRST from 1 to {steps}")
        return self

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"


class Profiler:
    """Traces a range of steps of a training loop, and writes the summary beside the trace.

    The loop calls `start_before` before every step, `stop_after` if `is_last_step` is true or the run stops inside the
    range, and finally `close`. The trace also contains a step that is still running when the trace starts.

    Args:
        step_range: the steps to trace; `None` traces nothing. A run that is resumed inside the range traces only the
            steps that remain.
    """

    def __init__(self, step_range: ProfileRange | None) -> None:
        self.step_range = step_range
        self._first_step: int | None = None  # the first step of the running trace, if one is running
        self._trace_folder = Path()  # the local folder of that trace

    @property
    def is_running(self) -> bool:
        """Whether a trace is running."""
        return self._first_step is not None

    def missed_text(self, step: int) -> str:
        """Return a line for the user if a run that continues after `step` makes no step of the range; otherwise ""."""
        if self.step_range is None or self.step_range.stop > step + 1:
            return ""
        return (
            f"profile {self.step_range}: the run continues after step {step}, so the steps of this range are not traced"
        )

    def start_before(self, step: int, folder: Any) -> None:
        """Start tracing if the next step is in the range and no trace is running.

        Args:
            step: number of the next step.
            folder: the run's folder; the trace goes into its subfolder "profile".
        """
        if self.is_running or self.step_range is None or not self.step_range.first <= step < self.step_range.stop:
            return
        import jax

        self._first_step = step
        self._trace_folder = Path(tempfile.mkdtemp()) if is_remote(folder) else Path(folder) / FOLDER
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's tracer slows the host, and the summary does not use it
        jax.profiler.start_trace(self._trace_folder, profiler_options=options)

    def is_last_step(self, step: int) -> bool:
        """Return whether a trace is running and `step`, which has just been dispatched, is the last of the range."""
        return self.is_running and self.step_range is not None and step >= self.step_range.stop - 1

    def stop_after(
        self,
        step: int,
        folder: Any,
        state: Any,
        log_event: Callable[..., None] | None = None,
        say: Callable[[str], None] | None = None,
        extra_files: Mapping[str, str] | None = None,
    ) -> Summary | None:
        """Wait for `state`, stop tracing, and write, log and show the summary.

        Args:
            step: number of the step that has just been dispatched.
            folder: the run's folder.
            state: the state that the step returns; the trace contains the whole step once the state is ready.
            log_event: function that is called as `log_event("profile", ...)` with the shares of the busiest device.
            say: function that is called with the summary's text.
            extra_files: texts of further files to write into the trace's folder, by file name.

        Returns:
            The summary; `None` if no trace was running.
        """
        import jax

        if self._first_step is None:
            return None
        jax.block_until_ready(state)
        first_step, self._first_step = self._first_step, None
        jax.profiler.stop_trace()
        summary = summary_of(self._trace_folder, steps=step + 1 - first_step)
        if jax.process_index() == 0:
            (self._trace_folder / SUMMARY).write_text(f"{summary}\n")
            for file_name, file_text in (extra_files or {}).items():
                (self._trace_folder / file_name).write_text(file_text)
        if is_remote(folder):
            _upload(self._trace_folder, folder / FOLDER)
            shutil.rmtree(self._trace_folder)
        busiest_time = max(summary.devices, key=lambda device_time: device_time.busy, default=None)
        if log_event is not None and busiest_time is not None:
            # shares of the self time by kind of operation; "busy" is a share of the span
            share_by_kind: dict[str, float] = {kind: round(busiest_time.share(kind), 4) for kind in KINDS}
            share_by_kind["busy"] = round(busiest_time.busy_share, 4)
            log_event("profile", steps=f"{first_step}:{step + 1}", file=f"{FOLDER}/{SUMMARY}", **share_by_kind)
        if say is not None:
            say(str(summary))
        return summary

    def close(self) -> None:
        """Stop a trace that a failed step left running, without a summary; JAX can run only one trace at a time."""
        if self.is_running:
            import jax

            self._first_step = None
            jax.profiler.stop_trace()
            if self._trace_folder.name != FOLDER:  # a temporary folder, of a run in a bucket
                shutil.rmtree(self._trace_folder)


def _upload(local_folder: Path, bucket_folder: Any) -> None:
    """Copy all files below a local folder to a folder of a bucket."""
    for local_file in sorted(local_folder.rglob("*")):
        if local_file.is_file():
            bucket_file = bucket_folder / str(local_file.relative_to(local_folder))
            bucket_file.parent.mkdir(parents=True, exist_ok=True)
            bucket_file.write_bytes(local_file.read_bytes())
