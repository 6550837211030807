"""The number of threads of XLA:CPU, chosen so that enough threads remain while devices wait for one another.

A collective blocks its thread until every device has reached the collective. XLA starts the collectives after a loop
while the loop is still running in other threads. So one device may wait in two collectives at once, or with nested
loops in three, while other devices wait in other collectives. By default, the number of threads is the number of cores
or of devices, whichever is larger. On 2 cores, all 8 threads of 8 devices waited, and XLA ended the process after 40
seconds.

References:
    XLA, xla/backends/cpu/runtime/thunk_executor.cc: `ProcessScheduledOutEdges` starts the next collective while a
    loop's execution is not complete; xla/pjrt/utils.cc: `DefaultThreadPoolSize` reads `NPROC`. Seen in jaxlib 0.10.2.
"""

import os
import re
from typing import Any

import jax

from jaxscale.compat import is_backend_started

THREADS_PER_DEVICE = 3
"""One thread for the program, one for a collective after a loop, and one for a collective after a nested loop."""
VARIABLE = "NPROC"
"""Environment variable from which XLA:CPU takes its number of threads."""


def provide_threads() -> str:
    """If there are several devices and too few cores, make the CPU backend start with three threads per device.

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
    thread_count = THREADS_PER_DEVICE * device_count
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
