"""A launch on this machine: several processes under a watchdog, which is a rehearsal of a launch on many machines."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.launch.retry import launch_name, retry
from jaxscale.launch.watch import Watchdog, Watched


def local_variables(process_count: int, coordinator: str, base: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Return the environment variables of each process, by rank.

    Args:
        process_count: number of processes.
        coordinator: host and port of rank 0.
        base: the variables of this process.

    Example:
        >>> local_variables(2, "127.0.0.1:5000", {})[1]["JAXSCALE_RANK"]
        '1'
    """
    return {
        rank: {
            **base,
            "JAXSCALE_COORDINATOR": coordinator,
            "JAXSCALE_PROCESSES": str(process_count),
            "JAXSCALE_RANK": str(rank),
            "JAXSCALE_LOCAL_RANK": str(rank),
            "JAXSCALE_LOCAL_PROCESSES": str(process_count),
        }
        for rank in range(process_count)
    }


def launch_local(command: Sequence[str], process_count: int, folder: Path, timeouts: Mapping[str, float]) -> int:
    """Run a command in several processes of this machine until it is done, and return the exit code.

    Args:
        command: the command line of each process.
        process_count: number of processes.
        folder: folder of the run's heartbeats.
        timeouts: seconds by phase.

    Raises:
        UserError: another launch works on the run.
    """

    def run(attempt: int) -> tuple[int, bool]:
        """Run one attempt."""
        variables = local_variables(process_count, f"127.0.0.1:{_free_port()}", os.environ)
        watchdog = Watchdog(Watched(folder, process_count, attempt, timeouts), command, variables)
        return watchdog.run(), watchdog.was_interrupted

    return retry(folder, run, launch_name({}))


def _free_port() -> int:
    """Return a port of this machine that is free now; each attempt has a new one, since old processes may answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
