"""The number of XLA:CPU's threads, so that some of them still work while devices wait for one another.

A collective blocks its thread until every device has reached it, and XLA starts the collectives after a loop while the
loop still runs in other threads. So a device may wait in two collectives at once, or in three with nested loops, while
its partner waits in others. By default there are as many threads as cores or devices, whichever number is larger. On 2
cores all 8 threads of 8 devices waited, and XLA ended the process after 40 seconds.

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
"""For the device itself, for a collective after a loop, and for a collective after a loop inside that loop."""
VARIABLE = "NPROC"
"""Environment variable from which XLA:CPU takes its number of threads."""


def provide_threads() -> str:
    """Make the CPU backend start with three threads per device, if there are several devices and fewer cores.

    `NPROC` in the environment takes precedence, and a running backend is not changed.

    Returns:
        A note to append to a message if the backend already runs with fewer threads; "" if not.
    """
    is_running = is_backend_started()
    if os.environ.get(VARIABLE) or (is_running and jax.default_backend() != "cpu"):
        return ""
    # number of devices, then of cores as XLA counts them, without a container's quota
    devices = len(jax.local_devices()) if is_running else _configured_devices()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if devices == 1 or THREADS_PER_DEVICE * devices <= cores:  # a single device waits for no other
        return ""
    if not is_running:
        os.environ[VARIABLE] = str(THREADS_PER_DEVICE * devices)
        return ""
    return (
        f"; collectives of {devices} devices may wait for one another in all {max(devices, cores)} threads of XLA: "
        f"set {VARIABLE}={THREADS_PER_DEVICE * devices} in the environment before JAX starts"
    )


def _configured_devices() -> int:
    """Return the number of CPU devices that the backend will have, by JAX's settings and XLA's flags."""
    config: Any = jax.config
    if config.jax_num_cpu_devices != -1:
        return config.jax_num_cpu_devices
    count_texts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(count_texts[-1]) if count_texts else 1
