"""Where the hours of a run went: the seconds that its first process spent in each phase, and what failures cost.

The time from a failure to the first step that no earlier attempt had reached is lost: it holds the restart, and the
steps since the last checkpoint once more. The parts add up to the time from the start of the run to its end, without
the time between launches.
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

MOMENTS = ("first new step", "end")


@dataclasses.dataclass(frozen=True)
class Hours:
    """The parts of a run's time.

    Args:
        seconds: seconds of the whole run.
        seconds_by_phase: seconds of each phase outside of the lost time.
        lost: pairs of a failure and the seconds that it cost.
    """

    seconds: float
    seconds_by_phase: Mapping[str, float]
    lost: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        parts = sorted(self.seconds_by_phase.items(), key=lambda item: -item[1])
        texts = [f"{phase} {duration(value)}" for phase, value in parts if value >= 0.005 * self.seconds]
        lost_seconds = sum(seconds for _, seconds in self.lost)
        if self.lost:
            texts.append(f"lost to {len(self.lost)} restart{'s' * (len(self.lost) > 1)} {duration(lost_seconds)}")
        lines = [f"{duration(self.seconds)}: {', '.join(texts)}"]
        lines += [f"lost {duration(seconds)}: {cause}" for cause, seconds in self.lost]
        return "\n".join(lines)


@dataclasses.dataclass
class _Span:
    """One attempt: its times, its phases at the end, and its phases at the first new step if it reached one."""

    start_time: float
    end_time: float
    launch: str
    cause: str
    final: Mapping[str, float]
    new_time: float | None = None
    at_new: Mapping[str, float] = dataclasses.field(default_factory=dict)


def hours(run_dir: Any) -> Hours | None:
    """Return where the hours of a run went; `None` if nothing is recorded.

    Args:
        run_dir: directory of a run. If its metrics.jsonl cannot be read, the attempts alone count.
    """
    folder = heartbeat_folder(run_dir)
    attempts = [] if folder is None else read_attempts(folder)
    if folder is not None and attempts and (running_attempt := _running_attempt(folder, attempts[-1])) is not None:
        attempts = [*attempts, running_attempt]
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, UserError):
        rows = read_rows(run_dir)
    return hours_of(rows, attempts)


def _running_attempt(folder: Path, last: Attempt) -> Attempt | None:
    """Return the attempt that follows the last one that has ended, by the first process's heartbeat."""
    beat = read_heartbeats(folder).get(0)
    if beat is None or beat.attempt <= last.number:
        return None
    try:
        end_time = heartbeat_file(folder, 0).stat().st_mtime
    except OSError:
        return None
    seconds_by_phase = dict(beat.seconds_by_phase)
    return Attempt(beat.attempt, last.launch, 0, beat.step, end_time - beat.uptime, end_time, "", seconds_by_phase)


def hours_of(rows: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> Hours | None:
    """Return where the hours of a run went, given all rows of its metrics and its attempts; `None` without any.

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
    lost: list[tuple[str, float]] = []
    total, failure_time, failure = 0.0, None, ""
    for index, span in enumerate(spans):
        base: Mapping[str, float] = {}
        counted_time = span.start_time
        if failure_time is not None:
            if span.new_time is None and span.cause:
                lost.append((failure, span.end_time - failure_time))
                total += span.end_time - failure_time
                failure_time, failure = span.end_time, span.cause
                continue
            counted_time = span.start_time if span.new_time is None else span.new_time
            lost.append((failure, counted_time - failure_time))
            total += counted_time - failure_time
            base = span.at_new if span.new_time is not None else {}
        total += span.end_time - counted_time
        phase_seconds = {phase: value - base.get(phase, 0.0) for phase, value in span.final.items()}
        rest = span.end_time - counted_time - sum(phase_seconds.values())
        for phase, value in {**phase_seconds, "starting": phase_seconds.get("starting", 0.0) + rest}.items():
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + max(value, 0.0)
        failure_time, failure = None, ""
        is_followed = index + 1 < len(spans)
        if span.cause and is_followed:
            is_same_launch = spans[index + 1].launch == span.launch
            failure_time = span.end_time if is_same_launch else spans[index + 1].start_time
            failure = span.cause
    return Hours(total, {phase: value for phase, value in seconds_by_phase.items() if value > 0}, tuple(lost))


def _moments(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events that hold the seconds by phase, in order; damaged ones are left out."""
    return [row for row in rows if row.get("name") == "hours" and row.get("at") in MOMENTS and _is_moment(row)]


def _is_moment(row: Mapping[str, Any]) -> bool:
    """Return whether an event has the seconds by phase, and its times, as numbers of seconds."""
    seconds_by_phase = row.get("seconds_by_phase")
    if not isinstance(seconds_by_phase, dict):
        return False
    times = [row.get("process_start"), row.get("time"), *seconds_by_phase.values()]
    return all(type(value) in (int, float) and abs(value) <= MAX_INT64 for value in times)


def _launched_spans(rows: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[_Span]:
    """Return the attempts of a launched run, whose times the launcher measured."""
    spans: list[_Span] = []
    for attempt in attempts:
        attempt_rows = [row for row in _moments(rows) if attempt.start_time <= row["process_start"] <= attempt.end_time]
        end = next((row for row in attempt_rows if row["at"] == "end"), None)
        new = next((row for row in attempt_rows if row["at"] == "first new step"), None)
        cause = "" if attempt.code == DONE else attempt.verdict or f"code {attempt.code}"
        cause = "stopped by a signal" if attempt.code in STOP_CODES else cause
        final = attempt.seconds_by_phase or ({} if end is None else end["seconds_by_phase"])
        span = _Span(attempt.start_time, attempt.end_time, attempt.launch, cause, final)
        if new is not None:
            span.new_time, span.at_new = new["time"], new["seconds_by_phase"]
        spans.append(span)
    return spans


def _plain_spans(rows: Sequence[Mapping[str, Any]]) -> list[_Span]:
    """Return the attempts of a run without a launcher; a process that was killed ends with its last row."""
    spans: list[_Span] = []
    moments = _moments(rows)
    starts = sorted({row["process_start"] for row in moments})
    for index, start_time in enumerate(starts):
        process_rows = [row for row in moments if row["process_start"] == start_time]
        next_start = starts[index + 1] if index + 1 < len(starts) else float("inf")
        new = next((row for row in process_rows if row["at"] == "first new step"), None)
        end = next((row for row in process_rows if row["at"] == "end"), None)
        last_time = max(
            (time for row in rows if start_time <= (time := row.get("time", -math.inf)) < next_start),
            default=start_time,
        )
        final = dict(process_rows[-1]["seconds_by_phase"])
        if end is None:  # it was killed, or it still runs
            final["stepping"] = final.get("stepping", 0.0) + last_time - process_rows[-1]["time"]
        cause = "" if end is not None else "the process was killed"
        span = _Span(start_time, last_time if end is None else end["time"], str(start_time), cause, final)
        if new is not None:
            span.new_time, span.at_new = new["time"], new["seconds_by_phase"]
        spans.append(span)
    return spans
