"""Cluster: a description of a group of machines for a launch, in one checked value.

A cluster's file, such as tpu_configs/h200_slurm.py, assigns a `Cluster` to the name `cluster`.
"""

import dataclasses
import re
import runpy
from pathlib import Path

from jaxscale.errors import UserError, near_miss
from jaxscale.platforms.platform import Platform
from jaxscale.values import check_types
from jaxscale.values.limits import MAX_LOCAL_PROCESSES
from jaxscale.values.read_files import is_regular

CONFIGS = "tpu_configs"
"""Folder of the clusters' files in jaxscale's repository."""


@dataclasses.dataclass(frozen=True)
class Local:
    """This machine, for a rehearsal of a launch on several machines.

    Args:
        processes: number of processes.
    """

    processes: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.processes <= MAX_LOCAL_PROCESSES:
            raise UserError(
                f"local: got {self.processes} processes, expected 1 to {MAX_LOCAL_PROCESSES}, such as local:4"
            )


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A queue of Slurm.

    Args:
        partition: partition of the nodes; "" for the default one.
        account: account that is charged; "" for the default one.
        qos: quality of service; "" for the default one.
        time: time limit of a job, such as "24:00:00"; a run that needs more time is requeued.
        gpus: option that requests a node's GPUs, "gpus-per-node" or "gres"; "" where Slurm does not count them.
        options: further options of sbatch, such as "--constraint=ib".
        container: image that each task runs in, for clusters with pyxis; "" for none.
        is_exclusive: whether the job takes whole nodes.
        jobs: number of jobs to submit; they run one after the other. Set more than 1 if jobs may not be requeued.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = "24:00:00"
    gpus: str = "gpus-per-node"
    options: tuple[str, ...] = ()
    container: str = ""
    is_exclusive: bool = True
    jobs: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.gpus not in ("gpus-per-node", "gres", ""):
            raise UserError(f"Slurm.gpus: got {self.gpus!r}, expected 'gpus-per-node', 'gres' or ''")
        if not re.fullmatch(r"(\d+-)?\d{1,3}(:\d{2}){0,2}", self.time):
            raise UserError(f"Slurm.time: got {self.time!r}, expected D-HH:MM:SS, HH:MM:SS or minutes")
        if self.jobs < 1:
            raise UserError(f"Slurm.jobs: got {self.jobs}, expected a whole number >= 1")
        for name in ("partition", "account", "qos", "container"):
            _check_word(f"Slurm.{name}", getattr(self, name))
        for option in self.options:
            if not option.startswith("--") or not _is_word(option):
                raise UserError(f"Slurm.options: got {option!r}, expected an option of sbatch, such as --constraint=ib")


@dataclasses.dataclass(frozen=True)
class JobSet:
    """A JobSet on Kubernetes.

    Args:
        image: container image that holds jaxscale and the experiment.
        namespace: namespace of the JobSet; "" for the namespace of kubectl's context.
        queue: local queue of Kueue; "" if Kueue is not used.
        claim: persistent volume claim, which all pods mount at `Cluster.shared`; "" for none.
        service_account: service account of the pods; "" for the default one.
        secrets: names of secrets whose entries become environment variables.
        restarts: number of restarts that JobSet allows after failures; stops by a signal do not count.
        has_message_patterns: whether the JobSet controller supports `onJobFailureMessagePatterns`.
    """

    image: str
    namespace: str = ""
    queue: str = ""
    claim: str = ""
    service_account: str = ""
    secrets: tuple[str, ...] = ()
    restarts: int = 20
    has_message_patterns: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        _check_word("JobSet.image", self.image, required=True)
        for name in ("namespace", "queue", "claim", "service_account"):
            if getattr(self, name):
                check_dns_name(f"JobSet.{name}", getattr(self, name))
        for secret in self.secrets:
            check_dns_name("JobSet.secrets", secret)
        if self.restarts < 0:
            raise UserError(f"JobSet.restarts: got {self.restarts}, expected a whole number >= 0")


@dataclasses.dataclass(frozen=True)
class QueuedResource:
    """A queued resource of Cloud TPU: machines that Google Cloud creates when there is capacity.

    Args:
        project: Google Cloud project that is charged.
        zone: zone of the TPUs, such as "us-east5-b".
        runtime: version of the TPU machines' software, such as "v2-alpha-tpuv6e".
        accelerator: type of the machines, such as "v6e-256"; "" derives it from the platform.
        spot: whether to take spot machines, which Google Cloud may take away at any time.
        reservation: name of a reservation; "" for on-demand machines.
        network: name of the network; "" for the default one.
        service_account: service account of the machines; "" for the default one.
    """

    project: str
    zone: str
    runtime: str
    accelerator: str = ""
    spot: bool = False
    reservation: str = ""
    network: str = ""
    service_account: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("project", "zone", "runtime"):
            _check_word(f"QueuedResource.{name}", getattr(self, name), required=True)
        for name in ("accelerator", "reservation", "network", "service_account"):
            _check_word(f"QueuedResource.{name}", getattr(self, name))
        if self.spot and self.reservation:
            raise UserError("QueuedResource: got spot and a reservation, expected one of them")


@dataclasses.dataclass(frozen=True)
class Ssh:
    """Machines that are reached by ssh without a password.

    Args:
        hosts: addresses of the machines; the first machine is the coordinator.
        user: name of the user on these machines; "" for the current user.
        options: further options of ssh, such as "-i key".
        port: port of the coordinator.
    """

    hosts: tuple[str, ...]
    user: str = ""
    options: tuple[str, ...] = ()
    port: int = 61440

    def __post_init__(self) -> None:
        check_types(self)
        if not self.hosts:
            raise UserError("Ssh.hosts: got none, expected the addresses of the machines")
        for host in self.hosts:
            _check_word("Ssh.hosts", host, required=True)
            if host.startswith("-"):
                raise UserError(f"Ssh.hosts: got {host!r}, expected an address")
        if len(set(self.hosts)) < len(self.hosts):
            raise UserError(f"Ssh.hosts: got {self.hosts}, expected each address once")
        _check_word("Ssh.user", self.user)
        if not 1024 <= self.port < 65536:
            raise UserError(f"Ssh.port: got {self.port}, expected 1024 to 65535")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A group of machines and the scheduler that starts processes on them.

    Args:
        platform: text of the platform, such as "gpu h200 x 32" or "tpu v6e:16x16 x 2".
        scheduler: the scheduler that starts the processes.
        hosts: number of machines; `None` computes it from the platform.
        shared: folder of the runs, which all machines share; "" for the working directory of the launch.
        python: path of the Python interpreter on the machines.
        setup: shell lines to run before Python, such as "module load cuda".
        variables: names of environment variables whose values are passed on from the launch. Keep secrets in the
            scheduler's own store instead.
        interface: network interface for messages between processes, such as "ib0"; with "", the processes choose.
        cache: folder on each machine for compiled programs and tokens; "" for the user's home.
        grace: seconds that processes have between the scheduler's stop signal and its kill signal.

    Example:
        >>> cluster = Cluster("gpu h200 x 32", Slurm(partition="h200"), shared="/shared/me")
        >>> cluster.host_count, cluster.run_dir("plays")
        (4, '/shared/me/runs/plays')
    """

    platform: str
    scheduler: Local | Slurm | JobSet | QueuedResource | Ssh = Local()
    hosts: int | None = None
    shared: str = ""
    python: str = "python"
    setup: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    interface: str = ""
    cache: str = ""
    grace: int = 120

    def __post_init__(self) -> None:
        check_types(self)
        platform = self.parsed
        if self.hosts is not None and self.hosts < 1:
            raise UserError(f"Cluster.hosts: got {self.hosts}, expected a whole number >= 1")
        if self.platform != "local" and self.hosts is None and platform is not None and platform.hosts is None:
            raise UserError(f"Cluster.hosts: expected the number of machines, because {self.platform!r} leaves it open")
        if platform is not None and (platform.chips * platform.slices) % self.host_count:
            raise UserError(
                f"Cluster.hosts: got {self.host_count}, but {platform.chips * platform.slices} chips of "
                f"{self.platform!r} cannot be shared evenly"
            )
        if isinstance(self.scheduler, Ssh) and len(self.scheduler.hosts) != self.host_count:
            raise UserError(
                f"Ssh.hosts: got {len(self.scheduler.hosts)} addresses, expected {self.host_count} for "
                f"{self.platform!r}"
            )
        is_tpu = platform is not None and platform.chip.kind == "tpu"
        if isinstance(self.scheduler, QueuedResource) and not is_tpu:
            raise UserError(f"QueuedResource: got the platform {self.platform!r}, expected a TPU")
        if isinstance(self.scheduler, Local):
            field_by_name = Cluster.__dataclass_fields__
            needless_names = [
                name
                for name in ("python", "setup", "variables", "interface", "cache")
                if getattr(self, name) != field_by_name[name].default
            ]
            if needless_names:
                raise UserError(
                    f"Cluster.{needless_names[0]}: expected none with Local, whose processes start with this Python "
                    "and environment"
                )
        for name in ("shared", "python", "interface", "cache"):
            if "\n" in getattr(self, name) or "\0" in getattr(self, name):
                raise UserError(f"Cluster.{name}: got {getattr(self, name)!r}, expected one line")
        for variable in self.variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise UserError(
                    f"Cluster.variables: got {variable!r}, expected the name of an environment variable; values do not "
                    "belong into a cluster's file"
                )
        if not 10 <= self.grace <= 3600:
            raise UserError(f"Cluster.grace: got {self.grace} seconds, expected 10 to 3600")

    @property
    def parsed(self) -> Platform | None:
        """The platform; `None` for "local", which only JAX can detect."""
        return None if self.platform == "local" else Platform.parse(self.platform)

    @property
    def host_count(self) -> int:
        """The number of machines."""
        if self.hosts is not None:
            return self.hosts
        platform = self.parsed
        if platform is None or platform.hosts is None:
            return 1
        if platform.chip.kind == "tpu" and platform.chips > 8:
            # in slices of several machines, each machine has four chips, even for chips with single hosts of eight
            return platform.slices * platform.chips // 4
        return platform.hosts

    @property
    def chips_per_host(self) -> int:
        """The number of chips of each machine; 0 if unknown."""
        platform = self.parsed
        return 0 if platform is None else platform.chips * platform.slices // self.host_count

    def run_dir(self, name: str) -> str:
        """Return the directory of the run called `name`."""
        return f"{self.shared.rstrip('/')}/runs/{name}" if self.shared else f"runs/{name}"


def read_cluster(text: str | None) -> Cluster:
    """Return the cluster that a text specifies: the path of a cluster's file, or a text such as "local:4".

    Raises:
        UserError: the file does not exist, or does not define a cluster.

    Example:
        >>> read_cluster("local:4").scheduler
        Local(processes=4)
    """
    if not text:
        raise UserError(
            "launch lacks --cluster: expected a cluster's file, such as tpu_configs/h200_slurm.py, or local:4"
        )
    match = re.fullmatch(r"local(?::(\d{1,6}))?", text.strip())
    if match is not None:
        return Cluster("local", Local(int(match[1] or 1)))
    path = Path(text)
    if not is_regular(path):
        known_files = sorted(str(file) for folder in {path.parent, Path(CONFIGS)} for file in folder.glob("*.py"))
        hint = near_miss(text, known_files) or (f"; there are {', '.join(known_files[:16])}" if known_files else "")
        raise UserError(f"cluster {text!r} is not a file: expected a cluster's file or local:4{hint}")
    try:
        cluster = runpy.run_path(str(path)).get("cluster")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}; expected cluster = Cluster(...)") from error
    if not isinstance(cluster, Cluster):
        raise UserError(f"{path} defines no cluster: expected cluster = Cluster(...)")
    return cluster


def check_dns_name(field_name: str, name: str) -> None:
    """Raise UserError if a name is not a DNS label: at most 63 lower-case letters, digits and hyphens."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UserError(
            f"{field_name}: got {name!r} ({len(name)} characters), expected at most 63 lower-case letters, digits and "
            "hyphens, first a letter; --name sets the name of a run"
        )


def _is_word(text: str) -> bool:
    """Return whether a text is printable and contains no space."""
    return text.isprintable() and not any(character.isspace() for character in text)


def _check_word(field_name: str, text: str, *, required: bool = False) -> None:
    """Raise UserError if a text has spaces or unprintable characters, or if a required text is empty."""
    if (required and not text) or not _is_word(text):
        raise UserError(f"{field_name}: got {text!r}, expected a word without spaces")
