"""Settings made before JAX starts its backend: platform, number of virtual CPU devices, and compile cache.

On a CPU, one virtual device per core trains faster than one device with a pool of threads. Without an accelerator the
platform is set to the CPU, because an installed libtpu would delay the first use of a backend by seconds. Settings that
the user's environment already makes are left unchanged.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxscale.platforms.cores import usable_cores
from jaxscale.platforms.detect import accelerators, hush_absent_gpus
from jaxscale.platforms.join import join, place_of

SLOW_COLLECTIVE_SECONDS = 3600
"""Seconds in one collective after which XLA:CPU aborts a watched process; XLA's own default is 40."""
_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"


def start_backend(*, is_watched: bool = False) -> None:
    """Choose the platform and the number of CPU devices, join the run's processes, and turn on the compile cache.

    Call this function before any device is used: once a backend is running, its platform and devices are fixed.

    Args:
        is_watched: whether `training/stuck.py` ends the process if a collective is stuck, so XLA need not end it.

    Raises:
        UserError: the environment describes several processes that could not join.
    """
    import jax

    from jaxscale.compiler.kept_programs import keep_ordered_programs
    from jaxscale.platforms.cpu_memory import keep_freed_memory
    from jaxscale.platforms.cpu_threads import provide_threads

    hush_absent_gpus()
    process_place = place_of(os.environ)
    local_process_count = 1 if process_place is None else process_place.local_processes
    config: Any = jax.config
    if not os.environ.get("JAX_PLATFORMS") and not config.jax_platforms and not accelerators():
        config.update("jax_platforms", "cpu")
    # -1 is JAX's own default; JAX also sets this value from the environment's JAX_NUM_CPU_DEVICES
    has_device_count = config.jax_num_cpu_devices != -1 or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    keep_freed_memory()
    if config.jax_platforms == "cpu" and is_watched:
        allow_slow_collectives()
    if config.jax_platforms == "cpu" and not has_device_count:
        with contextlib.suppress(RuntimeError):  # raised if the backend is already running
            config.update("jax_num_cpu_devices", max(1, usable_cores() // local_process_count))
    provide_threads()
    join()
    keep_ordered_programs()
    if config.jax_compilation_cache_dir is None:
        cache_dir = make_cache_folder()
        if cache_dir is not None:
            config.update("jax_compilation_cache_dir", str(cache_dir))
            config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def make_cache_folder() -> Path | None:
    """Create the directory for compiled programs, `$JAXSCALE_CACHE/compile` or `~/.cache/jaxscale/compile`.

    Returns:
        The directory; `None`, after a message on stderr, if files cannot be written there.
    """
    cache_root = os.environ.get("JAXSCALE_CACHE")
    try:
        cache_dir = (Path(cache_root) if cache_root else Path.home() / ".cache" / "jaxscale") / "compile"
        cache_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_dir).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        print(
            f"compiled programs are not kept ({error}): set JAXSCALE_CACHE to a writable directory",
            file=sys.stderr,
        )
        return None
    return cache_dir


def allow_slow_collectives() -> None:
    """Make XLA:CPU wait for an hour in a collective, such as one of a slow first step, before it aborts the process.

    XLA still warns after 20 seconds. A limit that the environment sets is kept. A running backend keeps its limit, too.
    """
    from jaxscale.compat import has_collective_timeout, is_backend_started

    flags = os.environ.get("XLA_FLAGS", "")
    if has_collective_timeout() and not is_backend_started() and _TIMEOUT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_TIMEOUT_FLAG}={SLOW_COLLECTIVE_SECONDS}".lstrip()
