"""Heartbeats: the progress of a run's process, written to a small file that watchdogs and `jaxscale status` read.

The training loop sets the phase and the step, which costs two assignments. A thread writes them to the file twice a
second, with the seconds since the last change. If the main thread hangs, the process still writes, and these seconds
grow. A process that is frozen or was killed no longer writes.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from jaxscale.values.limits import MAX_INT64, MAX_RECORD_BYTES
from jaxscale.values.read_files import read_bytes

FOLDER_VARIABLE = "JAXSCALE_HEARTBEATS"
"""The environment variable that names the folder of the heartbeat files; a watchdog sets it."""
ATTEMPT_VARIABLE = "JAXSCALE_ATTEMPT"
"""The environment variable that holds the number of the attempt, from 1; a watchdog sets it."""
LAUNCH_VARIABLE = "JAXSCALE_LAUNCH"
"""The environment variable that `jaxscale retry` sets for its watchdogs; `retry` then records the attempts itself."""
WRITE_INTERVAL = 0.5  # seconds

WAITING_FUNCTIONS = frozenset(
    {
        "_value",
        "block_until_ready",
        "broadcast_one_to_all",
        "combine",  # of an `Agreement`
        "device_get",
        "process_allgather",
        "sync_global_devices",
        "sync_global_processes",
        "wait_at_barrier",
        "result",  # of a thread of Orbax, which waits in turn
    }
)
"""Functions of JAX, Orbax and jaxscale in which a process waits for devices, or for all processes."""
WAITING_DEPTH = 12
"""Number of innermost frames of the call stack that are searched for a waiting function."""
_LIBRARY_FOLDER = str(Path(os.__file__).parent) + os.sep

RunPhase = Literal[
    "starting",
    "joining",
    "preparing",
    "initializing",
    "restoring",
    "compiling",
    "stepping",
    "logging",
    "data",
    "evaluating",
    "saving",
    "finished",
]
PHASES: tuple[RunPhase, ...] = get_args(RunPhase)


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The content of a heartbeat file.

    Args:
        rank: number of the process, from 0.
        host: name of the process's machine.
        pid: process id on that machine.
        attempt: number of the attempt, from 1.
        phase: what the process does.
        step: number of the step that the process entered last; 0 before the first step.
        since: seconds since the phase or the step last changed.
        uptime: seconds since the process started to write heartbeats.
        beat: number of times the file was written; it grows while the process runs.
        seconds_by_phase: seconds spent in each phase so far; they add up to `uptime`.
        failure: the error that ended the process's work; "" while it works.
        place: the line of code that the main thread executes, such as "loop.py:276 _restore_state". It is the innermost
            line outside of Python's standard library.
        is_waiting: whether the main thread waits for devices or for other processes.
        longest_by_phase: by phase, seconds of the longest completed stay in the phase so far.
        is_in_step: whether the main thread has dispatched a step to the devices, and waits for it or for its metrics.
    """

    rank: int
    host: str
    pid: int
    attempt: int
    phase: str
    step: int
    since: float
    uptime: float
    beat: int
    seconds_by_phase: Mapping[str, float]
    failure: str = ""
    place: str = ""
    is_waiting: bool = False
    longest_by_phase: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_in_step: bool = False

    @classmethod
    def parse(cls, text: str) -> "Heartbeat | None":
        """Return the heartbeat in a file's text; `None` if the text is incomplete or not a heartbeat."""
        try:
            heartbeat_json = json.loads(text)
            heartbeat = cls(**heartbeat_json)
            whole_numbers = [heartbeat.rank, heartbeat.pid, heartbeat.attempt, heartbeat.step, heartbeat.beat]
            second_counts = [heartbeat.since, heartbeat.uptime, *heartbeat.seconds_by_phase.values()]
            second_counts += heartbeat.longest_by_phase.values()
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        is_valid = all(type(whole_number) is int and 0 <= whole_number <= MAX_INT64 for whole_number in whole_numbers)
        is_valid = is_valid and all(
            type(seconds) in (int, float) and 0 <= seconds <= MAX_INT64 for seconds in second_counts
        )
        text_fields = [heartbeat.host, heartbeat.failure, heartbeat.place]
        is_valid = is_valid and all(type(field_text) is str for field_text in text_fields)
        is_valid = is_valid and type(heartbeat.is_waiting) is type(heartbeat.is_in_step) is bool
        return heartbeat if is_valid and heartbeat.phase in PHASES else None


class Writer:
    """Writes the heartbeats of this process.

    Args:
        folder: folder of the heartbeat files; with `None`, only the seconds are counted, and nothing is written.
        rank: number of this process; `None` until it is known.
        attempt: number of the attempt.
        clock: function that returns the time in seconds.
    """

    def __init__(self, folder: Path | None, rank: int | None, attempt: int = 1, clock: Any = time.monotonic) -> None:
        self.folder, self.rank, self.attempt = folder, rank, attempt
        self.phase: RunPhase = "starting"
        self.step = 0
        self.failure = ""
        self.awaited_step: int | None = None
        self.wait_count = 0
        self._clock = clock
        self._start_time = self._change_time = clock()
        self.start_time = time.time()
        self._closed_seconds: dict[str, float] = {}
        self._longest_seconds: dict[str, float] = {}
        self._beat = 0
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()
        self._lock = threading.Lock()

    def set(self, phase: RunPhase, step: int | None = None) -> None:
        """Set the phase and, unless `step` is `None`, the step."""
        now = self._clock()
        with self._lock:
            phase_seconds = now - self._change_time
            self._closed_seconds[self.phase] = self._closed_seconds.get(self.phase, 0.0) + phase_seconds
            self._longest_seconds[self.phase] = max(self._longest_seconds.get(self.phase, 0.0), phase_seconds)
            self._change_time, self.phase = now, phase
            if step is not None:
                self.step = step

    def heartbeat(self) -> Heartbeat:
        """Return the current heartbeat."""
        with self._lock:
            now = self._clock()
            phase_seconds = now - self._change_time
            seconds_by_phase = dict(self._closed_seconds)
            seconds_by_phase[self.phase] = seconds_by_phase.get(self.phase, 0.0) + phase_seconds
            return Heartbeat(
                self.rank or 0, socket.gethostname(), os.getpid(), self.attempt, self.phase, self.step, phase_seconds,
                now - self._start_time, self._beat, seconds_by_phase, self.failure, *_main_thread_place(),
                longest_by_phase=dict(self._longest_seconds), is_in_step=self.awaited_step is not None,
            )  # fmt: skip

    @property
    def is_writing(self) -> bool:
        """Whether the thread that writes the file runs."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread that writes the file, if the folder and the rank are known."""
        if self._thread is None and self.folder is not None and self.rank is not None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the last heartbeat, and end the thread."""
        if self._thread is not None:
            self._stop_event.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """Write the file repeatedly until `close` is called, and then once more."""
        while not self._stop_event.wait(WRITE_INTERVAL if self._beat else 0):
            self._write()
        self._write()

    def _write(self) -> None:
        """Write the file. Errors are ignored, since a full or lost disk must not end the run."""
        assert self.folder is not None
        self._beat += 1
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = heartbeat_file(self.folder, self.rank or 0)
            temporary_path = path.with_suffix(".half")
            temporary_path.write_text(json.dumps(dataclasses.asdict(self.heartbeat())))
            temporary_path.replace(path)


def _main_thread_place() -> tuple[str, bool]:
    """Return, as text, the line that the main thread executes, and whether it waits for devices or other processes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place, depth = "", 0
    while frame is not None and depth < WAITING_DEPTH:
        function_name, file_path = frame.f_code.co_name, frame.f_code.co_filename
        if function_name in WAITING_FUNCTIONS:
            return place or f"{Path(file_path).name}:{frame.f_lineno} {function_name}", True
        if not place and not file_path.startswith(("<", _LIBRARY_FOLDER)):
            place = f"{Path(file_path).name}:{frame.f_lineno} {function_name}"
        frame, depth = frame.f_back, depth + 1
    return place, False


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of a process's heartbeat file.

    Example:
        >>> heartbeat_file(Path("run/processes"), 3).name
        'rank-00003.json'
    """
    return folder / f"rank-{rank:05d}.json"


def read_heartbeats(folder: Path) -> dict[int, Heartbeat]:
    """Return the heartbeats in a folder, by rank. Incomplete, misnamed and vanished files are left out."""
    heartbeat_by_rank: dict[int, Heartbeat] = {}
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError):  # UserError and UnicodeDecodeError are ValueErrors
            heartbeat = Heartbeat.parse(read_bytes(path, MAX_RECORD_BYTES).decode())
            if heartbeat is not None and path.name == heartbeat_file(folder, heartbeat.rank).name:
                heartbeat_by_rank[heartbeat.rank] = heartbeat
    return heartbeat_by_rank


_writer = Writer(None, None)


def start(rank: int, folder: Path | None = None) -> None:
    """Start to write this process's heartbeats.

    Under a watchdog, the environment names the folder. In that case, this function also makes the signal SIGUSR1 dump
    the stacks of all threads to stderr.

    Args:
        rank: number of this process.
        folder: folder to write to if the environment names none. If this is `None` too, nothing is written.
    """
    folder_name = os.environ.get(FOLDER_VARIABLE)
    _writer.folder = Path(folder_name) if folder_name else folder
    _writer.rank = rank
    attempt_text = os.environ.get(ATTEMPT_VARIABLE, "")
    _writer.attempt = int(attempt_text) if attempt_text.isascii() and attempt_text.isdigit() else 1
    if folder_name and hasattr(faulthandler, "register"):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is not a file, as in a notebook
            faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    _writer.start()


def stop() -> None:
    """Write the last heartbeat of this run, and reset the seconds to 0 for the next run in this process."""
    global _writer
    _writer.close()
    _writer = Writer(None, _writer.rank)


def fail(error: BaseException) -> None:
    """Write a last heartbeat with the error that ended this process's work.

    Do nothing if this process writes no heartbeats, or has already reported an error.
    """
    if _writer.is_writing and not _writer.failure:
        _writer.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:500]}"
        _writer.close()


def own_heartbeat() -> tuple[Heartbeat, float]:
    """Return this process's current heartbeat, and the start of its uptime in seconds since 1970."""
    return _writer.heartbeat(), _writer.start_time


def peer_heartbeats() -> dict[int, Heartbeat]:
    """Return the newest heartbeats of this attempt's processes, including this process, by rank.

    For a run in a bucket, only heartbeats of processes on this host are found, and only under a watchdog.
    """
    heartbeat_by_rank = {} if _writer.folder is None else read_heartbeats(_writer.folder)
    return {rank: heartbeat for rank, heartbeat in heartbeat_by_rank.items() if heartbeat.attempt == _writer.attempt}


def awaited_step() -> tuple[int, int] | None:
    """Return the awaited step, and the number of that wait; `None` if the main thread does not wait for a step."""
    step, wait_number = _writer.awaited_step, _writer.wait_count
    return None if step is None else (step, wait_number)


class Awaiting:
    """A context that reports that the main thread dispatches a step to the devices, or waits for it.

    It is a class, because a generator would take twice as long, and each step opens two contexts.

    Args:
        step: number of the step; `None` for the step that this process entered last.
    """

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._writer = _writer
        self._writer.wait_count += 1
        self._writer.awaited_step = self._writer.step if self._step is None else self._step

    def __exit__(self, *_: object) -> None:
        self._writer.awaited_step = None


def awaiting(step: int | None = None) -> Awaiting:
    """Return a context that reports that the main thread dispatches a step to the devices, or waits for it.

    Args:
        step: number of the step; by default, the step that this process entered last.
    """
    return Awaiting(step)


def set_phase(phase: RunPhase, step: int | None = None) -> None:
    """Set the phase of this process and, unless `step` is `None`, the step that it enters."""
    _writer.set(phase, step)


@contextlib.contextmanager
def in_phase(phase: RunPhase) -> Iterator[None]:
    """Set the phase of this process while the context is open; afterwards, set the previous phase again."""
    previous_phase = _writer.phase
    _writer.set(phase)
    try:
        yield
    finally:
        _writer.set(previous_phase)
