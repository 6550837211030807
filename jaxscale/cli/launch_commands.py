"""The subcommands for runs on many machines: launch, watch, retry, status and stop."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from jaxscale.cli.experiment_commands import Train, load_experiment
from jaxscale.cli.flags import flag, rest, word
from jaxscale.errors import UserError
from jaxscale.records.storage import BUCKET_SCHEMES, check_location, is_remote
from jaxscale.values import spell
from jaxscale.values.limits import MAX_LOCAL_PROCESSES
from jaxscale.values.read_files import is_folder


@dataclasses.dataclass(frozen=True)
class Launch(Train):
    """Start an experiment on a cluster, watch it, and restart it.

    Takes the flags of train, and fields of the experiment: --plan.zero 3

    Exit codes: those of train, and 5 after failures without progress.

    Args:
        cluster: file that describes the cluster, such as tpu_configs/h200_slurm.py; local:4 starts four processes on
            this machine.
        dry_run: whether to print the scheduler's document instead of submitting it.
        timeouts: seconds after which a phase counts as hung, such as stepping=120,data=60.
        elastic: replica goes on with fewer replicas and the same batch after a machine is lost; ssh and local only.
    """

    cluster: str | None = flag("CLUSTER", "required")
    dry_run: bool = False
    timeouts: str | None = flag("PHASE=S", "10 minutes for a step")
    elastic: str | None = flag("replica", "none")

    def run(self, fields: Mapping[str, str]) -> int:
        """Check the flags, and launch the run."""
        from jaxscale.launch.cluster import read_cluster
        from jaxscale.launch.submit import (
            check_compiler_options,
            check_copies,
            check_mesh,
            elastic_of,
            launch,
            prepare_directory,
        )
        from jaxscale.launch.watch import parse_timeouts

        parse_timeouts(self.timeouts)
        cluster = read_cluster(self.cluster)
        self.check()
        experiment, source = load_experiment(self, fields)
        check_mesh(cluster, experiment)
        check_compiler_options(cluster, experiment)
        check_copies(cluster, experiment)
        elastic = elastic_of(cluster, experiment, self.elastic)
        default_name = "-".join(filter(None, (experiment.name, self.variant)))
        run_dir = cluster.run_dir(default_name) if self.out is None else self.out
        if not self.dry_run:
            prepare_directory(run_dir, experiment, self.resume, is_returning=self.from_step is not None)
            source.trust()
        command = self.command_line(fields, run_dir)
        return launch(cluster, command, run_dir, self.timeouts, is_dry_run=self.dry_run, elastic=elastic)

    def command_line(self, fields: Mapping[str, str], run_dir: str) -> list[str]:
        """Return the words of the train command that each process runs. The launcher itself handles --resume never."""
        words = ["train", self.file, *([self.variant] if self.variant else [])]
        for field in dataclasses.fields(Train):
            value = getattr(self, field.name)
            if "word" not in field.metadata and field.name not in ("out", "resume") and value != field.default:
                words.append(f"--{field.name.replace('_', '-')}={spell(value)}")
        return [*words, *(f"--{path}={text}" for path, text in fields.items()), f"--out={run_dir}"]


@dataclasses.dataclass(frozen=True)
class WatchHost:
    """Run a host's processes, and end them if one fails or hangs.

    srun jaxscale watch --out RUN -- jaxscale train FILE --out RUN

    Args:
        command: command line of each process.
        out: directory of the run, which all hosts share; without it, only this host's processes are watched.
        ranks: number of processes on this host.
        timeouts: seconds after which a phase counts as hung, such as stepping=120,data=60.
    """

    command: tuple[str, ...] = rest("CMD")
    out: str | None = flag("DIR", "none")
    ranks: int = 1
    timeouts: str | None = flag("PHASE=S", "10 minutes for a step")

    def run(self) -> int:
        """Watch the processes of this host, and return the exit code."""
        if not 1 <= self.ranks <= MAX_LOCAL_PROCESSES:
            raise UserError(f"--ranks: got {self.ranks}, expected 1 to {MAX_LOCAL_PROCESSES}")
        from jaxscale.launch.host import watch_host
        from jaxscale.launch.watch import heartbeats_folder, parse_timeouts

        timeouts = parse_timeouts(self.timeouts)
        if self.out is not None:
            check_location(self.out)
        return watch_host(self.command, heartbeats_folder(self.out), self.ranks, timeouts, os.environ)


@dataclasses.dataclass(frozen=True)
class Retry:
    """Run a command that starts watchdogs until it is done.

    The command, such as srun ... jaxscale watch ..., comes after --.

    Exit codes: the command's, and 5 after too many failures without progress.

    Codes 2 and 4 are final, and a stop by a signal (75, 130) does not count.

    Args:
        command: command line that starts the processes of all hosts.
        out: directory of the run.
        requeue: whether to end with 75 after a stop by a signal, so that the scheduler can requeue the job.
    """

    command: tuple[str, ...] = rest("CMD")
    out: str = flag("DIR", "required", default="")
    requeue: bool = False

    def run(self) -> int:
        """Run the attempts, and return the exit code."""
        if not self.out:
            raise UserError("retry lacks --out DIR: expected the directory of the run")
        from jaxscale.launch.retry import launch_name, retry, run_command
        from jaxscale.launch.watch import heartbeats_folder

        check_location(self.out)
        folder = heartbeats_folder(self.out)
        return retry(folder, run_command(self.command), launch_name(os.environ), ends_when_preempted=self.requeue)


@dataclasses.dataclass(frozen=True)
class ShowStatus:
    """Show where a run's processes stand, and where the hours went.

    Args:
        run_dir: directory of a run.
        log: number of a process whose log to show and follow.
    """

    run_dir: str = word("RUN_DIR")
    log: int | None = flag("RANK", "none")

    def run(self) -> None:
        """Print the table, or follow a log."""
        from jaxscale.launch.status import show_log, status
        from jaxscale.records.directory import PROCESSES
        from jaxscale.records.hours import hours

        _check_local_run(self.run_dir)
        folder = Path(self.run_dir) / PROCESSES
        if self.log is not None:
            show_log(folder, self.log)
        else:
            print(status(folder))
            run_hours = hours(self.run_dir)
            if run_hours is not None:
                print(run_hours)


@dataclasses.dataclass(frozen=True)
class StopRun:
    """Ask a run to save after its step, and to stop.

    Args:
        run_dir: directory of a run.
    """

    run_dir: str = word("RUN_DIR")

    def run(self) -> None:
        """Ask the run to stop, and print what happens."""
        from jaxscale.launch.status import stop
        from jaxscale.records.directory import PROCESSES

        _check_local_run(self.run_dir)
        print(stop(Path(self.run_dir) / PROCESSES))


def _check_local_run(run_dir: str) -> None:
    """Raise UserError if there is no such local directory."""
    if is_remote(run_dir) and run_dir.partition("://")[0] in BUCKET_SCHEMES:
        raise UserError(f"{run_dir} is in a bucket, where runs write no heartbeats: see the logs of the scheduler")
    check_location(run_dir)
    if not is_folder(run_dir):
        raise UserError(f"run directory {run_dir} does not exist: give the directory of a run")
