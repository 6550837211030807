"""What the processes of a run say to one another between steps. With one process nothing is sent.

Each function is collective: every process calls it, in the same order, or the others wait.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxscale.errors import UserError

_Made = TypeVar("_Made")


def is_first() -> bool:
    """Whether this process is the one that writes; not collective."""
    import jax

    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Come back when every process has come here, all with the same words."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def of_first(numbers: Sequence[int]) -> list[int]:
    """The numbers that the first process gives, whatever those of the others are.

    Example:
        >>> of_first([3, 5])
        [3, 5]
    """
    import jax

    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental.multihost_utils import broadcast_one_to_all

    count = int(broadcast_one_to_all(np.int32(len(numbers))))
    mine = np.asarray(numbers, np.int32) if is_first() else np.zeros(count, np.int32)
    return [int(number) for number in broadcast_one_to_all(mine)] if count else []


def on_all(make: Callable[[], _Made], mild: type[Exception]) -> _Made:
    """What `make` gives here, once it has given something on every process.

    Args:
        make: is called once, and need not be collective.
        mild: errors after which the processes go on together.

    Raises:
        Exception: what `make` raised here, if it ends the run or every failure is mild.
        UserError: it failed on another process in a way that ends the run.
        mild: it failed on another process alone, mildly.

    Example:
        >>> on_all(lambda: 3, LookupError)
        3
    """
    made: list[_Made] = []
    problem: Exception | None = None
    try:
        made.append(make())
    except Exception as caught:
        problem = caught
    mine = 0 if problem is None else 1 if isinstance(problem, mild) else 2
    worst = _greatest(mine)
    if problem is not None and mine == worst:
        raise problem
    if worst == 2:
        raise UserError("another process failed, and says why: mend that, and start the run again")
    if worst == 1:
        raise mild("another process could not read it")
    return made[0]


def _greatest(mine: int) -> int:
    import jax

    if jax.process_count() == 1:
        return mine
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(mine))))
