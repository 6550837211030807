"""The number of CPU cores that this process may use."""

import contextlib
import os
from pathlib import Path


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPU cores that this process may use, given its affinity and its container's quota.

    Args:
        quota_file: the cgroup's file with two numbers, in microseconds: the CPU time that the container may use in each
            period, and the length of a period.
    """
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota_text, period_text = quota_file.read_text().split()
        # without a quota, the file contains "max", for which `int` raises an error
        core_count = min(core_count, max(1, int(quota_text) // int(period_text)))
    return core_count
