"""Where the time of a run went: the seconds that its first process spent in each phase, and the cost of failures.

The time from a failure to the first step that no earlier attempt had reached is lost. It consists of the restart and
the repetition of the steps since the last checkpoint. All parts add up to the time from the start of the run to its
end, without the time between launches.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.errors import DONE, STOP_CODES, UserError
from jaxscale.heartbeat import heartbeat_file, read_heartbeats
from jaxscale.records.attempts import Attempt, read_attempts
from jaxscale.records.directory import heartbeat_folder
from jaxscale.records.metrics import read_rows
from jaxscale.values.limits import MAX_INT64
from jaxscale.values.units import duration

MOMENTS = ("first new step", "end")  # values of the field `at` of an hours event


@dataclasses.dataclass(frozen=True)
class Hours:
    """The parts of a run's time.

    Args:
        seconds: seconds of the whole run.
        seconds_by_phase: seconds in each phase, without the lost time.
        lost: (cause, seconds) for each failure: the cause of the failure, and the seconds that it cost.
    """

    seconds: float
    seconds_by_phase: Mapping[str, float]
    lost: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        phases_and_seconds = sorted(self.seconds_by_phase.items(), key=lambda phase_and_seconds: -phase_and_seconds[1])
        phase_texts = [
            f"{phase} {duration(phase_seconds)}"
            for phase, phase_seconds in phases_and_seconds
            if phase_seconds >= 0.005 * self.seconds
        ]
        lost_seconds = sum(seconds for _, seconds in self.lost)
        if self.lost:
            phase_texts.append(f"lost to {len(self.lost)} restart{'s' * (len(self.lost) > 1)} {duration(lost_seconds)}")
        lines = [f"{duration(self.seconds)}: {', '.join(phase_texts)}"]
        lines += [f"lost {duration(seconds)}: {cause}" for cause, seconds in self.lost]
        return "\n".join(lines)


@dataclasses.dataclass
class _Span:
    """One attempt: start and end, and the seconds by phase at its end and, if it reached a new step, at that step."""

    start_time: float
    end_time: float
    launch: str
    cause: str
    seconds_at_end: Mapping[str, float]
    new_step_time: float | None = None
    seconds_at_new_step: Mapping[str, float] = dataclasses.field(default_factory=dict)


def hours(run_dir: Any) -> Hours | None:
    """Return where the time of a run went; `None` if nothing is recorded.

    Args:
        run_dir: directory of a run. If its metrics.jsonl cannot be read, only the recorded attempts are used.
    """
    folder = heartbeat_folder(run_dir)
    attempts = [] if folder is None else read_attempts(folder)
    if folder is not None and attempts and (running_attempt := _running_attempt(folder, attempts[-1])) is not None:
        attempts = [*attempts, running_attempt]
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, UserError):
        rows = read_rows(run_dir)
    return hours_of(rows, attempts)


def _running_attempt(folder: Path, last_attempt: Attempt) -> Attempt | None:
    """Return the attempt that is running after the last recorded one, from the first process's heartbeat, or `None`."""
    heartbeat = read_heartbeats(folder).get(0)
    if heartbeat is None or heartbeat.attempt <= last_attempt.number:
        return None
    try:
        end_time = heartbeat_file(folder, 0).stat().st_mtime
    except OSError:
        return None
    seconds_by_phase = dict(heartbeat.seconds_by_phase)
    return Attempt(
        heartbeat.attempt,
        last_attempt.launch,
        0,
        heartbeat.step,
        end_time - heartbeat.uptime,
        end_time,
        "",
        seconds_by_phase,
    )


def hours_of(rows: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> Hours | None:
    """Return where the time of a run went, from all its metrics rows and its attempts; `None` if nothing is recorded.

    Example:
        >>> seconds = {"compiling": 4.0, "stepping": 6.0}
        >>> row = {"name": "hours", "at": "end", "time": 10.0, "process_start": 0.0, "seconds_by_phase": seconds}
        >>> print(hours_of([row], []))
        10.0 s: stepping 6.00 s, compiling 4.00 s
    """
    spans = _launched_spans(rows, attempts) if attempts else _plain_spans(rows)
    if not spans:
        return None
    seconds_by_phase: dict[str, float] = {}
    causes_and_seconds: list[tuple[str, float]] = []
    total_seconds, failure_time, failure_cause = 0.0, None, ""
    for index, span in enumerate(spans):
        earlier_seconds_by_phase: Mapping[str, float] = {}
        counted_start_time = span.start_time
        if failure_time is not None:
            if span.new_step_time is None and span.cause:
                causes_and_seconds.append((failure_cause, span.end_time - failure_time))
                total_seconds += span.end_time - failure_time
                failure_time, failure_cause = span.end_time, span.cause
                continue
            counted_start_time = span.start_time if span.new_step_time is None else span.new_step_time
            causes_and_seconds.append((failure_cause, counted_start_time - failure_time))
            total_seconds += counted_start_time - failure_time
            earlier_seconds_by_phase = span.seconds_at_new_step if span.new_step_time is not None else {}
        total_seconds += span.end_time - counted_start_time
        new_seconds_by_phase = {
            phase: phase_seconds - earlier_seconds_by_phase.get(phase, 0.0)
            for phase, phase_seconds in span.seconds_at_end.items()
        }
        unrecorded_seconds = span.end_time - counted_start_time - sum(new_seconds_by_phase.values())
        for phase, phase_seconds in {
            **new_seconds_by_phase,
            "starting": new_seconds_by_phase.get("starting", 0.0) + unrecorded_seconds,
        }.items():
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + max(phase_seconds, 0.0)
        failure_time, failure_cause = None, ""
        has_successor = index + 1 < len(spans)
        if span.cause and has_successor:
            is_same_launch = spans[index + 1].launch == span.launch
            failure_time = span.end_time if is_same_launch else spans[index + 1].start_time
            failure_cause = span.cause
    return Hours(
        total_seconds,
        {phase: phase_seconds for phase, phase_seconds in seconds_by_phase.items() if phase_seconds > 0},
        tuple(causes_and_seconds),
    )


def _moment_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that hold the seconds by phase, in order. Damaged events are left out."""
    return [row for row in rows if row.get("name") == "hours" and row.get("at") in MOMENTS and _is_moment(row)]


def _is_moment(row: Mapping[str, Any]) -> bool:
    """Return whether all times and durations of an "hours" event are valid numbers."""
    seconds_by_phase = row.get("seconds_by_phase")
    if not isinstance(seconds_by_phase, dict):
        return False
    times_and_durations = [row.get("process_start"), row.get("time"), *seconds_by_phase.values()]
    return all(type(seconds) in (int, float) and abs(seconds) <= MAX_INT64 for seconds in times_and_durations)


def _launched_spans(rows: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[_Span]:
    """Return the attempts of a launched run, with the times that the launcher recorded."""
    spans: list[_Span] = []
    for attempt in attempts:
        attempt_rows = [
            row for row in _moment_rows(rows) if attempt.start_time <= row["process_start"] <= attempt.end_time
        ]
        end_row = next((row for row in attempt_rows if row["at"] == "end"), None)
        new_step_row = next((row for row in attempt_rows if row["at"] == "first new step"), None)
        cause = "" if attempt.code == DONE else attempt.verdict or f"code {attempt.code}"
        cause = "stopped by a signal" if attempt.code in STOP_CODES else cause
        seconds_at_end = attempt.seconds_by_phase or ({} if end_row is None else end_row["seconds_by_phase"])
        span = _Span(attempt.start_time, attempt.end_time, attempt.launch, cause, seconds_at_end)
        if new_step_row is not None:
            span.new_step_time, span.seconds_at_new_step = new_step_row["time"], new_step_row["seconds_by_phase"]
        spans.append(span)
    return spans


def _plain_spans(rows: Sequence[Mapping[str, Any]]) -> list[_Span]:
    """Return the attempts of a run without a launcher. If a process was killed, its last row marks its end."""
    spans: list[_Span] = []
    moment_rows = _moment_rows(rows)
    start_times = sorted({row["process_start"] for row in moment_rows})
    for index, start_time in enumerate(start_times):
        process_rows = [row for row in moment_rows if row["process_start"] == start_time]
        next_start_time = start_times[index + 1] if index + 1 < len(start_times) else float("inf")
        new_step_row = next((row for row in process_rows if row["at"] == "first new step"), None)
        end_row = next((row for row in process_rows if row["at"] == "end"), None)
        last_time = max(
            (time for row in rows if start_time <= (time := row.get("time", -math.inf)) < next_start_time),
            default=start_time,
        )
        seconds_at_end = dict(process_rows[-1]["seconds_by_phase"])
        if end_row is None:  # the process was killed, or is still running
            seconds_at_end["stepping"] = seconds_at_end.get("stepping", 0.0) + last_time - process_rows[-1]["time"]
        cause = "" if end_row is not None else "the process was killed"
        span = _Span(
            start_time, last_time if end_row is None else end_row["time"], str(start_time), cause, seconds_at_end
        )
        if new_step_row is not None:
            span.new_step_time, span.seconds_at_new_step = new_step_row["time"], new_step_row["seconds_by_phase"]
        spans.append(span)
    return spans
