"""One process of a run under a watchdog: its start, its output, its heartbeat and its end."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxscale import heartbeat
from jaxscale.errors import CRASHED, DONE, EXIT_CODES, STOP_CODES, UserError
from jaxscale.heartbeat import Heartbeat
from jaxscale.launch.verdict import Cause

FAILED_GRACE = 15
"""Seconds that a process may still run after its heartbeat has reported an error."""
PATIENCE: Mapping[str, float] = {"evaluating": 5, "saving": 5}
"""By phase: a hang is reported only after this many times the phase's longest duration so far, if that is longer."""
CODES = {error_type.__name__: code for error_type, code in EXIT_CODES.items()}
"""The exit code of each error that has its own, by the name of the error's class."""
_DEATH_SIGNAL_OPTION = 1  # PR_SET_PDEATHSIG of Linux's prctl


def log_file(folder: Path, rank: int) -> Path:
    """Return the path of a process's log, which holds its output.

    Example:
        >>> log_file(Path("run/processes"), 3).name
        'rank-00003.log'
    """
    return heartbeat.heartbeat_file(folder, rank).with_suffix(".log")


class RankProcess:
    """A process of the run that this host's watchdog has started.

    Args:
        rank: number of the process among all processes of the run.
        command: the command line.
        variables: environment variables of the process.
        folder: folder of the heartbeats and logs.
        attempt: number of the attempt.
        is_shown: whether the output is also printed; if not, it goes only to the log.

    Raises:
        UserError: the command does not exist.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        attempt: int,
        *,
        is_shown: bool,
    ) -> None:
        self.rank, self.attempt, self._folder, self._is_shown = rank, attempt, folder, is_shown
        self._last_heartbeat: Heartbeat | None = None
        self._change_time = self._start_time = time.monotonic()
        self._failure_time: float | None = None
        c_library = ctypes.CDLL(None) if sys.platform == "linux" else None

        def end_with_watchdog() -> None:
            """Make Linux kill this process when the watchdog ends for any reason."""
            if c_library is not None:
                c_library.prctl(_DEATH_SIGNAL_OPTION, signal.SIGKILL)

        try:
            self.process = subprocess.Popen(
                command,
                env=dict(variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C reaches only the watchdog, which passes it on once
                preexec_fn=end_with_watchdog,
            )
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r}: {error.strerror}") from None
        except ValueError as error:  # a NUL, or half of a surrogate pair
            raise UserError(f"cannot start {command[0]!r}: no command line can have its words ({error})") from None
        assert self.process.stdout is not None
        self._thread = threading.Thread(target=self._copy_output, args=(self.process.stdout,), daemon=True)

    def follow(self) -> None:
        """Start to copy the output; call this after all processes of the host have started."""
        self._thread.start()

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; `None` while the process runs.

        If the first process ends, its coordination service ends too, and JAX may abort a process that is about to end.
        In that case, the last heartbeat decides whether the process was stopped by a signal, has finished, or failed.
        """
        code = self.process.poll()
        if code != -signal.SIGABRT or self.rank == 0 or (beat := self.read_heartbeat()) is None:
            return code
        if beat.failure:
            stop_code = CODES.get(beat.failure.partition(":")[0])
            return stop_code if stop_code in STOP_CODES else code
        return DONE if beat.phase == "finished" else code

    def read_heartbeat(self) -> Heartbeat | None:
        """Return the newest heartbeat that this process wrote; `None` before the first one."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path = heartbeat.heartbeat_file(self._folder, self.rank)
            beat = Heartbeat.parse(path.read_text()) if path.exists() else self._find_heartbeat()
            if beat is not None and beat.attempt == self.attempt and beat.host == socket.gethostname():
                if self._last_heartbeat is None or (beat.beat, beat.pid) != (
                    self._last_heartbeat.beat,
                    self._last_heartbeat.pid,
                ):
                    self._change_time = time.monotonic()
                self._last_heartbeat = beat
        return self._last_heartbeat

    def _find_heartbeat(self) -> Heartbeat | None:
        """Find this process's heartbeat under another rank, and set `rank` to it; `None` if there is no heartbeat.

        The rank may differ because JAX can take it from a cloud's metadata.
        """
        for beat in heartbeat.read_heartbeats(self._folder).values():
            with contextlib.suppress(ProcessLookupError):
                if beat.host == socket.gethostname() and os.getpgid(beat.pid) == self.process.pid:
                    self.rank = beat.rank
                    return beat
        return None

    def hang_cause_and_seconds(self, timeouts: Mapping[str, float]) -> tuple[Cause, float] | None:
        """Return the cause of a hang and its seconds; `None` if heartbeats arrive and the phase has not timed out.

        A phase in `PATIENCE` may also take that many times its longest duration in this process, if that is longer.

        Args:
            timeouts: timeouts in seconds by phase; the key "frozen" holds the longest time without a heartbeat.
        """
        beat, now = self.read_heartbeat(), time.monotonic()
        silent_seconds = now - self._change_time
        if beat is None:
            return ("timeout", silent_seconds) if silent_seconds > timeouts["starting"] else None
        if beat.failure:
            return None
        if beat.phase != "finished" and silent_seconds > timeouts["frozen"]:
            return "frozen", silent_seconds
        phase_seconds = beat.since + silent_seconds
        longest_seconds = beat.longest_by_phase.get(beat.phase, 0.0)
        timeout_seconds = max(timeouts[beat.phase], PATIENCE.get(beat.phase, 0.0) * longest_seconds)
        return ("timeout", phase_seconds) if phase_seconds > timeout_seconds else None

    def failed_code(self) -> int | None:
        """Return the exit code for a process that reported a failure but does not end; `None` for other processes.

        For example, such a process may wait in JAX's shutdown barrier.
        """
        beat = self.read_heartbeat()
        if beat is None or not beat.failure:
            return None
        if self._failure_time is None:
            self._failure_time = time.monotonic()
        is_late = time.monotonic() - self._failure_time > FAILED_GRACE
        return CODES.get(beat.failure.partition(":")[0], CRASHED) if is_late else None

    def interrupt(self) -> None:
        """Send SIGTERM to the process that writes heartbeats; before the first heartbeat, send it to the command."""
        beat = self.read_heartbeat()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid if beat is None else beat.pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to its log."""
        self._is_shown = False
        beat = self.read_heartbeat()
        if beat is not None and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its children by SIGKILL. A process that is stuck in a barrier ignores SIGTERM."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Wait until the output is copied, for at most 5 s: a surviving child may keep the output open."""
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _copy_output(self, output: IO[bytes]) -> None:
        """Append each line of the output to the log, after the time. If the disk is full, print the line instead."""
        with contextlib.ExitStack() as file_stack:
            log = None
            with contextlib.suppress(OSError):
                log = file_stack.enter_context(log_file(self._folder, self.rank).open("ab", buffering=0))
                log.write(
                    f"--- attempt {self.attempt} on {socket.gethostname()}, process {self.process.pid}\n".encode()
                )
            for line in output:
                if self._is_shown:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()
                timed_line = time.strftime("%H:%M:%S ").encode() + line
                is_written = False
                with contextlib.suppress(OSError):  # a disk that is nearly full takes a part of a line
                    is_written = log is not None and log.write(timed_line) == len(timed_line)
                if not is_written and not self._is_shown:
                    sys.stderr.write(f"[{self.rank}] {timed_line.decode(errors='replace')}")
                    sys.stderr.flush()
