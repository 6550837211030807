"""The number of threads of XLA:CPU, chosen so that enough threads remain while devices wait for one another.

A collective blocks its thread until every device has reached the collective. XLA starts the collectives after a loop
while the loop is still running in other threads. So one device may wait in two collectives at once, or with nested
loops in three, while other devices wait in other collectives. By default, the number of threads is the number of cores
or of devices, whichever is larger. On 2 cores, all 8 threads of 8 devices waited, and XLA ended the process after 40
seconds. Threads beyond the number of cores cost time, so a process that runs a known kind of program gets no more of
them than that program may need.

If the collectives of a program are in at most n nested loops, and loops side by side depend on one another, as those
over the blocks of a model do, each device waits in at most n + 1 collectives at once. A device that has not reached the
first of these collectives waits in at most n. So n + 1 threads per device leave one with which it reaches it.

References:
    XLA, xla/backends/cpu/runtime/thunk_executor.cc: `ProcessScheduledOutEdges` starts the next collective while a
    loop's execution is not complete; xla/pjrt/utils.cc: `DefaultThreadPoolSize` reads `NPROC`. Seen in jaxlib 0.10.2.
"""

import os
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax

from jaxscale.compat import is_backend_started
from jaxscale.errors import UserError

DEFAULT_LOOP_DEPTH = 2
"""Nested loops with collectives of the deepest programs expected: over microbatches or ticks, and over layers."""
VARIABLE = "NPROC"
"""Environment variable from which XLA:CPU takes its number of threads."""
_loop_depth: ContextVar[int] = ContextVar("loop_depth", default=DEFAULT_LOOP_DEPTH)


def limit_loop_depth(depth: int) -> None:
    """Declare that this process runs no program with collectives in more than `depth` nested loops.

    Call this function before the backend starts.

    Args:
        depth: number of nested loops; 0 if all collectives are outside loops.
    """
    _loop_depth.set(min(depth, DEFAULT_LOOP_DEPTH))


def check_loop_depth(depth_of_program: Callable[[], int]) -> None:
    """Raise UserError if a program has collectives in more nested loops than were declared, and too few threads for it.

    Args:
        depth_of_program: function that returns the number of nested loops around the innermost collective. It is
            called only on a CPU with several devices, and after `limit_loop_depth`.
    """
    device_count = jax.local_device_count()
    if _loop_depth.get() == DEFAULT_LOOP_DEPTH or jax.default_backend() != "cpu" or device_count == 1:
        return
    depth, thread_count = depth_of_program(), int(os.environ.get(VARIABLE) or max(device_count, _core_count()))
    needed_count = (depth + 1) * device_count
    if depth > _loop_depth.get() and thread_count < needed_count:
        raise UserError(
            f"the step has collectives in {depth} nested loops, for which {device_count} devices need {needed_count} "
            f"threads of XLA, but there are {thread_count}: set {VARIABLE}={needed_count} in the environment"
        )


def provide_threads() -> str:
    """If there are several devices and too few cores, make the CPU backend start with enough threads for all devices.

    These are three per device, or fewer if `limit_loop_depth` was called.

    `NPROC` in the environment takes precedence. A backend that is already running is not changed.

    Returns:
        A note to append to error messages, if the backend is already running with fewer threads; otherwise "".
    """
    is_running = is_backend_started()
    if os.environ.get(VARIABLE) or (is_running and jax.default_backend() != "cpu"):
        return ""
    device_count = len(jax.local_devices()) if is_running else _configured_device_count()
    thread_count = (_loop_depth.get() + 1) * device_count
    if device_count == 1 or thread_count <= _core_count():  # a single device does not wait for others
        return ""
    if not is_running:
        os.environ[VARIABLE] = str(thread_count)
        return ""
    return (
        f"; collectives of {device_count} devices may wait for one another in all {max(device_count, _core_count())} "
        f"threads of XLA: set {VARIABLE}={thread_count} in the environment before JAX starts"
    )


def _core_count() -> int:
    """Return the number of cores as XLA counts them, which ignores a container's quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _configured_device_count() -> int:
    """Return the number of CPU devices that the backend will have, by JAX's settings and XLA's flags."""
    config: Any = jax.config
    if config.jax_num_cpu_devices != -1:
        return config.jax_num_cpu_devices
    count_texts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(count_texts[-1]) if count_texts else 1
