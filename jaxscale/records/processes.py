"""Messages between the processes of a run, outside of steps. A run with a single process sends none.

Each function except `is_first` is collective: all processes must call these functions in the same order, or some of
them wait forever.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxscale.errors import UserError

_Result = TypeVar("_Result")


def is_first() -> bool:
    """Return whether this is the first process, which writes the files."""
    import jax

    return jax.process_index() == 0


def wait_for_all(label: str) -> None:
    """Wait until every process has called this function with the same label."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(label)


def send_from_first(numbers: Sequence[int]) -> list[int]:
    """Return the numbers that the first process passes, on every process; the numbers of the others are ignored.

    Example:
        >>> send_from_first([3, 5])
        [3, 5]
    """
    import jax

    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental.multihost_utils import broadcast_one_to_all

    number_count = int(broadcast_one_to_all(np.int32(len(numbers))))
    array = np.asarray(numbers, np.int32) if is_first() else np.zeros(number_count, np.int32)
    return [int(number) for number in broadcast_one_to_all(array)] if number_count else []


def call_on_all(make: Callable[[], _Result], mild_error: type[Exception]) -> _Result:
    """Call a function on every process, and return its result on this process once it has returned on all of them.

    Args:
        make: the function, which is called once on each process; it need not be collective.
        mild_error: type of errors that do not end the run.

    Raises:
        Exception: the error of `make` on this process, if it ends the run or all processes' errors are mild.
        UserError: `make` failed on another process with an error that ends the run.
        mild_error: `make` failed on another process only, with a mild error.

    Example:
        >>> call_on_all(lambda: 3, LookupError)
        3
    """
    results: list[_Result] = []
    error: Exception | None = None
    try:
        results.append(make())
    except Exception as caught_error:
        error = caught_error
    # 0 without an error, 1 for a mild one, 2 for one that ends the run
    severity = 0 if error is None else 1 if isinstance(error, mild_error) else 2
    worst_severity = _greatest(severity)
    if error is not None and severity == worst_severity:
        raise error
    if worst_severity == 2:
        raise UserError("another process failed and reports the reason: fix that, and start the run again")
    if worst_severity == 1:
        raise mild_error("reading failed on another process")
    return results[0]


def _greatest(number: int) -> int:
    """Exchange numbers between all processes, and return the greatest one."""
    import jax

    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))
