"""The number of XLA:CPU's threads: enough that some of them work while devices wait for one another.

A collective blocks its thread until every device has reached it, and XLA starts the collectives after a loop while the
loop still runs in other threads. So a device may wait in two collectives at once, or three with nested loops, and its
partner in others. By default there are as many threads as cores or devices, whichever number is larger: on 2 cores all
8 threads of 8 devices waited, and XLA ended the process after 40 seconds.

References:
    XLA, xla/backends/cpu/runtime/thunk_executor.cc: `ProcessScheduledOutEdges` starts the next collective while a
    loop's execution is not complete; xla/pjrt/utils.cc: `DefaultThreadPoolSize` reads `NPROC`. Seen in jaxlib 0.10.2.
"""

import os
import re
from typing import Any

import jax

from jaxscale.compat import backend_runs

EACH = 3
"""Threads of a device: for the device itself, for a collective after a loop, for one after a loop in that loop."""
VARIABLE = "NPROC"
"""Environment variable from which XLA:CPU takes its number of threads."""


def provide_threads() -> str:
    """Make the CPU backend start with three threads per device, if there are several devices and fewer cores.

    `NPROC` in the environment takes precedence, and a running backend is not changed.

    Returns:
        A note if the backend already runs with fewer threads, otherwise "".
    """
    is_running = backend_runs()
    if os.environ.get(VARIABLE) or (is_running and jax.default_backend() != "cpu"):
        return ""
    devices = len(jax.local_devices()) if is_running else _configured_devices()
    # as XLA counts them, without a container's quota
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if devices == 1 or EACH * devices <= cores:  # a single device waits for no other
        return ""
    if not is_running:
        os.environ[VARIABLE] = str(EACH * devices)
        return ""
    return (
        f"; collectives of {devices} devices may wait for one another in all {max(devices, cores)} threads of XLA: "
        f"set {VARIABLE}={EACH * devices} in the environment before JAX starts"
    )


def _configured_devices() -> int:
    """CPU devices that the backend will have, as far as flags and settings specify."""
    config: Any = jax.config
    if config.jax_num_cpu_devices != -1:
        return config.jax_num_cpu_devices
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 1
