"""A launch on this machine: several processes under one watchdog, as a rehearsal of a launch on many machines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.launch.elastic import Elastic, with_fields
from jaxscale.launch.host import host_variables
from jaxscale.launch.retry import launch_name, retry
from jaxscale.launch.watch import Watchdog, Watched, read_ending

ALONE = {"JAXSCALE_COORDINATOR": "127.0.0.1:61440", "JAXSCALE_PROCESSES": "1", "JAXSCALE_RANK": "0"}
"""Environment variables that make a process run alone, even inside a scheduler's job."""


def launch_local(
    command: Sequence[str],
    process_count: int,
    folder: Path,
    timeouts: Mapping[str, float],
    elastic: Elastic | None = None,
) -> int:
    """Run a command in several processes of this machine until it is done, and return the exit code.

    Args:
        command: the command line of each process.
        process_count: number of processes.
        folder: folder of the run's heartbeats.
        timeouts: timeouts in seconds, by phase.
        elastic: the remaining replicas; with `None`, each attempt starts all processes.

    Raises:
        UserError: another launch is running this run.
    """

    def run(attempt: int) -> tuple[int, bool]:
        """Run one attempt; return its exit code, and whether the watchdog received a stop signal."""
        words = list(command) if elastic is None else with_fields(list(command), elastic.size.fields)
        attempt_process_count = process_count if elastic is None else len(elastic.slots)
        watched_attempt = Watched(folder, attempt_process_count, attempt, timeouts)
        watchdog = Watchdog(
            watched_attempt, words, host_variables(None, attempt_process_count, {**os.environ, **ALONE})
        )
        code = watchdog.run()
        if elastic is not None:
            elastic.note(read_ending(watched_attempt))
        return code, watchdog.was_interrupted

    return retry(folder, run, launch_name({}))
