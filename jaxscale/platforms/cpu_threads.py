"""The number of threads of XLA:CPU, chosen so that enough threads remain while devices wait for one another.

A collective blocks its thread until every device has reached the collective. XLA starts the collectives after a loop
while the loop is still running in other threads. So one device may wait in two collectives at once, or with nested
loops in three, while other devices wait in other collectives. By default, the number of threads is the number of cores
or of devices, whichever is larger. On 2 cores, all 8 threads of 8 devices waited, and XLA ended the process after 40
seconds. Threads beyond the number of cores cost time, so a process that runs a known kind of program gets no more of
them than that program may need.

Of programs whose collectives are in at most n nested loops, each device waits in at most n + 1 collectives at once. The
first collective that has not run on all devices waits for a device that has not reached it, and which waits in at most
n. So (n + 1) threads per device leave one to reach it.

References:
    XLA, xla/backends/cpu/runtime/thunk_executor.cc: `ProcessScheduledOutEdges` starts the next collective while a
    loop's execution is not complete; xla/pjrt/utils.cc: `DefaultThreadPoolSize` reads `NPROC`. Seen in jaxlib 0.10.2.
"""

import os
import re
from typing import Any

import jax

from jaxscale.compat import is_backend_started
from jaxscale.errors import UserError

DEFAULT_LOOP_DEPTH = 2
"""Nested loops with collectives of the deepest programs expected: over microbatches or ticks, and over layers."""
VARIABLE = "NPROC"
"""Environment variable from which XLA:CPU takes its number of threads."""
_loop_depths = [DEFAULT_LOOP_DEPTH]


def limit_loop_depth(depth: int) -> None:
    """Declare that this process runs no program with collectives in more than `depth` nested loops.

    Call this function before the backend starts.

    Args:
        depth: number of nested loops; 0 if all collectives are outside loops.
    """
    _loop_depths[0] = min(depth, DEFAULT_LOOP_DEPTH)


def check_loop_depth(depth: int) -> None:
    """Raise UserError if a compiled program has collectives in more nested loops than were declared, on a CPU.

    Args:
        depth: number of nested loops around the innermost collective of the program.
    """
    if depth > _loop_depths[0] < DEFAULT_LOOP_DEPTH and jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        thread_count = (DEFAULT_LOOP_DEPTH + 1) * jax.local_device_count()
        raise UserError(
            f"the step has collectives in {depth} nested loops, but XLA's threads suffice for {_loop_depths[0]}: set "
            f"{VARIABLE}={thread_count} in the environment"
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
    # count cores as XLA does, which ignores a container's quota
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    thread_count = (_loop_depths[0] + 1) * device_count
    if device_count == 1 or thread_count <= core_count:  # a single device does not wait for others
        return ""
    if not is_running:
        os.environ[VARIABLE] = str(thread_count)
        return ""
    return (
        f"; collectives of {device_count} devices may wait for one another in all {max(device_count, core_count)} "
        f"threads of XLA: set {VARIABLE}={thread_count} in the environment before JAX starts"
    )


def _configured_device_count() -> int:
    """Return the number of CPU devices that the backend will have, by JAX's settings and XLA's flags."""
    config: Any = jax.config
    if config.jax_num_cpu_devices != -1:
        return config.jax_num_cpu_devices
    count_texts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(count_texts[-1]) if count_texts else 1
