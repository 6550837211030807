"""Communication between the processes of a run, outside of train steps. A run with a single process sends nothing.

Each function except `is_first` and `process_index` is collective: all processes must call these functions in the same
order, or some processes will wait forever.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxscale.errors import UserError

SHARED_SECONDS = 20
"""Seconds that a file server may take to show a new file to another host."""

_Result = TypeVar("_Result")


def is_first() -> bool:
    """Return whether this is the first process, which writes the files."""
    import jax

    return jax.process_index() == 0


def process_index() -> int:
    """Return the number of this process, from 0."""
    import jax

    return jax.process_index()


def check_processes_agree(
    experiment: Any, plan: Any, source: Any, from_step: int | str | None = None, init_from: Any = None
) -> None:
    """Check that all processes have the versions, experiment, plan, file, flags and device count of the first process.

    The experiment file may lie in different folders on different processes, because only its SHA-256 is compared.

    Args:
        experiment: the experiment of this process.
        plan: the plan of this process.
        source: origin of the experiment; `None` if the experiment was passed as an object.
        from_step: step of the checkpoint to which the run returns; `None` for the newest checkpoint.
        init_from: path of the weights from which a new run starts; `None` for the model's own initial weights.

    Raises:
        UserError: this process or another one differs from the first process.
    """
    import jax

    if jax.process_count() == 1:
        return
    from jaxscale.records.source import versions
    from jaxscale.values import changes, to_json

    facts = {
        "versions": versions(),
        "devices per process": jax.local_device_count(),
        "from step": from_step,
        "init from": None if init_from is None else str(init_from),
        "SHA-256 of the experiment file": None if source is None else source.sha256,
    }
    own_content = {"facts": facts, "experiment": to_json(experiment), "plan": to_json(plan)}
    first_content = json.loads(bytes(send_from_first(list(json.dumps(own_content).encode()))))

    def check() -> None:
        """Raise an error if this process differs from the first one."""
        differences = [
            f"{name} ({value} here, {first_content['facts'][name]} there)"
            for name, value in facts.items()
            if value != first_content["facts"][name]
        ]
        differences += [f"experiment: {change}" for change in changes(experiment, first_content["experiment"])]
        differences += [f"plan: {change}" for change in changes(plan, first_content["plan"])]
        if differences:
            raise UserError(
                f"rank {process_index()} differs from rank 0: {'; '.join(differences[:8])}. Start the same program "
                "with the same files and flags on all hosts"
            )

    call_on_all(check, LookupError)


def check_shared_folder(folder: Any) -> None:
    """Check that all processes share one folder: the first process writes a file, and the others look for it.

    Raises:
        UserError: this process or another one does not see the file.
    """
    import jax

    from jaxscale.records.storage import is_remote

    if jax.process_count() == 1 or is_remote(folder):
        return
    token = send_from_first([secrets.randbelow(2**31)])[0]
    token_file = folder / f".shared-{token}"
    if is_first():
        token_file.touch()
    wait_for_all("the shared folder has a token")

    def check() -> None:
        """Wait until the file is visible, because a file server may show it late; raise UserError if it never is."""
        deadline = time.monotonic() + SHARED_SECONDS
        while not token_file.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {process_index()} on {socket.gethostname()} does not see {folder} of rank 0: expected a "
                    "folder that all hosts share; set --out, or Cluster.shared, to one, or to a bucket (gs://...)"
                )
            time.sleep(0.1)

    try:
        call_on_all(check, LookupError)
    finally:
        if is_first():
            token_file.unlink(missing_ok=True)


def wait_for_all(label: str) -> None:
    """Wait until every process has called this function with the same label."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(label)


def send_from_first(numbers: Sequence[int]) -> list[int]:
    """Broadcast numbers: return, on every process, the numbers that the first process passes.

    Example:
        >>> send_from_first([3, 5])
        [3, 5]
    """
    import jax

    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental.multihost_utils import broadcast_one_to_all

    number_count = int(broadcast_one_to_all(np.int32(len(numbers))))
    local_array = np.asarray(numbers, np.int32) if is_first() else np.zeros(number_count, np.int32)
    return [int(number) for number in broadcast_one_to_all(local_array)] if number_count else []


def call_on_all(function: Callable[[], _Result], mild_error_type: type[Exception]) -> _Result:
    """Call a function on every process, and return this process's result once all processes have returned.

    Args:
        function: the function, which is called once on each process; it need not be collective.
        mild_error_type: type of mild errors, which do not end the run.

    Raises:
        Exception: the function failed on this process, and no other process has a more severe error.
        UserError: the function failed on another process with an error that ends the run.
        mild_error_type: the function failed only on other processes, with mild errors.

    Example:
        >>> call_on_all(lambda: 3, LookupError)
        3
    """
    results: list[_Result] = []
    error: Exception | None = None
    try:
        results.append(function())
    except Exception as caught_error:
        error = caught_error
    # 0 for no error, 1 for a mild error, 2 for an error that ends the run
    severity = 0 if error is None else 1 if isinstance(error, mild_error_type) else 2
    worst_severity = _max_over_processes(severity)
    if error is not None and severity == worst_severity:
        raise error
    if worst_severity == 2:
        raise UserError("another process failed and reports the reason: fix the cause, and start the run again")
    if worst_severity == 1:
        raise mild_error_type("reading failed on another process")
    return results[0]


def _max_over_processes(number: int) -> int:
    """Return the largest of all processes' numbers, on every process."""
    import jax

    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))
