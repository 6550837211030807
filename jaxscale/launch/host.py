"""The watchdog of one host under a scheduler: it finds the host's place, and starts the host's processes."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale import heartbeat
from jaxscale.launch import watch
from jaxscale.launch.watch import Watchdog, Watched
from jaxscale.platforms.join import ProcessPlace, place_of


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
        timeouts: seconds by phase.
        variables: environment variables of this watchdog.

    Raises:
        UserError: a variable is malformed, or the command does not exist.
    """
    place = place_of(variables)
    attempt = int(variables.get(heartbeat.ATTEMPT_VARIABLE, 0))
    if attempt > 0 and (folder / watch.STOP).exists():
        print("jaxscale: the run was stopped by `jaxscale stop`; launch it again to continue it", file=sys.stderr)
        return 0
    all_variables = host_variables(place, process_count, variables)
    run_process_count = (1 if place is None else place.processes) * process_count
    return Watchdog(Watched(folder, run_process_count, attempt, timeouts), command, all_variables).run()


def host_variables(
    place: ProcessPlace | None, process_count: int, variables: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """Return the environment variables of each process of a host, by the process's rank.

    A single process reads its place from the scheduler's variables, as the watchdog did. Several ones get jaxscale's
    own variables, in which the watchdog's place counts the hosts.

    Args:
        place: place of the watchdog among those of the run; `None` if there is one host.
        process_count: number of processes on this host.
        variables: environment variables of the watchdog.

    Example:
        >>> place = ProcessPlace("Slurm", "node1:61440", 2, 1)
        >>> host_variables(place, 4, {})[5]["JAXSCALE_LOCAL_RANK"]
        '1'
    """
    host_rank = 0 if place is None else place.rank
    if process_count == 1:
        return {host_rank: dict(variables)}
    host_count = 1 if place is None else place.processes
    coordinator = "127.0.0.1:61440" if place is None else place.coordinator
    return {
        rank: {
            **variables,
            "JAXSCALE_COORDINATOR": coordinator,
            "JAXSCALE_PROCESSES": str(host_count * process_count),
            "JAXSCALE_RANK": str(rank),
            "JAXSCALE_LOCAL_RANK": str(rank - host_rank * process_count),
            "JAXSCALE_LOCAL_PROCESSES": str(process_count),
        }
        for rank in range(host_rank * process_count, (host_rank + 1) * process_count)
    }
