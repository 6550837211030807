"""A filter of JAX's persistent compile cache: on a CPU, programs with collectives in a loop or a branch are not cached.

XLA:CPU starts an instruction as soon as its operands are available, and a collective blocks a thread until every device
has reached it. Collectives must therefore run in one order on all devices. In a freshly compiled program, all
collectives, and all loops that contain one, use one resource, which makes them start in that order (a loop need not
have ended: `platforms/cpu_threads.py`). A program loaded from the cache has one resource for each sequence of
instructions, so the collectives in a loop are not ordered with those outside it. Two such collectives can each block
threads that the other collective needs; the program then hangs. If both use one channel, as all collectives of
`jax.shard_map` do, some devices join one collective and some the other, and the program crashes. If all collectives are
in the entry computation, they share one sequence and stay in order.

References:
    XLA, xla/backends/cpu/runtime/thunk_proto_serdes.cc: `ThunkSequenceSerDesProtobuf::FromProto` creates new resources
    for each nested sequence; thunk_executor.cc: the order of execution. Observed in jaxlib 0.10.2 and 0.12.0.
"""

import functools
import re
from typing import Any

import jax

from jaxscale.compat import filter_compile_cache, write_cached_programs_whole

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    r"|send|recv)(-start)?\("
)
_excluded_names: list[str] = []
"""Names of the compiled programs that the cache does not keep."""


def is_ordered(text: str) -> bool:
    """Return whether every collective of a compiled program is in its entry computation.

    Args:
        text: `compiled.as_text()`.

    Example:
        >>> loop = "%body (x: f32[]) -> f32[] {\\n  ROOT %y = f32[] all-reduce(%x), to_apply=%add\\n}"
        >>> is_ordered(loop), is_ordered(loop.replace("%body", "ENTRY %main"))
        (False, True)
    """
    is_in_entry = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            is_in_entry = line.startswith("ENTRY")
        elif not is_in_entry and _COLLECTIVE.search(line):
            return False
    return True


@functools.cache
def keep_ordered_programs() -> None:
    """Make JAX's persistent compile cache neither write nor load a program that would lose its collectives' order.

    The filter applies to all later compilations of the process, in any cache folder; a second call has no effect.
    Programs of one device, and those of TPUs and GPUs, are cached as usual. A program is written whole or not at all,
    so a process that is killed meanwhile leaves no incomplete program in the cache.
    """
    filter_compile_cache(_may_be_kept)
    write_cached_programs_whole()


def count_excluded() -> int:
    """Return the number of programs compiled so far that were excluded from the cache."""
    return len(_excluded_names)


def _may_be_kept(name: str, executable: Any) -> bool:
    """Return whether a program may be cached; if it may not and was just compiled (`name` is not ""), count it."""
    if executable.client.platform != "cpu" or (jax.process_count() == 1 and len(executable.local_devices()) == 1):
        return True
    if all(is_ordered(module.to_string()) for module in executable.hlo_modules()):
        return True
    config: Any = jax.config
    if name and config.jax_compilation_cache_dir is not None:
        _excluded_names.append(name)
    return False
