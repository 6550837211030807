"""Trace chosen steps of a run with JAX's profiler, and write a summary beside the trace.

The trace itself (`profile/plugins/...`, for TensorBoard or Perfetto) is JAX's; `device_times.py` reads the summary
from it.
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
        """The range of "10:13" (steps 10, 11, 12) or "10" (that step alone)."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text)
        if match is None:
            raise UserError(f"profile {text!r}: expected FIRST:STOP, such as 10:13 for the steps 10, 11 and 12")
        first = int(match[1])
        return cls(first, first + 1 if match[2] is None else int(match[2]))

    def within(self, steps: int) -> "ProfileRange":
        """This range, if a run of `steps` steps reaches it.

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

    The loop calls `before` every step, `after` when `ends` is true or the run stops inside the range, and `close` at
    the end. The trace includes a step that is still running when it starts.

    Args:
        steps: the steps to trace; a run that is resumed inside the range traces its remainder. `None` traces nothing.
    """

    def __init__(self, steps: ProfileRange | None) -> None:
        self.steps = steps
        self._started_at: int | None = None
        self._folder = Path()

    @property
    def running(self) -> bool:
        """Whether a trace is running."""
        return self._started_at is not None

    def missed(self, step: int) -> bool:
        """Whether a run that continues after `step` has passed the whole range."""
        return self.steps is not None and self.steps.stop <= step + 1

    def before(self, step: int, folder: Any) -> None:
        """Start tracing if the next step is in the range.

        Args:
            step: number of the next step.
            folder: the run's folder; the trace goes into its subfolder "profile".
        """
        if self.running or self.steps is None or not self.steps.first <= step < self.steps.stop:
            return
        import jax

        self._started_at = step
        self._folder = Path(tempfile.mkdtemp()) if is_remote(folder) else Path(folder) / FOLDER
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's tracer slows the host, and the summary does not use it
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def ends(self, step: int) -> bool:
        """Whether a trace is running and `step`, which was just dispatched, is the last of the range."""
        return self.running and self.steps is not None and step >= self.steps.stop - 1

    def after(
        self,
        step: int,
        folder: Any,
        state: Any,
        event: Callable[..., None] | None = None,
        say: Callable[[str], None] | None = None,
        extra_files: Mapping[str, str] | None = None,
    ) -> Summary | None:
        """Stop tracing once `state` is ready, write the summary, and report it.

        Args:
            step: number of the step just dispatched.
            folder: the run's folder.
            state: the state that the step returns, which is awaited so that the trace holds the whole step.
            event: function called as `event("profile", ...)` with the shares of the busiest device.
            say: function called with the summary's text.
            extra_files: text of each further file for the trace's folder, by file name.

        Returns:
            The summary; None if no trace was running.
        """
        import jax

        if self._started_at is None:
            return None
        jax.block_until_ready(state)
        first, self._started_at = self._started_at, None
        jax.profiler.stop_trace()
        summary = summary_of(self._folder, steps=step + 1 - first)
        if jax.process_index() == 0:
            (self._folder / SUMMARY).write_text(f"{summary}\n")
            for name, text in (extra_files or {}).items():
                (self._folder / name).write_text(text)
        if is_remote(folder):
            _upload(self._folder, folder / FOLDER)
            shutil.rmtree(self._folder)
        busiest = max(summary.devices, key=lambda device: device.busy, default=None)
        if event is not None and busiest is not None:
            shares: dict[str, float] = {kind: round(busiest.share(kind), 4) for kind in KINDS}
            shares["busy"] = round(busiest.busy_share, 4)
            event("profile", steps=f"{first}:{step + 1}", file=f"{FOLDER}/{SUMMARY}", **shares)
        if say is not None:
            say(str(summary))
        return summary

    def close(self) -> None:
        """Stop a trace that a failed step has left running, without a summary: JAX runs one trace at a time."""
        if self.running:
            import jax

            self._started_at = None
            jax.profiler.stop_trace()
            if self._folder.name != FOLDER:  # a temporary folder, of a run in a bucket
                shutil.rmtree(self._folder)


def _upload(source: Path, target: Any) -> None:
    """Copy the files of a local folder to a bucket."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            target_file = target / str(file.relative_to(source))
            target_file.parent.mkdir(parents=True, exist_ok=True)
            target_file.write_bytes(file.read_bytes())
