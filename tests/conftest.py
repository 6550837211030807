"""Strict everywhere: 8 virtual CPU devices, annotations checked at run time, warnings and rank promotion are errors."""

import gc
import os
import shutil
import signal
from pathlib import Path

import hypothesis
import pytest
from quick import FLAGS, share_contexts

# the runs that tests train are trusted by records (`records/trusted_sources.py`) outside of the user's own cache
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".jax_cache" / "user")
if "PYTEST_XDIST_WORKER" not in os.environ:
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"], "jaxscale", "trusted"), ignore_errors=True)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "24"  # threads of the backend, as `platforms/cpu_threads.py` provides them; here it starts before
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # XLA:CPU aborts on bf16 reductions in partial-manual shard_map without this
        "--xla_disable_hlo_passes=all-reduce-promotion",
        FLAGS,
    ]
)

import jaxtyping
from typecheck import check_dims_where_given

jaxtyping.jaxtyped = check_dims_where_given
_hook = jaxtyping.install_import_hook(["jaxscale", "pallas_kernels"], "typecheck.check")

import jax  # noqa: E402 (after the environment and the hook above, which it reads)

jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.__version_info__ < (0, 12):
    share_contexts()
# the lines of code that instructions come from cost a twentieth of the suite; tests that read them turn them on
jax.config.update("jax_traceback_in_locations_limit", 0)
# `nohup make test` ignores a hangup, and with it each process that a test starts
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Compiled programs are kept from run to run, in a folder per version; those that must not be loaded are not kept
# (`compiler/kept_programs.py`). JAX's own limit of a cache's size reads every entry at each write, so the folder is
# emptied here when it has grown.
from jaxscale.compiler.kept_programs import keep_ordered_programs  # noqa: E402

PROGRAMS = Path(__file__).parents[1] / ".jax_cache" / jax.__version__
MOST_PROGRAM_BYTES = 1 << 30
if "PYTEST_XDIST_WORKER" not in os.environ and PROGRAMS.is_dir():
    bytes_kept = sum(entry.stat().st_size for entry in os.scandir(PROGRAMS))
    if bytes_kept > MOST_PROGRAM_BYTES:
        shutil.rmtree(PROGRAMS)
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # reading one takes a fifth of it
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
keep_ordered_programs()

pytest_plugins = ["toy"]

# what JAX traces and keeps is hardly ever garbage: looking for it is a tenth of the suite's time
gc.freeze()
gc.set_threshold(200_000, 20, 100)

# compiling takes as long as it takes, and a machine may be busy
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

PROCESS_TESTS = ("tests/launch/", "tests/platforms/", "tests/training/test_kill", "tests/training/test_st")
"""Tests that start processes and wait for them. They come first: at the end, other workers would wait for one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(PROCESS_TESTS))


MOST_MAPS = 20_000
"""Number of memory maps of this process above which compiled programs are freed; Linux allows about 65,000.

Each compiled program of the CPU has several. A worker that reaches the limit fails in every test, and aborts.
"""
MOST_GROWTH_BYTES = 4 << 30
"""Bytes of memory by which this process may grow before compiled programs are freed."""


def count_maps() -> int:
    """Return the number of memory maps of this process; 0 where the system does not list them."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not show them."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Free the compiled programs of tests that have ended, once there are many; until then, collections pass over them.

    A collection that looks at what a long session has left takes seconds.
    """
    gc.freeze()
    yield
    if (
        count_maps() > MOST_MAPS
        or resident_bytes() > min(_bytes_after_freeing[-1], MOST_GROWTH_BYTES // 2) + MOST_GROWTH_BYTES
    ):
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        _bytes_after_freeing.append(resident_bytes())


_bytes_after_freeing = [0]
