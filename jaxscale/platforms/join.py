"""Joining: the processes of a run find each other through JAX's coordination service.

A scheduler sets environment variables that hold the number of processes, this process's rank, and the host of rank 0.
`ENVIRONMENTS` lists the schedulers and their variables. The first one whose variables are set is used; without any, the
process runs alone. Commands join before a backend starts.
"""

import dataclasses
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxscale import heartbeat
from jaxscale.errors import UserError, near_miss
from jaxscale.platforms.detect import accelerators

FIRST_PORT, PORT_COUNT = 61440, 4096
"""Range of ports that are derived from a job's number. It lies above the ports that Linux assigns to clients."""
HEARTBEAT_TIMEOUT = 30
"""If a process sends no heartbeat for this many seconds, JAX ends the other processes; JAX's default is 100."""
PREFIX = "JAXSCALE_"
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_EXEMPT_FROM_GRPC, _EXEMPT = "no_grpc_proxy", "no_proxy"  # gRPC reads the second one if the first is not set
OWN_VARIABLES = (
    "JAXSCALE_COORDINATOR",
    "JAXSCALE_PROCESSES",
    "JAXSCALE_RANK",
    "JAXSCALE_LOCAL_RANK",
    "JAXSCALE_LOCAL_PROCESSES",
    "JAXSCALE_JOIN_TIMEOUT",
    "JAXSCALE_HEARTBEATS",
    "JAXSCALE_ATTEMPT",
    "JAXSCALE_LAUNCH",
    "JAXSCALE_CACHE",
    "JAXSCALE_TRACEBACK",
    "JAXSCALE_TRUST",
)
"""The environment variables of jaxscale. A variable whose name resembles one of these is an error."""


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """The place of this process among the processes of a run.

    Args:
        scheduler: name of the scheduler, for messages.
        coordinator: host and port of rank 0's coordination service, such as "node1:61440".
        processes: number of processes.
        rank: number of this process, from 0.
        local_rank: number of this process among the processes of its host, from 0.
        local_processes: number of processes on this host.
    """

    scheduler: str
    coordinator: str
    processes: int
    rank: int
    local_rank: int = 0
    local_processes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.processes:
            raise UserError(
                f"{self.scheduler}: got rank {self.rank} of {self.processes} processes, expected 0 to "
                f"{self.processes - 1}"
            )
        if not 0 <= self.local_rank < self.local_processes:
            raise UserError(
                f"{self.scheduler}: got local rank {self.local_rank} of {self.local_processes} processes on this host, "
                f"expected a rank from 0 to {self.local_processes - 1}"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not _is_number(port) or not 0 < int(port) < 65536:
            raise UserError(
                f"{self.scheduler}: got coordinator {self.coordinator!r}, expected HOST:PORT, such as node1:61440"
            )


Variables = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment variables in which a scheduler passes a process's place.

    Args:
        name: name of the scheduler.
        processes: variable that holds the number of processes.
        rank: variable that holds the number of this process.
        coordinator: function that returns HOST:PORT of rank 0, given the variables.
        local_rank: variable that holds this process's number on its host; "" if each host runs one process.
        local_processes: function that returns the number of processes on this host, given the variables.
        needs: further variables that must be set; otherwise, the scheduler counts as absent.
    """

    name: str
    processes: str
    rank: str
    coordinator: Callable[[Variables], str]
    local_rank: str = ""
    local_processes: Callable[[Variables], int] = lambda variables: 1
    needs: tuple[str, ...] = ()

    def place(self, variables: Variables) -> ProcessPlace | None:
        """Return the place that the variables specify; `None` if some are missing, or if there is a single process.

        Raises:
            UserError: a variable is malformed.
        """
        variable_names = [self.processes, self.rank, *self.needs, *([self.local_rank] if self.local_rank else [])]
        if any(variable_name not in variables for variable_name in variable_names):
            return None
        process_count = _number(variables, self.processes)
        if process_count == 1:
            return None
        local_rank = _number(variables, self.local_rank) if self.local_rank else 0
        return ProcessPlace(
            self.name,
            self.coordinator(variables),
            process_count,
            _number(variables, self.rank),
            local_rank,
            max(self.local_processes(variables), 1),
        )


def _slurm_coordinator(variables: Variables) -> str:
    """Return "HOST:PORT": the first host of a Slurm step, and a port that depends on the job, the step and the restart.

    So two steps on one node have different ports, and a requeued job differs from its old, still running processes.
    """
    job_digits = re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "0")) or "0"
    step_digits = re.sub(r"\D", "", variables.get("SLURM_STEP_ID", "0")) or "0"
    restart_count = _number(variables, "SLURM_RESTART_COUNT", 0) + _number(variables, heartbeat.ATTEMPT_VARIABLE, 0)
    port = FIRST_PORT + (int(job_digits) * 61 + int(step_digits) * 7 + restart_count) % PORT_COUNT
    return f"{first_host(variables['SLURM_STEP_NODELIST'])}:{port}"


def _slurm_local_processes(variables: Variables) -> int:
    """Return the number of tasks on this node, from Slurm's list of tasks per node, such as "2(x3),1"."""
    task_counts: list[int] = []
    for entry in variables.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE: got {entry!r}, expected counts such as 2(x3),1")
        task_counts += [int(match[1])] * int(match[2] or 1)
    return task_counts[min(_number(variables, "SLURM_NODEID", 0), len(task_counts) - 1)]


def _openmpi_coordinator(variables: Variables) -> str:
    """Return "HOST:PORT": the host of mpirun, which is the first host, and a port that depends on the job's number.

    OpenMPI 5 does not set the variable with this host, so its processes need JAXSCALE_COORDINATOR.
    """
    if "JAXSCALE_COORDINATOR" in variables:
        return variables["JAXSCALE_COORDINATOR"]
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\..*?(?:tcp://([^,:;]+)|tcp6://\[([^,\]]+))", uri)
    if match is None:
        raise UserError(
            f"OMPI_MCA_orte_hnp_uri: got {uri!r}, expected JOB.0;tcp://HOST:PORT; set "
            "JAXSCALE_COORDINATOR to HOST:PORT of rank 0 on all processes"
        )
    return f"{match[2] or f'[{match[3]}]'}:{FIRST_PORT + int(match[1]) // 2**12 % PORT_COUNT}"


def _torchrun_coordinator(variables: Variables) -> str:
    """Return "HOST:PORT": torchrun's host, and a port that differs from the port of torchrun's own store."""
    port = _number(variables, "MASTER_PORT")
    return f"{variables['MASTER_ADDR']}:{port + 1 if port < 65535 else port - 1}"


def _jobset_coordinator(variables: Variables) -> str:
    """Return "HOST:PORT": the DNS name of a JobSet's first pod, and a port."""
    jobset_name, job_name = variables["JOBSET_NAME"], variables["REPLICATED_JOB_NAME"]
    port = FIRST_PORT + _number(variables, heartbeat.ATTEMPT_VARIABLE, 0) % PORT_COUNT
    return f"{jobset_name}-{job_name}-0-0.{variables.get('JOBSET_SUBDOMAIN') or jobset_name}:{port}"


def _jobset_place(variables: Variables) -> ProcessPlace | None:
    """Return the place of a JobSet's pod. The ranks of the pods are numbered job by job."""
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX", "JOB_COUNT", "JOB_COMPLETION_INDEX", "PODS_PER_JOB")
    if any(name not in variables for name in names):
        return None
    pod_count = _number(variables, "PODS_PER_JOB")
    process_count = _number(variables, "JOB_COUNT") * pod_count
    rank = _number(variables, "JOB_INDEX") * pod_count + _number(variables, "JOB_COMPLETION_INDEX")
    return None if process_count == 1 else ProcessPlace("JobSet", _jobset_coordinator(variables), process_count, rank)


def _own_coordinator(variables: Variables) -> str:
    """Return the coordinator that the user or a launcher sets."""
    return variables["JAXSCALE_COORDINATOR"]


ENVIRONMENTS = (
    Environment(
        "JAXSCALE_* variables",
        processes="JAXSCALE_PROCESSES",
        rank="JAXSCALE_RANK",
        coordinator=_own_coordinator,
        local_rank="JAXSCALE_LOCAL_RANK",
        local_processes=lambda variables: _number(variables, "JAXSCALE_LOCAL_PROCESSES", 1),
        needs=("JAXSCALE_COORDINATOR",),
    ),
    Environment(
        "OpenMPI",  # before Slurm, whose variables mpirun passes on
        processes="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        coordinator=_openmpi_coordinator,
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_processes=lambda variables: _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
    ),
    Environment(
        "torchrun",
        processes="WORLD_SIZE",
        rank="RANK",
        coordinator=_torchrun_coordinator,
        local_rank="LOCAL_RANK",
        local_processes=lambda variables: _number(variables, "LOCAL_WORLD_SIZE", 1),
        needs=("MASTER_ADDR", "MASTER_PORT"),
    ),
    Environment(
        "Slurm",
        processes="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        coordinator=_slurm_coordinator,
        local_rank="SLURM_LOCALID",
        local_processes=_slurm_local_processes,
        needs=("SLURM_STEP_NODELIST", "SLURM_STEP_ID"),
    ),
    Environment(
        "GKE's TPU variables",
        processes="TPU_WORKER_COUNT",
        rank="TPU_WORKER_ID",
        coordinator=lambda variables: f"{variables['TPU_WORKER_HOSTNAMES'].split(',')[0]}:{FIRST_PORT}",
        needs=("TPU_WORKER_HOSTNAMES",),
    ),
)
"""The schedulers. The first one whose variables are set is used. JobSets and Cloud TPU's metadata come after these."""


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm list of nodes.

    Example:
        >>> first_host("node[007-015,20],gpu3"), first_host("n1,n2"), first_host("rack[1-2]-node[3-4]")
        ('node007', 'n1', 'rack1-node3')
    """
    host, remaining_text = "", nodelist
    while remaining_text and remaining_text[0] != ",":
        if remaining_text[0] == "[":
            bracket, _, remaining_text = remaining_text[1:].partition("]")
            host += re.split(r"[,-]", bracket)[0]
        else:
            host, remaining_text = host + remaining_text[0], remaining_text[1:]
    if not host:
        raise UserError(f"SLURM_STEP_NODELIST: got {nodelist!r}, expected names of nodes, such as node[1-4]")
    return host


def place_of(variables: Variables) -> ProcessPlace | None:
    """Return this process's place, given environment variables; `None` if this process runs alone.

    Raises:
        UserError: a variable is malformed, or only some of jaxscale's own variables are set.

    Example:
        >>> place_of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        ...           "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).coordinator
        '10.0.0.1:29501'
        >>> place_of({}) is None
        True
    """
    for name in variables:
        if not name.startswith(PREFIX) or name in OWN_VARIABLES:
            continue
        # the common prefix alone makes no near miss
        if near_miss(name.removeprefix(PREFIX), [own_name.removeprefix(PREFIX) for own_name in OWN_VARIABLES]):
            raise UserError(f"unknown environment variable {name}{near_miss(name, OWN_VARIABLES)}")
    variables = dict(variables)
    set_names = [name for name in ("JAXSCALE_PROCESSES", "JAXSCALE_RANK") if name in variables]
    if set_names:
        missing_names = [name for name in OWN_VARIABLES[:3] if name not in variables]
        if missing_names:
            raise UserError(
                f"{set_names[0]} is set, but {', '.join(missing_names)} is not: set all of {OWN_VARIABLES[:3]}"
            )
        if _number(variables, "JAXSCALE_PROCESSES") == 1:
            return None  # the user wants this process to run alone, under any scheduler
        variables.setdefault("JAXSCALE_LOCAL_RANK", "0")
    if "TPU_WORKER_HOSTNAMES" in variables:
        variables["TPU_WORKER_COUNT"] = str(len(variables["TPU_WORKER_HOSTNAMES"].split(",")))
    jobset_place = _jobset_place(variables)
    if jobset_place is not None and not set_names:
        return jobset_place  # before GKE's TPU variables, which number the hosts of one slice
    for environment in ENVIRONMENTS:
        place = environment.place(variables)
        if place is not None:
            return _with_coordinator(place, variables)
    if variables.get("JAXSCALE_COORDINATOR"):
        raise UserError(
            "JAXSCALE_COORDINATOR is set, but this process finds no rank among several: set JAXSCALE_PROCESSES and "
            "JAXSCALE_RANK, too, or set JAXSCALE_PROCESSES=1 and JAXSCALE_RANK=0 to run alone"
        )
    return None


def _with_coordinator(place: ProcessPlace, variables: Variables) -> ProcessPlace:
    """Return a place with the coordinator that the user set; without one, return the place unchanged."""
    coordinator = variables.get("JAXSCALE_COORDINATOR")
    return dataclasses.replace(place, coordinator=coordinator) if coordinator else place


def join() -> ProcessPlace | None:
    """Join the processes of the run, if the environment specifies several. A second call only returns the place.

    Returns:
        The place of this process in the run, read from the environment; `None` if the run has a single process.

    Raises:
        UserError: the environment is malformed, or rank 0 does not respond within the timeout. If rank 0 responds but
            other ranks are missing, the process prints that and ends with code 2, because JAX would abort it.
    """
    import jax

    place = place_of(os.environ)
    if jax.distributed.is_initialized():
        return place
    if place is None:
        if _has_tpu_peers():
            heartbeat.set_phase("joining")
            jax.distributed.initialize()  # JAX reads Cloud TPU's metadata
        if heartbeat.FOLDER_VARIABLE in os.environ:
            heartbeat.start(jax.process_index() if jax.distributed.is_initialized() else 0)
        return None
    heartbeat.start(place.rank)
    heartbeat.set_phase("joining")
    timeout_seconds = _number(os.environ, "JAXSCALE_JOIN_TIMEOUT", 300)
    _check_coordinator(place, timeout_seconds)
    _bypass_proxy(place.coordinator)
    options: dict[str, object] = {}
    if gpu_numbers := local_gpu_numbers(place, os.environ):
        options["local_device_ids"] = gpu_numbers  # JAX under Slurm would take one GPU, even for a host's only process
    # JAX's timeout is longer, so that our message comes first
    timer = threading.Timer(timeout_seconds, _end_for_missing_ranks, (place, timeout_seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.rank,
            initialization_timeout=timeout_seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            **options,  # pyright: ignore[reportArgumentType]
        )
    finally:
        timer.cancel()
    return place


def local_gpu_numbers(place: ProcessPlace, variables: Variables, folder: Path = Path("/dev")) -> list[int]:
    """Return the numbers of the GPUs that this process uses: an equal share of the GPUs that are visible on its host.

    If a process sees only its own GPUs, for example with `srun --gpus-per-task`, it uses all of them.

    Args:
        place: the place of this process.
        variables: the environment variables.
        folder: folder of the device files.

    Raises:
        UserError: the processes of this host cannot share the GPUs evenly.
    """
    visible_devices_text = variables.get("CUDA_VISIBLE_DEVICES")
    if visible_devices_text is not None:
        gpu_count = len([name for name in visible_devices_text.split(",") if name.strip()])
    else:
        gpu_count = len([path for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    has_own_gpus = gpu_count == 1 or _number(variables, "SLURM_GPUS_ON_NODE", 0) == gpu_count * place.local_processes
    if place.local_processes == 1 or has_own_gpus:
        return list(range(gpu_count))
    if gpu_count % place.local_processes:
        raise UserError(
            f"{place.scheduler}: {place.local_processes} processes on this host cannot share {gpu_count} GPUs evenly: "
            f"start 1 process, or one per GPU"
        )
    gpus_per_process = gpu_count // place.local_processes
    first_gpu = place.local_rank * gpus_per_process
    return list(range(first_gpu, first_gpu + gpus_per_process))


def _has_tpu_peers() -> bool:
    """Return whether this machine is a host of a Cloud TPU slice with several hosts, by the metadata server."""
    if "tpu" not in accelerators() or os.environ.get("TPU_SKIP_MDS_QUERY"):
        return False
    import urllib.request

    url = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=2) as response:
            return "," in response.read().decode()
    except OSError:
        return False


def _check_coordinator(place: ProcessPlace, timeout_seconds: int) -> None:
    """On rank 0, check that the coordinator's port is free; on other ranks, wait until the coordinator responds.

    If a host's name resolves to 127.0.1.1, as by default on Debian, every process would wait for itself.
    """
    host, _, port_text = place.coordinator.rpartition(":")
    port = int(port_text)
    if place.rank == 0:
        try:
            socket.create_server(("", port), reuse_port=False).close()
        except OSError as error:
            raise UserError(
                f"{place.scheduler}: port {port} of the coordinator cannot be used ({error.strerror}): another run "
                "may use it; set JAXSCALE_COORDINATOR to HOST:PORT on all processes"
            ) from None
        return
    address, reason = "", ""
    deadline = time.monotonic() + timeout_seconds
    # if nobody responds, JAX would end this process without a traceback
    while time.monotonic() < deadline:
        try:
            address = str(socket.getaddrinfo(host.strip("[]"), port)[0][4][0])
            socket.create_connection((address, port), timeout=2).close()
            return
        except OSError as error:  # the name may resolve, and the port may open, once rank 0 has started
            reason = error.strerror or str(error)
            if address.startswith("127."):
                deadline = min(deadline, time.monotonic() + 60)
            time.sleep(0.1)
    hint = ""
    if address.startswith("127."):
        hint = f", which resolves to {address}, this machine: correct /etc/hosts"
    raise UserError(
        f"{place.scheduler}: rank {place.rank} of {place.processes} waited for rank 0 at {host}, port {port}, and no "
        f"coordinator answered ({reason}){hint}. See whether rank 0 runs, or set JAXSCALE_COORDINATOR to ADDRESS:PORT "
        "of its host on all processes"
    )


def _end_for_missing_ranks(place: ProcessPlace, timeout_seconds: int) -> None:
    """Print that processes are missing, and end this process. JAX would abort the process without this message."""
    print(
        f"jaxscale: {place.scheduler}: after {timeout_seconds} s, not all {place.processes} processes have joined "
        f"at {place.coordinator} (this is rank {place.rank}): {_missing_ranks_text(place)}; JAXSCALE_JOIN_TIMEOUT sets "
        "another number of seconds",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _bypass_proxy(coordinator: str) -> None:
    """Exempt the coordinator from the environment's proxies, because processes cannot connect to it through a proxy."""
    if not any(name in os.environ for name in _PROXIES):
        return
    exempt_hosts = [os.environ.get(_EXEMPT_FROM_GRPC) or os.environ.get(_EXEMPT, ""), coordinator.rpartition(":")[0]]
    os.environ[_EXEMPT_FROM_GRPC] = ",".join(filter(None, exempt_hosts))


def _missing_ranks_text(place: ProcessPlace) -> str:
    """Return a text that names the ranks without a heartbeat; if no missing rank is known, return general advice."""
    folder = os.environ.get(heartbeat.FOLDER_VARIABLE)
    heartbeat_by_rank = {} if folder is None else heartbeat.read_heartbeats(Path(folder))
    missing_ranks = [str(rank) for rank in range(place.processes) if rank not in heartbeat_by_rank]
    if folder is None or not missing_ranks:
        return "the outputs of the others show which one failed or did not start"
    more_text = f" and {len(missing_ranks) - 16} more" if len(missing_ranks) > 16 else ""
    return f"no heartbeat in {folder} from rank {', '.join(missing_ranks[:16])}{more_text}"


def _is_number(text: str) -> bool:
    """Return whether a text consists of at most nine digits from 0 to 9."""
    return text.isascii() and text.isdigit() and len(text) < 10


def _number(variables: Variables, name: str, default: int | None = None) -> int:
    """Return the number that an environment variable holds, or the default if the variable is not set."""
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _is_number(text.strip()):
        raise UserError(f"environment variable {name}: got {text!r}, expected a whole number")
    return int(text)
