"""The state of a run's processes, from their heartbeats, and the request to stop a run."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.heartbeat import Heartbeat, heartbeat_file, read_heartbeats
from jaxscale.launch.rank_process import log_file
from jaxscale.launch.verdict import judge
from jaxscale.launch.watch import LOST_SECONDS, SHOWN_LINES, STOP, Watched, last_lines, read_ending
from jaxscale.records.attempts import read_attempts
from jaxscale.records.directory import is_locked
from jaxscale.values.read_files import is_regular
from jaxscale.values.units import duration


def status(folder: Path) -> str:
    """Return a text about a run: a table of its processes, a verdict if some hang or failed, and earlier attempts.

    Args:
        folder: folder of the run's heartbeats.

    Raises:
        UserError: no process has written a heartbeat.
    """
    heartbeat_by_rank = read_heartbeats(folder)
    attempts = read_attempts(folder)
    if not heartbeat_by_rank and not attempts:
        raise UserError(f"{folder} holds no heartbeats: expected a run that was started by train or launch")
    age_by_rank = heartbeat_ages(folder, heartbeat_by_rank)
    attempt_number = max((beat.attempt for beat in heartbeat_by_rank.values()), default=0)
    rows = [("rank", "host", "process", "phase", "step", "in it for", "heartbeat", "")]
    for rank, beat in heartbeat_by_rank.items():
        note = beat.failure or ("" if beat.phase == "finished" else beat.place)
        if beat.attempt < attempt_number:
            note = f"of attempt {beat.attempt}"
        elif not beat.failure and beat.phase != "finished" and age_by_rank[rank] > LOST_SECONDS:
            note = "lost or frozen"
        age_text = f"{duration(age_by_rank[rank])} ago"
        rows.append(
            (str(rank), beat.host, str(beat.pid), beat.phase, str(beat.step), duration(beat.since), age_text, note)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if (folder / STOP).exists():
        lines.append("the run was asked to stop")
    watched = Watched(folder, max(heartbeat_by_rank, default=0) + 1, attempt_number)
    ending = read_ending(watched)
    if ending is not None:
        lines.append(str(judge(heartbeat_by_rank, watched.process_count, attempt_number, ending)))
    for past_attempt in attempts:
        verdict_text = f": {past_attempt.verdict}" if past_attempt.verdict else ""
        duration_text = duration(past_attempt.end_time - past_attempt.start_time)
        lines.append(
            f"attempt {past_attempt.number}: code {past_attempt.code} after {duration_text}, step "
            f"{past_attempt.step}{verdict_text}"
        )
    return "\n".join(lines)


def heartbeat_ages(folder: Path, heartbeat_by_rank: dict[int, Heartbeat]) -> dict[int, float]:
    """Return, by rank, the seconds since each heartbeat file was written, measured by the clock of the file system."""
    now = time.time()
    with contextlib.suppress(OSError):  # a file server's clock may differ from this host's
        probe_file = folder / f".now-{os.getpid()}"
        probe_file.touch()
        now = probe_file.stat().st_mtime
        probe_file.unlink()
    age_by_rank: dict[int, float] = {}
    for rank in heartbeat_by_rank:
        age_by_rank[rank] = float("inf")
        with contextlib.suppress(OSError):
            age_by_rank[rank] = max(0.0, now - heartbeat_file(folder, rank).stat().st_mtime)
    return age_by_rank


def show_log(folder: Path, rank: int) -> None:
    """Print the end of a process's log, and then follow the log while the process runs.

    Raises:
        UserError: the process has no log.
    """
    path = log_file(folder, rank)
    if not is_regular(path):
        ranks = sorted(int(file.stem.removeprefix("rank-")) for file in folder.glob("rank-*.log"))
        expected_text = f"expected one of {', '.join(map(str, ranks))}" if ranks else "only launched runs have logs"
        raise UserError(f"--log {rank}: {path} does not exist; {expected_text}")
    for line in last_lines(path, SHOWN_LINES):
        print(line)
    with contextlib.suppress(KeyboardInterrupt):
        follow(path, path.stat().st_size, lambda: is_running(folder, rank))


def follow(path: Path, position: int, is_growing: Callable[[], bool], interval: float = 0.5) -> None:
    """Print the text that other processes append to a file, until `is_growing` returns false.

    Args:
        path: the file, which need not exist yet.
        position: number of bytes to skip at the start of the file.
        is_growing: function that returns whether another process may still append text.
        interval: seconds between two reads of the file.
    """
    is_last_look = False
    while True:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            added_bytes = file.read()
            position += len(added_bytes)
            sys.stdout.write(added_bytes.decode(errors="replace"))
            sys.stdout.flush()
        if is_last_look:
            return
        is_last_look = not is_growing()
        if not is_last_look:
            time.sleep(interval)


def is_running(folder: Path, rank: int) -> bool:
    """Return whether a process is running: it has written a heartbeat recently, and has neither failed nor finished."""
    heartbeat_by_rank = read_heartbeats(folder)
    if rank not in heartbeat_by_rank or heartbeat_by_rank[rank].failure or heartbeat_by_rank[rank].phase == "finished":
        return False
    if heartbeat_by_rank[rank].host == socket.gethostname():
        try:
            os.kill(heartbeat_by_rank[rank].pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # the process belongs to another user
    return heartbeat_ages(folder, {rank: heartbeat_by_rank[rank]})[rank] < LOST_SECONDS


def stop(folder: Path) -> str:
    """Ask a run to save and stop, and return a sentence about what will happen.

    For a launched run, the request is a file in the folder, which the watchdogs find. For a run without a watchdog, the
    run's only process receives SIGTERM; that process must run on this machine.

    Args:
        folder: folder of the run's heartbeats.

    Raises:
        UserError: no process of the run is running, or the run has no watchdog and runs on another machine.
    """
    working_ranks = [rank for rank in read_heartbeats(folder) if is_running(folder, rank)]
    heartbeat_by_rank = read_heartbeats(folder)
    is_launched = any(folder.glob("rank-*.log"))
    if not working_ranks and not (is_launched and is_locked(folder)):
        raise UserError(f"no process of the run in {folder.parent} works: there is nothing to stop")
    if is_launched:
        (folder / STOP).touch()
        return "the run saves after its step and stops; start it again to continue it"
    rank = working_ranks[0]
    if heartbeat_by_rank[rank].host != socket.gethostname():
        raise UserError(
            f"the run was started without a watchdog on {heartbeat_by_rank[rank].host}: call `jaxscale stop` or "
            f"`kill -TERM {heartbeat_by_rank[rank].pid}` there"
        )
    os.kill(heartbeat_by_rank[rank].pid, signal.SIGTERM)
    return f"process {heartbeat_by_rank[rank].pid} saves after its step and stops; start the run again to continue it"
