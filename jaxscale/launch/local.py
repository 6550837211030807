"""A launch on this machine: several processes under a watchdog, which is a rehearsal of a launch on many machines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.launch.host import host_variables
from jaxscale.launch.retry import launch_name, retry
from jaxscale.launch.watch import Watchdog, Watched

ALONE = {"JAXSCALE_COORDINATOR": "127.0.0.1:61440", "JAXSCALE_PROCESSES": "1", "JAXSCALE_RANK": "0"}
"""Variables of a process that joins no other, even inside of a scheduler's job."""


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
        variables = host_variables(None, process_count, {**os.environ, **ALONE})
        watchdog = Watchdog(Watched(folder, process_count, attempt, timeouts), command, variables)
        return watchdog.run(), watchdog.was_interrupted

    return retry(folder, run, launch_name({}))
