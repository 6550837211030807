"""Launch a run on a cluster: write the scheduler's document, and submit it with the scheduler's own program."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.errors import CRASHED, UserError
from jaxscale.launch.cluster import Cluster, JobSet, Local, QueuedResource, Slurm, Ssh, check_dns_name
from jaxscale.launch.documents import passed_variables
from jaxscale.launch.elastic import Elastic, possible_sizes
from jaxscale.launch.status import follow
from jaxscale.launch.watch import STOP, heartbeats_folder, parse_timeouts
from jaxscale.records import directory as run_files
from jaxscale.records.attempts import read_attempts
from jaxscale.records.storage import check_location, is_remote

FOLLOW_SECONDS = 5.0
"""Seconds between two checks of a job and its log."""
FAILED_LOOKS = 12
"""Number of consecutive checks without a response from Slurm after which a job counts as ended."""


def check_mesh(cluster: Cluster, experiment: Any) -> None:
    """Check that an experiment's mesh fits the cluster's devices, and that no tensor axis spans slices.

    Raises:
        UserError: the mesh does not fit.
    """
    platform = cluster.parsed
    if platform is None:
        return
    mesh = experiment.plan.mesh
    if mesh is None:
        return
    if mesh.devices != platform.devices:
        raise UserError(
            f"plan.mesh: got {mesh}, which has {mesh.devices} devices, but {cluster.platform!r} has "
            f"{platform.devices}: set --plan.mesh to a mesh of that many, or to none for data parallelism"
        )
    if platform.slices > 1:
        slice_count_by_axis = dict(zip(mesh.sizes, mesh.across(platform.slices), strict=True))
        for axis in ("expert", "sequence", "tensor"):
            if slice_count_by_axis[axis] > 1:
                raise UserError(
                    f"plan.mesh: got {mesh}, whose {axis} axis spans {slice_count_by_axis[axis]} slices of "
                    f"{cluster.platform!r}, expected {axis} shards within a slice: use --plan.mesh "
                    f"replica:{platform.slices},..."
                )


def check_compiler_options(cluster: Cluster, experiment: Any) -> None:
    """Check the compiler options that a plan sets. The names of TPU options are checked only by libtpu, in the run.

    Raises:
        UserError: an option set has no effect on the chip, or the compiler rejects an option.
    """
    platform, options = cluster.parsed, experiment.plan.compiler
    if platform is None or not options.of(platform.chip) or platform.chip.kind != "gpu":
        return
    import jax

    from jaxscale.compiler.options import check_options

    config: Any = jax.config
    config.update("jax_platforms", "cpu")
    check_options(options, jax.devices()[0], platform.chip)


def check_copies(cluster: Cluster, experiment: Any) -> None:
    """Refuse in-memory copies of the state under a JobSet, because a restart replaces the pods and their memory.

    Raises:
        UserError: the experiment keeps such copies.
    """
    if isinstance(cluster.scheduler, JobSet) and experiment.checkpoint.memory_every:
        raise UserError(
            "checkpoint.memory_every: a JobSet restarts in new pods, whose memory is empty; set it to 0, and "
            "checkpoint.every to fewer steps"
        )


def elastic_of(cluster: Cluster, experiment: Any, axis: str | None) -> Elastic | None:
    """Return the replicas of a launch with the flag --elastic; `None` without the flag.

    Raises:
        UserError: the flag is not "replica", the scheduler always restarts all machines, or the plan has no replicas.
    """
    if axis is None:
        return None
    if axis != "replica":
        raise UserError(f"--elastic: got {axis!r}, expected replica")
    scheduler = cluster.scheduler
    if not isinstance(scheduler, Local | Ssh):
        raise UserError(
            f"--elastic: {type(scheduler).__name__} restarts all machines when one is lost; expected ssh or local, "
            "which keep the others: choose one of these, or omit --elastic"
        )
    process_count = scheduler.processes if isinstance(scheduler, Local) else len(scheduler.hosts)
    return Elastic(possible_sizes(experiment), process_count)


def prepare_directory(run_dir: str, experiment: Any, resume: str, *, is_returning: bool = False) -> None:
    """Check the directory of a run before its launch. If `resume` is "never", rename the directory of an earlier run.

    Raises:
        UserError: the directory belongs to another experiment, or another process is using it. Or the directory should
            be renamed, but this machine cannot access its parent directory.
    """
    check_location(run_dir)
    path = run_files.run_path(run_dir)
    if resume == "never" and not is_remote(run_dir) and not Path(run_dir).absolute().parent.exists():
        raise UserError(
            f"--resume never: {Path(run_dir).absolute().parent} is not visible here, so that an earlier run there "
            "could not be renamed: create it, launch from a machine that sees it, or choose another --out"
        )
    if resume == "never" and (path / run_files.EXPERIMENT).exists():
        with run_files.lock_run(path):
            print(f"the earlier run in {path} is now in {run_files.set_aside(path)}")
    run_files.check_same_experiment(run_dir, experiment, is_returning=is_returning)


def launch(
    cluster: Cluster,
    command: Sequence[str],
    run_dir: str,
    timeouts: str | None,
    *,
    is_dry_run: bool = False,
    elastic: Elastic | None = None,
) -> int:
    """Launch a run, or print the document that would be submitted.

    Args:
        cluster: the cluster.
        command: words of the train command, without the program.
        run_dir: directory of the run.
        timeouts: text of the watchdogs' timeouts.
        is_dry_run: whether only to print the scheduler's document.
        elastic: the replicas of the run, which continues without lost machines; with `None`, every attempt starts all.

    Returns:
        The exit code of the run, if the run is on this machine, over ssh, or a Slurm job that is followed at a
        terminal; otherwise 0 after the submission.

    Raises:
        UserError: the scheduler's program is missing, or it refuses the document.
    """
    scheduler = cluster.scheduler
    if not is_remote(run_dir) and not isinstance(scheduler, JobSet | QueuedResource):
        run_dir = str(Path(run_dir).absolute())
    if isinstance(scheduler, Local):
        full_command = [sys.executable, "-m", "jaxscale", *command]
        if is_dry_run:
            print(f"# {scheduler.processes} processes on this machine\n{shlex.join(full_command)}")
            return 0
        from jaxscale.launch.local import launch_local

        folder = heartbeats_folder(run_dir)
        return launch_local(full_command, scheduler.processes, folder, parse_timeouts(timeouts), elastic)
    name = Path(run_dir).name
    if isinstance(scheduler, Slurm):
        from jaxscale.launch.slurm import log_pattern, sbatch_script

        script = sbatch_script(cluster, command, run_dir, timeouts, str(Path.cwd()))
        if is_dry_run:
            print(script, end="")
            return 0
        passed_variables(cluster)  # sbatch passes the environment on
        folder = heartbeats_folder(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        script_file = folder / "job.sbatch"
        script_file.write_text(script)
        (folder / STOP).unlink(missing_ok=True)
        sbatch_outputs = [submit(["sbatch", str(script_file)], f"sbatch {script_file}") for _ in range(scheduler.jobs)]
        print("".join(sbatch_outputs), end="")
        follow_text = f"follow it: jaxscale status {shlex.quote(run_dir)} --log 0"
        if (
            sys.stdout.isatty()
            and (job_match := re.search(r"Submitted batch job (\d+)", sbatch_outputs[0])) is not None
        ):
            log_path = Path(log_pattern(run_dir).replace("%j", job_match[1]).replace("%%", "%"))
            return follow_job(job_match[1], log_path, folder, follow_text)
        print(follow_text)
        return 0
    if isinstance(scheduler, JobSet):
        check_dns_name("name of the run", name)
        from jaxscale.launch.jobset import jobset_text

        manifest = jobset_text(cluster, command, run_dir, timeouts)
        if is_dry_run:
            print(manifest, end="")
            return 0
        print(submit(["kubectl", "apply", "-f", "-"], "kubectl apply -f FILE", manifest), end="")
        return 0
    if isinstance(scheduler, QueuedResource):
        check_dns_name("name of the run", name)
        from jaxscale.launch.queued_resource import request_text, submit_request

        if is_dry_run:
            print(request_text(cluster, command, run_dir, timeouts), end="")
            return 0
        print(submit_request(cluster, command, run_dir, timeouts))
        return 0
    assert isinstance(scheduler, Ssh)
    from jaxscale.launch.ssh import launch_ssh, ssh_commands

    if is_dry_run:
        print(
            "".join(
                f"{shlex.join(words)}\n"
                for words in ssh_commands(cluster, command, run_dir, timeouts, 1, str(Path.cwd()))
            ),
            end="",
        )
        return 0
    return launch_ssh(cluster, command, run_dir, timeouts, elastic)


def follow_job(job_id: str, log_path: Path, folder: Path, detached_text: str) -> int:
    """Print a Slurm job's log until the job ends, and return the launch's exit code. Ctrl-C does not end the job.

    Args:
        job_id: number of the job.
        log_path: file of the job's output.
        folder: folder of the run's heartbeats and attempts.
        detached_text: line to print after Ctrl-C.
    """
    failed_count = 0

    def is_running() -> bool:
        """Return whether the job is in the queue. Slurm may be busy, and forgets a job some minutes after its end."""
        nonlocal failed_count
        try:
            is_queued = bool(submit(["squeue", "--noheader", "--job", job_id], "squeue"))
        except UserError as error:
            failed_count += 1
            return failed_count < FAILED_LOOKS and "Invalid job id" not in str(error)
        failed_count = 0
        return is_queued

    try:
        follow(log_path, 0, is_running, FOLLOW_SECONDS)
    except KeyboardInterrupt:
        print(f"\njob {job_id} goes on, and scancel {job_id} ends it; {detached_text}")
        return 0
    exit_codes = [attempt.code for attempt in read_attempts(folder) if attempt.launch == f"slurm-{job_id}"]
    if not exit_codes:
        print(f"job {job_id} has ended, and recorded no attempt: see {log_path}")
    return exit_codes[-1] if exit_codes else CRASHED


def submit(command: Sequence[str], advice: str, text: str | None = None) -> str:
    """Run a scheduler's program, and return its output.

    Args:
        command: command line of the program.
        advice: command that the user can run on another machine if the program is missing on this one.
        text: text for the program's standard input.

    Raises:
        UserError: the program is missing or fails; the message quotes the program's output.
    """
    try:
        process = subprocess.run(command, input=text, capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"cannot run {command[0]} ({error.strerror}): write the document with --dry-run, and run `{advice}` where "
            f"{command[0]} is"
        ) from None
    if process.returncode:
        raise UserError(f"{command[0]} refused the document: {(process.stderr or process.stdout).strip()}")
    return process.stdout
