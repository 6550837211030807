"""The watchdog of one host under a scheduler: it reads the host's rank in the run, and starts the host's processes."""

import dataclasses
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale import heartbeat
from jaxscale.errors import CRASHED, GAVE_UP, PREEMPTED, UserError
from jaxscale.heartbeat import read_heartbeats
from jaxscale.launch import watch
from jaxscale.launch.retry import attempt_record, launch_name
from jaxscale.launch.rules import decide
from jaxscale.launch.verdict import exit_code
from jaxscale.launch.watch import Watchdog, Watched
from jaxscale.platforms.join import ProcessPlace, place_of
from jaxscale.records.attempts import read_attempts, write_attempt

LAUNCH = "launch"
"""File in the folder of heartbeats that holds the name of a launch that runs without `jaxscale retry`."""


def watch_host(
    command: Sequence[str],
    folder: Path,
    process_count: int,
    timeouts: Mapping[str, float],
    variables: Mapping[str, str],
) -> int:
    """Run a command in this host's processes, watch them, and return the exit code.

    Args:
        command: command line of each process.
        folder: folder of the run's heartbeats.
        process_count: number of processes on this host; the scheduler starts one watchdog per host.
        timeouts: timeouts in seconds, by phase.
        variables: environment variables of this watchdog.

    Raises:
        UserError: a variable is malformed, or the command does not exist.
    """
    place = place_of(variables)
    attempt_text = variables.get(heartbeat.ATTEMPT_VARIABLE, "0")
    if not (attempt_text.isascii() and attempt_text.isdigit()):
        raise UserError(f"environment variable {heartbeat.ATTEMPT_VARIABLE}: got {attempt_text!r}, expected a number")
    attempt = int(attempt_text)
    if attempt > 0 and (folder / watch.STOP).exists():
        print("jaxscale: the run was stopped by `jaxscale stop`; launch it again to continue it", file=sys.stderr)
        return 0
    if heartbeat.LAUNCH_VARIABLE not in variables and (place is None or place.rank == 0):
        reason = record_earlier_attempt(folder, attempt)
        if reason:
            print(f"jaxscale: gave up: {reason}", file=sys.stderr)
            return GAVE_UP
    all_variables = host_variables(place, process_count, variables)
    run_process_count = (1 if place is None else place.processes) * process_count
    return Watchdog(Watched(folder, run_process_count, attempt, timeouts), command, all_variables).run()


def record_earlier_attempt(folder: Path, attempt: int) -> str:
    """Record the previous attempt, for a scheduler that restarts the run without `jaxscale retry`.

    Args:
        folder: folder of the run's heartbeats, which still contains the heartbeats of the previous attempt.
        attempt: number of the attempt that starts; 0 for the first one of a launch.

    Returns:
        The reason why no further attempt should start; "" if one should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launch_file = folder / LAUNCH
    if attempt == 0:
        launch_file.write_text(launch_name({}))
        return ""
    name_of_launch = launch_file.read_text("utf-8", "replace") if launch_file.exists() else launch_name({})
    heartbeat_by_rank = {rank: beat for rank, beat in read_heartbeats(folder).items() if beat.attempt == attempt - 1}
    if heartbeat_by_rank:
        end_time_by_rank = {rank: watch.heartbeat_file(folder, rank).stat().st_mtime for rank in heartbeat_by_rank}
        start_time = min(end_time_by_rank[rank] - heartbeat_by_rank[rank].uptime for rank in heartbeat_by_rank)
        ending = watch.read_ending(Watched(folder, len(heartbeat_by_rank), attempt - 1))
        is_stopped = any(
            beat.failure.startswith(("Preempted", "KeyboardInterrupt")) for beat in heartbeat_by_rank.values()
        )
        code = PREEMPTED if is_stopped else CRASHED if ending is None else exit_code(ending)
        earlier_record = attempt_record(folder, attempt - 1, name_of_launch, code, start_time)
        write_attempt(folder, dataclasses.replace(earlier_record, end_time=max(end_time_by_rank.values())))
    attempts = [other_attempt for other_attempt in read_attempts(folder) if other_attempt.launch == name_of_launch]
    return decide(attempts).reason if attempts else ""


def host_variables(
    place: ProcessPlace | None, process_count: int, variables: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """Return the environment variables of each process of a host, by the process's rank.

    A single process reads its rank from the scheduler's variables, as the watchdog did. Several processes get
    jaxscale's own variables; in this case, the rank in `place` is the number of the host.

    Args:
        place: place of this watchdog among the run's watchdogs; `None` if the run has one host.
        process_count: number of processes on this host.
        variables: environment variables of the watchdog.

    Example:
        >>> place = ProcessPlace("Slurm", "node1:61440", 2, 1)
        >>> host_variables(place, 4, {})[5]["JAXSCALE_LOCAL_RANK"]
        '1'
    """
    if process_count == 1:
        return {0 if place is None else place.rank: dict(variables)}
    if place is None:
        place = ProcessPlace("watchdog", f"127.0.0.1:{free_port()}", 1, 0)
    return {
        place.rank * process_count + local_rank: {
            **variables,
            "JAXSCALE_COORDINATOR": place.coordinator,
            "JAXSCALE_PROCESSES": str(place.processes * process_count),
            "JAXSCALE_RANK": str(place.rank * process_count + local_rank),
            "JAXSCALE_LOCAL_RANK": str(local_rank),
            "JAXSCALE_LOCAL_PROCESSES": str(process_count),
        }
        for local_rank in range(process_count)
    }


def free_port() -> int:
    """Return a free port of this machine. Each attempt takes a new port, because old processes may still use theirs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
