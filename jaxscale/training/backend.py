"""What is decided before JAX starts its backend: which platform, how many virtual CPU devices, where compiled programs
are kept.

On a CPU one virtual device per core trains faster than one device with a pool of threads, and with libtpu installed but
no TPU the first use of a backend would cost seconds. What the user has set in the environment is left as it is.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxscale.platforms.detect import accelerators, hush_absent_gpus


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether a TPU or GPU shows itself to the system; no backend is started for it."""
    return bool(accelerators(devices))


def cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores that this process may use: its affinity, or a container's quota where that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = quota_file.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return count


def start_backend() -> None:
    """Choose the platform and the number of CPU devices, and switch the persistent compile cache on.

    Call it before anything asks for devices; once a backend runs, its platform and devices stay as they are.
    """
    import jax

    from jaxscale.platforms.cpu_threads import provide_threads
    from jaxscale.platforms.kept_programs import keep_ordered_programs

    hush_absent_gpus()
    config: Any = jax.config
    if not os.environ.get("JAX_PLATFORMS") and not config.jax_platforms and not has_accelerator():
        config.update("jax_platforms", "cpu")
    # -1 is JAX's own default; the environment's JAX_NUM_CPU_DEVICES shows here too
    given = config.jax_num_cpu_devices != -1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if config.jax_platforms == "cpu":
        keep_freed_memory()
    if config.jax_platforms == "cpu" and not given:
        with contextlib.suppress(RuntimeError):  # the backend runs already
            config.update("jax_num_cpu_devices", cores())
    provide_threads()
    keep_ordered_programs()
    if config.jax_compilation_cache_dir is None:
        folder = cache_folder()
        if folder is not None:
            config.update("jax_compilation_cache_dir", str(folder))
            config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cache_folder() -> Path | None:
    """Folder of compiled programs, `$JAXSCALE_CACHE/compile` or `~/.cache/jaxscale/compile`.

    Returns:
        `None`, after a line that says so, where it cannot be written to.
    """
    base = os.environ.get("JAXSCALE_CACHE")
    try:
        folder = (Path(base) if base else Path.home() / ".cache" / "jaxscale") / "compile"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(
            f"compiled programs are not kept: {error}; set JAXSCALE_CACHE to a folder that can be written to",
            file=sys.stderr,
        )
        return None
    return folder


def keep_freed_memory() -> None:
    """Have the C library keep what the CPU backend frees: its step allocates the same buffers again at once.

    By default glibc gives large buffers back to the kernel, which clears every page again at the next step: a third of
    the step's time, once a process has grown. Threads other than the first would do so whatever else is set, for they
    allocate from arenas of their own, which hold 64 MiB at most and go when they are empty: there is one arena for all
    threads that start from now on. Elsewhere than on glibc this does nothing.
    """
    import ctypes

    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 * 2**20)
