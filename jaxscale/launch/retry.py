"""Retry a run: start it again after a failure if `rules` allows another attempt."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxscale import heartbeat
from jaxscale.errors import STOP_CODES, UserError
from jaxscale.heartbeat import read_heartbeats
from jaxscale.launch import watch
from jaxscale.launch.rules import decide
from jaxscale.launch.stop_signals import received_signals
from jaxscale.launch.verdict import judge
from jaxscale.records.attempts import Attempt, read_attempts, write_attempt
from jaxscale.records.directory import lock_run

RunAttempt = Callable[[int], tuple[int, bool]]
"""`run(number)` runs an attempt. It returns the exit code, and whether the launcher itself received a stop signal."""


def launch_name(variables: Mapping[str, str]) -> str:
    """Return the name of a launch. A requeued Slurm job keeps its name.

    Example:
        >>> launch_name({"SLURM_JOB_ID": "17"})
        'slurm-17'
    """
    job_id = variables.get("SLURM_ARRAY_JOB_ID") or variables.get("SLURM_JOB_ID")
    return f"slurm-{job_id}" if job_id else f"{os.getpid()}-{time.time():.0f}"


def retry(folder: Path, run: RunAttempt, launch: str, *, ends_when_preempted: bool = False) -> int:
    """Run attempts until one is final, and return the exit code.

    Args:
        folder: folder of the run's heartbeats.
        run: runs one attempt.
        launch: name of this launch.
        ends_when_preempted: whether to end with 75 or 130 after a stop signal, so that the scheduler restarts the job.

    Raises:
        UserError: another launch is running this run.
    """
    with lock_run(folder):
        return _retry(folder, run, launch, ends_when_preempted=ends_when_preempted)


def _retry(folder: Path, run: RunAttempt, launch: str, *, ends_when_preempted: bool) -> int:
    """Run attempts in a locked folder; `retry` describes the arguments."""
    attempts = read_attempts(folder)
    if ends_when_preempted and (folder / watch.STOP).exists():  # as in the next of several jobs
        print(
            f"jaxscale: the run was stopped by `jaxscale stop`: launch it again, or remove {folder / watch.STOP}",
            file=sys.stderr,
        )
        return 0
    (folder / watch.STOP).unlink(missing_ok=True)
    while True:
        number = max((attempt.number for attempt in attempts), default=0) + 1
        watch.clear(folder)
        start_time = time.time()
        code, was_interrupted = run(number)
        attempts.append(attempt_record(folder, number, launch, code, start_time))
        write_attempt(folder, attempts[-1])
        is_stopped = code in STOP_CODES and (was_interrupted or ends_when_preempted or (folder / watch.STOP).exists())
        if is_stopped or was_interrupted:
            return code
        decision = decide([attempt for attempt in attempts if attempt.launch == launch])
        if decision.code is not None:
            if decision.reason:
                print(f"jaxscale: gave up: {decision.reason}", file=sys.stderr)
            return decision.code
        print(
            f"jaxscale: attempt {number} ended with code {code}, step {attempts[-1].step}; attempt {number + 1} starts "
            f"in {decision.delay:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        if _sleep_was_interrupted(decision.delay, folder):
            return code


def attempt_record(folder: Path, number: int, launch: str, code: int, start_time: float) -> Attempt:
    """Return the record of an attempt that has ended. The folder still contains the attempt's heartbeats."""
    heartbeat_by_rank = {rank: beat for rank, beat in read_heartbeats(folder).items() if beat.attempt == number}
    step = max((beat.step for beat in heartbeat_by_rank.values()), default=0)
    watched = watch.Watched(folder, max(heartbeat_by_rank, default=0) + 1, number)
    ending = watch.read_ending(watched)
    verdict = "" if ending is None else str(judge(heartbeat_by_rank, watched.process_count, number, ending))
    seconds_by_phase = dict(heartbeat_by_rank[0].seconds_by_phase) if 0 in heartbeat_by_rank else {}
    return Attempt(number, launch, code, step, start_time, time.time(), verdict, seconds_by_phase)


def _sleep_was_interrupted(seconds: float, folder: Path) -> bool:
    """Sleep for some seconds, or until a stop is requested. Return whether a stop was requested."""
    end_time = time.monotonic() + seconds
    with received_signals() as signal_numbers:
        while time.monotonic() < end_time and not signal_numbers and not (folder / watch.STOP).exists():
            time.sleep(0.1)
    return bool(signal_numbers) or (folder / watch.STOP).exists()


def run_command(command: Sequence[str]) -> RunAttempt:
    """Return a function that runs an attempt as a command, such as srun, that starts the watchdogs of all hosts.

    Stop signals are passed on to the command, except to srun, whose tasks receive the scheduler's signals themselves.
    """

    def run(attempt: int) -> tuple[int, bool]:
        """Run the command once."""
        variables = {**os.environ, heartbeat.ATTEMPT_VARIABLE: str(attempt), heartbeat.LAUNCH_VARIABLE: "retry"}
        try:
            process = subprocess.Popen(command, env=variables, process_group=0)
        except OSError as error:
            raise UserError(f"cannot start {command[0]!r}: {error.strerror}") from None
        is_srun = Path(command[0]).name == "srun"
        with received_signals(lambda: None if is_srun else process.send_signal(signal.SIGTERM)) as signal_numbers:
            code = process.wait()
        return (128 - code if code < 0 else code), bool(signal_numbers)

    return run
