"""Keep the memory that the CPU backend frees in the process, because the next step allocates the same buffers again.

By default, glibc returns large buffers to the kernel, which must clear every page again in the next step. The 8 layers
of `small_vocab` in `experiments/benchmarks/plan_order.py` had 51,000 page faults per step, 30 % of its processor time.
Threads other than the first one have arenas (glibc's memory pools) of their own, which are returned when they are empty
and cannot hold buffers of more than 64 MiB. Therefore, all threads that start after the call share one arena.

References:
    mallopt(3), Linux manual page; glibc, malloc/malloc.c: `sysmalloc` maps what no heap of an arena can hold.
"""

import ctypes
import os
from typing import Any

import jax

from jaxscale.compat import is_backend_started
from jaxscale.platforms.detect import accelerators

_VARIABLES = (
    "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip


def keep_freed_memory() -> None:
    """If the process computes on a CPU, make the C library keep the memory that the process frees.

    If the backend is already running, its threads keep arenas of their own, and return most buffers. This function does
    nothing without glibc, or if the environment configures glibc's allocator (`MALLOC_TRIM_THRESHOLD_` and others).
    """
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if not _computes_on_cpu():
        return
    # option numbers in malloc.h
    trim_threshold_option, top_pad_option, mmap_max_option, arena_max_option = -1, -2, -4, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(arena_max_option, 1)
    mallopt(mmap_max_option, 0)
    mallopt(trim_threshold_option, 2**31 - 1)
    mallopt(top_pad_option, 256 * 2**20)


def _computes_on_cpu() -> bool:
    """Return whether JAX's default backend is the CPU, or will be."""
    if is_backend_started():
        return jax.default_backend() == "cpu"
    config: Any = jax.config
    platforms = config.jax_platforms
    first_platform = (platforms or "").partition(",")[0]
    return first_platform == "cpu" or (not first_platform and not accelerators())
