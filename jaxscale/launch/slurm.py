"""Slurm: the batch script of a run."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxscale.errors import INTERRUPTED, PREEMPTED, UserError
from jaxscale.launch.cluster import Cluster, Slurm
from jaxscale.launch.documents import retry_command, shell_lines, watch_command
from jaxscale.launch.watch import STOP
from jaxscale.records.directory import heartbeat_folder


def sbatch_script(
    cluster: Cluster, command: Sequence[str], run_dir: str, timeouts: str | None, folder: str = "."
) -> str:
    """Return the batch script that runs a command on all nodes, one watchdog per node.

    After a failure, the script restarts the run inside its allocation. Before the time limit, and when the job is
    preempted, Slurm sends SIGTERM to the processes. They save and end with code 75, and the script requeues the job.

    Args:
        cluster: a cluster whose scheduler is a `Slurm` queue.
        command: words of the train command, without the program.
        run_dir: directory of the run.
        timeouts: text of the watchdogs' timeouts.
        folder: folder in which the job runs.

    Raises:
        UserError: the path of a directory cannot be written into a script.
    """
    queue = cluster.scheduler
    assert isinstance(queue, Slurm)
    if not run_dir.isprintable():
        raise UserError(f"--out: got {run_dir!r}, expected printable characters")
    heartbeats_path = heartbeat_folder(run_dir)
    value_by_option = {
        "--job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", Path(run_dir).name) or "jaxscale",
        "--nodes": str(cluster.host_count),
        "--ntasks-per-node": "1",
        "--partition": queue.partition,
        "--account": queue.account,
        "--qos": queue.qos,
        "--time": queue.time,
        "--signal": f"TERM@{cluster.grace}",
        "--output": log_pattern(run_dir),
    }
    platform = cluster.parsed
    if platform is not None and platform.chip.kind == "gpu" and queue.gpus:
        gpu_count = cluster.chips_per_host
        value_by_option[f"--{queue.gpus}"] = f"gpu:{gpu_count}" if queue.gpus == "gres" else str(gpu_count)
    lines = ["#!/usr/bin/env bash", f"# jaxscale launch: {cluster.platform}, {cluster.host_count} nodes"]
    lines += [f"#SBATCH {name}={_quote_option(value)}" for name, value in value_by_option.items() if value]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", *(f"#SBATCH {option}" for option in queue.options)]
    if queue.is_exclusive:
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    if queue.jobs > 1:
        lines.append("#SBATCH --dependency=singleton")
    lines += ["", "set -u", f"cd {shlex.quote(folder)}", *shell_lines(cluster, run_dir), ""]
    # srun does not kill tasks: the watchdogs end their own processes, but not while a process saves
    srun_words = ["srun", "--kill-on-bad-exit=0", f"--wait={cluster.grace}", "--cpu-bind=none"]
    if queue.container:
        srun_words += [
            f"--container-image={queue.container}",
            f"--container-mounts={_mounts_text(cluster, run_dir, folder)}",
        ]
    words = [
        *retry_command(cluster, run_dir, "--requeue"),
        *srun_words,
        *watch_command(cluster, command, run_dir, timeouts),
    ]
    stop_file = shlex.quote(str((heartbeats_path or Path(".")) / STOP))
    lines += [
        "code=0",
        f"{shlex.join(words)} || code=$?",
        f"if {{ [ $code = {PREEMPTED} ] || [ $code = {INTERRUPTED} ]; }} && [ ! -e {stop_file} ]; then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def log_pattern(run_dir: str) -> str:
    """Return the path of a job's output in sbatch's format, with "%j" for the number of the job.

    Example:
        >>> log_pattern("/shared/runs/plays")
        '/shared/runs/plays/processes/slurm-%j.log'
    """
    heartbeats_path = heartbeat_folder(run_dir)
    folder = str(Path.home() if heartbeats_path is None else heartbeats_path)
    return f"{folder.replace('%', '%%')}/slurm-%j.log"


def _mounts_text(cluster: Cluster, run_dir: str, folder: str) -> str:
    """Return the value of the option that mounts the working directory and the folder of the runs in a container."""
    folder_paths = dict.fromkeys([folder, cluster.shared or str(Path(run_dir).parent)])
    return ",".join(f"{path}:{path}" for path in folder_paths)


def _quote_option(value: str) -> str:
    """Return an option's value as sbatch reads it from a comment, in double quotes if it has special characters."""
    return value if re.fullmatch(r"[\w@%+=:,./-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
