"""The watchdog of one host: starts the host's processes, and ends all of them when any process of the run fails.

A watchdog uses neither JAX nor a network. It waits for the processes that it started, reads their heartbeats, and
compares the seconds in each phase with a timeout. The first failure is written to a file in the run's folder. So the
watchdogs of the other hosts end their processes without waiting until JAX's coordination service notices the failure.
"""

import contextlib
import dataclasses
import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale import heartbeat
from jaxscale.errors import DONE, INTERRUPTED, PREEMPTED, STOP_CODES, UserError, unknown
from jaxscale.heartbeat import PHASES, heartbeat_file, read_heartbeats
from jaxscale.launch.rank_process import RankProcess, log_file
from jaxscale.launch.stop_signals import received_signals
from jaxscale.launch.verdict import PEER_FAILED, Ending, Verdict, exit_code, judge
from jaxscale.values import from_json, read_json

TIMEOUTS: Mapping[str, float] = {
    "starting": 600,
    "joining": 600,
    "preparing": 1200,
    "initializing": 3600,
    "restoring": 3600,
    "data": 600,
    "compiling": 7200,
    "stepping": 600,
    "logging": 600,
    "evaluating": 3600,
    "saving": 3600,
    "finished": 600,
    "frozen": 60,
}
"""Default timeouts in seconds, by phase; "frozen" is the longest time without a heartbeat."""
FAILURE_GRACE = 3
"""Seconds after a failure that the other processes have to end by themselves and to report their errors."""
PREEMPTION_GRACE = 120
"""Seconds that the other processes have to end after one process has saved because of a stop signal."""
STACK_SECONDS = 1.0
"""Seconds that processes have to write their stack traces."""
LOST_SECONDS = 15
"""If a heartbeat file is older than the newest one by more than this many seconds, its process counts as lost."""
FAILURE, STOP = "failure.json", "stop"
"""Files in the folder of heartbeats: the first failure of an attempt, and a user's request to stop the run."""
SHOWN_LINES = 40


@dataclasses.dataclass(frozen=True)
class Watched:
    """An attempt to run the processes, which the hosts' watchdogs watch.

    Args:
        folder: folder of the heartbeats, which all hosts share.
        process_count: number of processes of the run, on all hosts.
        attempt: number of the attempt. It is 0 for the first attempt of a launch without `jaxscale retry`; in that
            case, the folder may contain files of an earlier launch.
        timeouts: timeouts in seconds, by phase.
    """

    folder: Path
    process_count: int
    attempt: int = 1
    timeouts: Mapping[str, float] = dataclasses.field(default_factory=lambda: TIMEOUTS)


def parse_timeouts(text: str | None) -> dict[str, float]:
    """Return the timeout of every phase: the values in a text such as "stepping=120,data=60", and else the defaults.

    Raises:
        UserError: a phase is unknown, or a number of seconds is not positive.

    Example:
        >>> parse_timeouts("stepping=120,frozen=20")["stepping"]
        120.0
    """
    timeouts = dict(TIMEOUTS)
    for entry in (text or "").split(","):
        if not entry.strip():
            continue
        phase, _, seconds_text = (part.strip() for part in entry.partition("="))
        if phase not in TIMEOUTS:
            raise unknown("phase in --timeouts", phase, TIMEOUTS)
        try:
            seconds = float(seconds_text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise UserError(f"--timeouts: got {entry.strip()!r}, expected PHASE=SECONDS, such as stepping=120")
        timeouts[phase] = seconds
    return timeouts


class Watchdog:
    """Watches the processes of one host.

    Args:
        watched: the attempt to watch.
        command: the command line of each process.
        variables: environment variables of each process of this host, by rank.
    """

    def __init__(self, watched: Watched, command: Sequence[str], variables: Mapping[int, Mapping[str, str]]) -> None:
        self._watched, self._command, self._variables = watched, command, variables
        self._processes: list[RankProcess] = []
        self._ending: Ending | None = None
        self._is_own_ending = self._is_peer_ending = False
        self._noticed_ranks: set[int] = set()
        self._deadline = float("inf")
        self._received_signals: list[int] = []
        self._is_stopped = False
        self._stale_times: dict[str, int] = {}  # by name: change times of the files of an earlier launch

    @property
    def was_interrupted(self) -> bool:
        """Whether this watchdog received a stop signal."""
        return bool(self._received_signals)

    def run(self) -> int:
        """Start the processes, wait until all have ended, and return the exit code.

        Returns:
            0 if all processes succeeded; 75 or 130 if the run was stopped; otherwise the code of the process that
            failed first: 128 plus the signal's number if a signal ended the process, and 1 after a timeout.

        Raises:
            UserError: the command does not exist.
        """
        with received_signals() as self._received_signals:
            try:
                self._start()
                while (running_processes := [process for process in self._processes if process.code is None]) and (
                    time.monotonic() < self._deadline
                ):
                    self._look(running_processes)
                    time.sleep(0.05)
                self._notice_ends()
                self._end_the_rest()
                return self._exit_code()
            finally:
                for process in self._processes:
                    process.kill()

    # -- watching ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the processes of this host."""
        watched = self._watched
        watched.folder.mkdir(parents=True, exist_ok=True)
        for rank in self._variables:
            heartbeat_file(watched.folder, rank).unlink(missing_ok=True)
        if watched.attempt == 0:
            self._stale_times = {name: _change_time(watched.folder / name) for name in (FAILURE, STOP)}
        for rank, variables in self._variables.items():
            own_variables = {
                heartbeat.FOLDER_VARIABLE: str(watched.folder.absolute()),
                heartbeat.ATTEMPT_VARIABLE: str(watched.attempt),
                "PYTHONUNBUFFERED": "1",
            }
            is_shown = rank == 0
            self._processes.append(
                RankProcess(
                    rank, self._command, {**variables, **own_variables}, watched.folder, watched.attempt,
                    is_shown=is_shown,
                )
            )  # fmt: skip
        for process in self._processes:
            process.follow()
        self._next_look_time = 0.0

    def _look(self, running_processes: Sequence[RankProcess]) -> None:
        """Check once for stop signals, ended processes, timeouts, and failures on other hosts."""
        if self._received_signals:
            self._stop(running_processes)
        if len(self._received_signals) > 1:
            self._deadline = 0.0
        self._notice_ends()
        if time.monotonic() < self._next_look_time:
            return
        self._next_look_time = time.monotonic() + 0.5
        if self._is_fresh(STOP):
            self._stop(running_processes)
        if self._ending is not None:
            return
        for process in running_processes:
            cause_and_seconds = process.hang_cause_and_seconds(self._watched.timeouts)
            reported_failure_code = process.failed_code()
            if cause_and_seconds is not None:
                self._fail(self._ending_of(process, cause_and_seconds[0], 1, cause_and_seconds[1]))
                break
            if reported_failure_code is not None and reported_failure_code not in STOP_CODES:
                self._fail(self._ending_of(process, "exit", reported_failure_code))
        published_ending = self._published_ending()
        if self._ending is None and published_ending is not None:
            self._ending = published_ending
            self._deadline = min(self._deadline, time.monotonic() + FAILURE_GRACE)

    def _published_ending(self) -> Ending | None:
        """Return the first failure that a watchdog has published in this attempt; `None` if there is none."""
        return read_ending(self._watched) if self._is_fresh(FAILURE) else None

    def _is_fresh(self, name: str) -> bool:
        """Return whether a file exists in the run's folder and was written during this launch."""
        change_time = _change_time(self._watched.folder / name)
        return change_time > 0 and change_time != self._stale_times.get(name)

    def _stop(self, running_processes: Sequence[RankProcess]) -> None:
        """Pass a stop signal on to the processes; do nothing if that has been done before."""
        if not self._is_stopped:
            self._is_stopped = True
            for process in running_processes:
                process.interrupt()

    def _notice_ends(self) -> None:
        """Record the processes that have newly ended with an error or by a signal."""
        for process in self._processes:
            code = process.code
            if code is None or code == 0 or process.rank in self._noticed_ranks:
                continue
            self._noticed_ranks.add(process.rank)
            if self._is_stop_code(code):
                grace = PREEMPTION_GRACE if code in STOP_CODES else FAILURE_GRACE
                self._deadline = min(self._deadline, time.monotonic() + grace)
            elif self._ending is None or self._is_peer_ending:
                self._fail(self._ending_of(process, "exit", code))

    def _is_stop_code(self, code: int) -> bool:
        """Return whether a process with this exit code ended because of a stop signal."""
        if code == -signal.SIGABRT:  # if a process stops before its first step, JAX aborts the other processes
            return any(process.code in STOP_CODES for process in self._processes)
        return code in STOP_CODES or (self._is_stopped and code in (-signal.SIGTERM, -signal.SIGKILL))

    def _ending_of(self, process: RankProcess, cause: str, code: int, seconds: float = 0.0) -> Ending:
        """Return the failure of a process, or of the lost process that caused it.

        After a process is lost, JAX's coordination service aborts the other processes. So an abort is blamed on the
        process whose heartbeat file is old, if there is one.
        """
        watched, rank, host = self._watched, process.rank, socket.gethostname()
        if code == -signal.SIGABRT and (host_and_silence_by_rank := lost_processes(watched)):
            rank, (host, seconds) = next(iter(host_and_silence_by_rank.items()))
            cause, code = "frozen", 1
        return Ending(rank, host, watched.attempt, cause, code, seconds)  # pyright: ignore[reportArgumentType]

    def _is_peer_failure(self, ending: Ending) -> bool:
        """Return whether a process ended only because another process failed, according to its heartbeat."""
        beat = read_heartbeats(self._watched.folder).get(ending.rank)
        return beat is not None and beat.failure.startswith(PEER_FAILED)

    def _fail(self, ending: Ending) -> None:
        """Record a failure. If it is the first one, also publish it to the watchdogs of the other hosts.

        If the process ended only because another process failed, its failure is not published; the failure of the other
        process replaces it.
        """
        is_peer_ending = self._is_peer_failure(ending)
        if self._ending is not None and is_peer_ending:
            return
        earlier_ending = self._published_ending()
        self._ending = earlier_ending or ending
        self._is_peer_ending = earlier_ending is None and is_peer_ending
        self._is_own_ending = earlier_ending is None and not is_peer_ending
        if self._is_own_ending:
            write_ending(self._watched, ending)
        grace = 0.0 if ending.cause in ("timeout", "frozen") else FAILURE_GRACE
        self._deadline = min(self._deadline, time.monotonic() + grace)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_the_rest(self) -> None:
        """End the remaining processes. After a hang, they first write their stack traces to their logs."""
        running_processes = [process for process in self._processes if process.code is None]
        if running_processes and self._ending is not None and self._ending.cause != "exit":
            for process in running_processes:
                process.dump_stacks()
            time.sleep(STACK_SECONDS)
        for process in running_processes:
            process.kill()
        for process in self._processes:
            process.close()
        deadline = time.monotonic() + FAILURE_GRACE
        while self._is_peer_ending and time.monotonic() < deadline:  # the cause may be on another host
            if (published_ending := self._published_ending()) is not None:
                self._ending, self._is_peer_ending = published_ending, False
            time.sleep(0.05)
        if self._is_own_ending:
            self._show_verdict()

    def _show_verdict(self) -> None:
        """Print the verdict. Print the last log lines of the failed process first, unless they were already shown."""
        verdict = self.verdict()
        for rank in verdict.ranks[:1]:
            if rank != 0 or 0 not in self._variables:
                lines = last_lines(log_file(self._watched.folder, rank), SHOWN_LINES)
                print("".join(f"[{rank}] {line}\n" for line in lines), end="", file=sys.stderr)
        print(f"jaxscale: attempt {self._watched.attempt}: {verdict}", file=sys.stderr, flush=True)

    def verdict(self) -> Verdict:
        """Return the verdict on the failure of this attempt."""
        watched_attempt, heartbeat_by_rank = self._watched, read_heartbeats(self._watched.folder)
        process_count = (
            max(watched_attempt.process_count, *(rank + 1 for rank in heartbeat_by_rank))
            if heartbeat_by_rank
            else watched_attempt.process_count
        )
        return judge(heartbeat_by_rank, process_count, watched_attempt.attempt, self._ending)

    def _exit_code(self) -> int:
        """Return the exit code of the run on this host."""
        if self._ending is not None:
            return exit_code(self._ending)
        exit_codes = [process.code for process in self._processes]
        if PREEMPTED in exit_codes:
            return PREEMPTED
        return DONE if all(code == DONE for code in exit_codes) else INTERRUPTED


def _change_time(path: Path) -> int:
    """Return the modification time of a file in nanoseconds; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_ending(watched: Watched) -> Ending | None:
    """Return the first failure that a watchdog has published in this attempt; `None` if there is none."""
    try:
        ending = from_json(Ending, read_json(watched.folder / FAILURE))
    except UserError:
        return None
    return ending if ending.attempt == watched.attempt else None


def write_ending(watched: Watched, ending: Ending) -> None:
    """Publish a failure in the run's folder. Errors are ignored, because a full disk must not stop the watchdog."""
    with contextlib.suppress(OSError):
        path = watched.folder / f"{FAILURE}.{socket.gethostname()}.half"
        path.write_text(json.dumps(dataclasses.asdict(ending)))
        path.replace(watched.folder / FAILURE)


def lost_processes(watched: Watched) -> dict[int, tuple[str, float]]:
    """Return the lost processes, by rank: the host, and the seconds by which the heartbeat file is too old.

    A process counts as lost if its heartbeat file is older than the newest one by more than `LOST_SECONDS`.
    """
    heartbeat_by_rank = read_heartbeats(watched.folder)
    write_time_by_rank: dict[int, float] = {}
    for rank, beat in heartbeat_by_rank.items():
        if beat.attempt == watched.attempt and not beat.failure and beat.phase != "finished":
            with contextlib.suppress(OSError):
                write_time_by_rank[rank] = heartbeat_file(watched.folder, rank).stat().st_mtime
    newest_time = max(write_time_by_rank.values(), default=0.0)
    return {
        rank: (heartbeat_by_rank[rank].host, newest_time - write_time)
        for rank, write_time in write_time_by_rank.items()
        if newest_time - write_time > LOST_SECONDS
    }


def last_lines(path: Path, line_count: int) -> list[str]:
    """Return the last lines of a text file; `[]` if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * line_count))
            return file.read().decode(errors="replace").splitlines()[-line_count:]
    except OSError:
        return []


def clear(folder: Path) -> None:
    """Remove the heartbeats and the failure of an earlier attempt."""
    for path in [*folder.glob("rank-*.json"), folder / FAILURE]:
        with contextlib.suppress(OSError):
            path.unlink()


def heartbeats_folder(run_dir: str | None) -> Path:
    """Return the folder of a run's heartbeats. It is a new temporary folder for a bucket, or if `run_dir` is `None`."""
    from jaxscale.records.directory import heartbeat_folder

    folder = None if run_dir is None else heartbeat_folder(run_dir)
    return Path(tempfile.mkdtemp(prefix="jaxscale-")) if folder is None else folder


assert set(TIMEOUTS) == {*PHASES, "frozen"}
