"""Ssh: the commands that start a run on machines without a scheduler."""

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Sequence

from jaxscale import heartbeat
from jaxscale.errors import PREEMPTED, UserError
from jaxscale.launch.cluster import Cluster, Ssh
from jaxscale.launch.documents import passed_variables, shell_lines, watch_command
from jaxscale.launch.elastic import Elastic, with_fields
from jaxscale.launch.retry import launch_name, retry
from jaxscale.launch.verdict import Ending
from jaxscale.launch.watch import Watched, heartbeats_folder, read_ending, write_ending

PORT_COUNT = 64
"""Number of ports that successive attempts use in turn."""
SSH_FAILED = 255
"""Exit code of ssh's own failures, for example if a host cannot be reached; watchdogs end with smaller codes."""
ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""Options that make ssh end when a host has not answered for half a minute."""


def ssh_commands(
    cluster: Cluster,
    command: Sequence[str],
    run_dir: str,
    timeouts: str | None,
    attempt: int,
    folder: str = ".",
    used_hosts: Sequence[int] | None = None,
) -> list[list[str]]:
    """Return, for each host, the command line that starts its watchdog.

    The cluster's variables are passed on through standard input, so that a list of processes does not show their
    values.

    Args:
        cluster: a cluster of hosts that are reached by ssh.
        command: words of the train command, without the program.
        run_dir: directory of the run.
        timeouts: text of the watchdogs' timeouts.
        attempt: number of the attempt; it determines the coordinator's port.
        folder: folder in which the processes run.
        used_hosts: numbers of the hosts to start; `None` for all.
    """
    scheduler = cluster.scheduler
    assert isinstance(scheduler, Ssh)
    hosts = [scheduler.hosts[index] for index in used_hosts or range(len(scheduler.hosts))]
    commands: list[list[str]] = []
    for rank, host in enumerate(hosts):
        variables = {
            "JAXSCALE_COORDINATOR": f"{hosts[0]}:{scheduler.port + attempt % PORT_COUNT}",
            "JAXSCALE_PROCESSES": str(len(hosts)),
            "JAXSCALE_RANK": str(rank),
            heartbeat.ATTEMPT_VARIABLE: str(attempt),
            heartbeat.LAUNCH_VARIABLE: "ssh",
        }
        lines = [
            "set -a; . /dev/stdin; set +a",
            f"cd {shlex.quote(folder)}",
            *shell_lines(cluster, run_dir),
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"exec {shlex.join(watch_command(cluster, command, run_dir, timeouts))}",
        ]
        address = f"{scheduler.user}@{host}" if scheduler.user else host
        script = shlex.join(["bash", "-c", "\n".join(lines)])
        commands.append(
            ["ssh", "-o", "BatchMode=yes", *shlex.split(" ".join(scheduler.options)), *ALIVE, address, script]
        )
    return commands


def unreachable_ending(processes: Sequence[subprocess.Popen[str]], attempt: int) -> Ending | None:
    """Return the failure of the first host that ssh could not reach, or lost; `None` if ssh reached all hosts.

    Args:
        processes: the ssh processes, which have ended, in the order of the hosts' ranks.
        attempt: number of the attempt.
    """
    for rank, process in enumerate(processes):
        if process.returncode == SSH_FAILED:
            return Ending(rank, f"the host of rank {rank}", attempt, "missing")
    return None


def launch_ssh(
    cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None, elastic: Elastic | None = None
) -> int:
    """Run a command on all hosts until it is done, and return the exit code.

    Args:
        cluster: a cluster of hosts that are reached by ssh.
        command: words of the train command, without the program.
        run_dir: directory of the run.
        timeouts: text of the watchdogs' timeouts.
        elastic: the remaining replicas; with `None`, each attempt starts all hosts.

    Raises:
        UserError: ssh is missing, or a variable that the cluster passes on is not set.
    """
    folder = heartbeats_folder(run_dir)
    exports_text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in passed_variables(cluster).items())

    def run(attempt: int) -> tuple[int, bool]:
        """Run one attempt; return the code of the first host that failed, and whether Ctrl-C interrupted it."""
        processes: list[subprocess.Popen[str]] = []
        attempt_command, host_numbers = list(command), None
        if elastic is not None:
            attempt_command, host_numbers = with_fields(attempt_command, elastic.size.fields), elastic.slots
        for words in ssh_commands(cluster, attempt_command, run_dir, timeouts, attempt, os.getcwd(), host_numbers):
            try:
                process = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
            except OSError as error:
                raise UserError(f"cannot run ssh: {error.strerror}; --dry-run prints the commands") from None
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # ssh may have ended already
                process.stdin.write(exports_text)
                process.stdin.close()
            processes.append(process)
        failed_codes: list[int] = []
        watched = Watched(folder, len(processes), attempt)
        try:
            while any(process.poll() is None for process in processes):
                if read_ending(watched) is None and (lost_ending := unreachable_ending(processes, attempt)) is not None:
                    write_ending(watched, lost_ending)  # so that the watchdogs of the other hosts do not wait for it
                failed_codes += [code for process in processes if (code := process.poll()) and not failed_codes]
                time.sleep(0.1)
        except KeyboardInterrupt:  # ssh has passed Ctrl-C on, and the hosts save
            for process in processes:
                process.wait()
            return PREEMPTED, True
        exit_codes = failed_codes or [process.wait() for process in processes]
        if elastic is not None:
            elastic.note(read_ending(watched))
        return next((code for code in exit_codes if code), 0), False

    return retry(folder, run, launch_name({}))
