"""Messages between the processes of a run, outside of steps. A run with a single process sends none.

Each function except `is_first` and `process_index` is collective: all processes must call these functions in the same
order, or some processes will wait forever.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxscale.errors import UserError

_Result = TypeVar("_Result")


def is_first() -> bool:
    """Return whether this is the first process, which writes the files."""
    import jax

    return jax.process_index() == 0


def process_index() -> int:
    """Return the number of this process, from 0."""
    import jax

    return jax.process_index()


def check_processes_agree(experiment: Any, source: Any) -> None:
    """Check that all processes run the same versions and the same experiment, on equal numbers of devices.

    Args:
        experiment: the experiment of this process.
        source: origin of the experiment; `None` if it was given as an object.

    Raises:
        UserError: a process differs from rank 0; all processes raise this error.
    """
    import jax

    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    from jaxscale.records.source import versions
    from jaxscale.values import to_json

    experiment_json = json.dumps(to_json(experiment), sort_keys=True, default=str)
    facts = {
        "versions": json.dumps(versions(), sort_keys=True),
        "experiment": f"SHA-256 {hashlib.sha256(experiment_json.encode()).hexdigest()[:12]}",
        "experiment file": f"SHA-256 {(source.sha256 if source is not None else None) or 'none'}"[:24],
        "devices per process": str(jax.local_device_count()),
    }
    for name, text in facts.items():
        padded_text = np.frombuffer(text.encode()[:512].ljust(512), np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(padded_text)).reshape(-1, 512)
        texts = [row.tobytes().decode(errors="replace").strip() for row in rows]
        other_ranks = [rank for rank, other_text in enumerate(texts) if other_text != texts[0]]
        if other_ranks:
            raise UserError(
                f"{name}: rank 0 has {texts[0]}, but rank {', '.join(map(str, other_ranks[:8]))} has "
                f"{texts[other_ranks[0]]}: start the same program with the same files on all hosts"
            )


def wait_for_all(label: str) -> None:
    """Wait until every process has called this function with the same label."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(label)


def send_from_first(numbers: Sequence[int]) -> list[int]:
    """Return, on every process, the numbers that the first process passes; other processes' numbers are ignored.

    Example:
        >>> send_from_first([3, 5])
        [3, 5]
    """
    import jax

    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental.multihost_utils import broadcast_one_to_all

    length = int(broadcast_one_to_all(np.int32(len(numbers))))
    local_array = np.asarray(numbers, np.int32) if is_first() else np.zeros(length, np.int32)
    return [int(number) for number in broadcast_one_to_all(local_array)] if length else []


def call_on_all(function: Callable[[], _Result], mild_error: type[Exception]) -> _Result:
    """Call a function on every process, and return this process's result once all processes have returned.

    Args:
        function: the function, which is called once on each process; it need not be collective.
        mild_error: type of errors that do not end the run.

    Raises:
        Exception: the function failed on this process, and no other process has a more severe error.
        UserError: the function failed on another process with an error that ends the run.
        mild_error: the function failed only on other processes, with mild errors.

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
    severity = 0 if error is None else 1 if isinstance(error, mild_error) else 2
    worst_severity = _max_over_processes(severity)
    if error is not None and severity == worst_severity:
        raise error
    if worst_severity == 2:
        raise UserError("another process failed and reports the reason: fix the cause, and start the run again")
    if worst_severity == 1:
        raise mild_error("reading failed on another process")
    return results[0]


def _max_over_processes(number: int) -> int:
    """Exchange numbers between all processes, and return the largest one."""
    import jax

    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))
