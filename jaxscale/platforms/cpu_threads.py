"""Threads of XLA:CPU: enough that devices which wait for one another leave some that work.

A collective blocks its thread until every device has come, and XLA starts those that follow a loop of the program while
the loop still runs in other threads. So a device may wait in two collectives at once, or three where loops nest, and
its partner in others. There are as many threads as cores or devices, whichever are more: on 2 cores all 8 threads of 8
devices were seen to wait, and XLA ended the process after 40 seconds.

References:
    XLA, xla/backends/cpu/runtime/thunk_executor.cc: `ProcessScheduledOutEdges` lets the next collective go while a
    loop's execution is not complete; xla/pjrt/utils.cc: `DefaultThreadPoolSize` reads `NPROC`. Seen in jaxlib 0.10.2.
"""

import os
import re
from typing import Any

import jax

from jaxscale.compat import backend_runs

EACH = 3
"""Threads of a device: for the device itself, for a collective behind a loop, for one behind a loop in that loop."""
VARIABLE = "NPROC"


def provide_threads() -> str:
    """Have the CPU backend start with three threads a device, where there are several devices and fewer cores.

    What the environment has for `NPROC` stays, and so does a backend that runs.

    Returns:
        A remark where the backend runs with fewer threads already, else nothing.
    """
    runs = backend_runs()
    if os.environ.get(VARIABLE) or (runs and jax.default_backend() != "cpu"):
        return ""
    devices = len(jax.local_devices()) if runs else _devices_asked()
    # as XLA counts them, which asks for no container's quota
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if devices == 1 or EACH * devices <= cores:  # one device waits for none
        return ""
    if not runs:
        os.environ[VARIABLE] = str(EACH * devices)
        return ""
    return (
        f"; collectives of {devices} devices may wait for one another in all {max(devices, cores)} threads of XLA: "
        f"set {VARIABLE}={EACH * devices} in the environment before JAX starts"
    )


def _devices_asked() -> int:
    """CPU devices that the backend will have, as far as flags and settings specify."""
    config: Any = jax.config
    if config.jax_num_cpu_devices != -1:
        return config.jax_num_cpu_devices
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 1
