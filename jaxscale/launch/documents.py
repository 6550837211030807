"""The common parts of the schedulers' documents: the command of each host, and the host's environment variables."""

import os
import shlex
from collections.abc import Sequence

from jaxscale.errors import UserError
from jaxscale.launch.cluster import Cluster
from jaxscale.records import trusted_sources

PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
"""Environment variables that would route messages between processes through a proxy; a launch unsets them."""


def watch_command(
    cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None, process_count: int = 1
) -> list[str]:
    """Return the command line of a host's watchdog.

    Args:
        cluster: the cluster.
        command: words of the train command, without the program, such as ["train", "a.py"].
        run_dir: directory of the run.
        timeouts: text of the timeouts; `None` for the defaults.
        process_count: number of processes on the host.

    Example:
        >>> " ".join(watch_command(Cluster("gpu h200 x 8"), ["train", "a.py"], "/r/a", None))
        'python -m jaxscale watch --out=/r/a -- python -m jaxscale train a.py'
    """
    program_words = [cluster.python, "-m", "jaxscale"]
    flag_words = [f"--out={run_dir}"]
    flag_words += [f"--timeouts={timeouts}"] if timeouts else []
    flag_words += [f"--ranks={process_count}"] if process_count > 1 else []
    return [*program_words, "watch", *flag_words, "--", *program_words, *command]


def retry_command(cluster: Cluster, run_dir: str, *flags: str) -> list[str]:
    """Return the words of `jaxscale retry` that precede the command to repeat."""
    return [cluster.python, "-m", "jaxscale", "retry", f"--out={run_dir}", *flags, "--"]


def environment_variables(cluster: Cluster, run_dir: str) -> dict[str, str]:
    """Return the environment variables of a run's hosts: a variable that trusts the run, and the cluster's variables.

    Example:
        >>> from jaxscale.launch.cluster import Slurm
        >>> environment_variables(Cluster("gpu h200 x 8", Slurm(), interface="eth0"), "/r/a")
        {'JAXSCALE_TRUST': '/r/a', 'NCCL_SOCKET_IFNAME': 'eth0'}
    """
    variables = {trusted_sources.VARIABLE: run_dir}
    if cluster.interface:
        variables["NCCL_SOCKET_IFNAME"] = cluster.interface
    if cluster.cache:
        variables["JAXSCALE_CACHE"] = cluster.cache
    return variables


def shell_lines(cluster: Cluster, run_dir: str) -> list[str]:
    """Return shell lines that prepare a host: run the cluster's setup, set variables, and unset the proxy variables."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment_variables(cluster, run_dir).items()]
    return [*cluster.setup, *exports, f"unset {' '.join(PROXIES)}"]


def passed_variables(cluster: Cluster) -> dict[str, str]:
    """Return the values of the environment variables that the cluster passes on to the processes, by name.

    Raises:
        UserError: a variable is not set on this machine.
    """
    missing_names = [name for name in cluster.variables if name not in os.environ]
    if missing_names:
        raise UserError(f"Cluster.variables: {', '.join(missing_names)} is not set here: set it before the launch")
    return {name: os.environ[name] for name in cluster.variables}


def refuse_variables(cluster: Cluster, advice: str) -> None:
    """Raise UserError if a cluster passes on variables, because the scheduler's document would show their values."""
    if cluster.variables:
        raise UserError(
            f"Cluster.variables: got {', '.join(cluster.variables)}, but a document would hold their values: {advice}"
        )
