"""Which programs JAX's persistent compile cache may keep: on a CPU none with collectives in a loop or a branch.

XLA:CPU starts an instruction as soon as its operands are there, and lets a collective block a thread until every device
has come. Collectives must therefore run in one order on all devices. In a program that was compiled, all of them, and
every loop that holds one, use one resource, which has them start in that order (a loop need not have ended:
`cpu_threads.py`). A program that is loaded has one resource for each sequence of instructions: nothing orders a loop's
collectives with those outside it any more. They hold the threads that each other's partners need, and the program
hangs; and where both have one channel, as all collectives of `jax.shard_map` have, a device meets the wrong collective,
which ends in a crash. Collectives of the entry computation alone share one sequence, and stay in order.

References:
    XLA, xla/backends/cpu/runtime/thunk_proto_serdes.cc: `ThunkSequenceSerDesProtobuf::FromProto` makes the resources
    anew for each nested sequence; thunk_executor.cc: what runs when. Seen in jaxlib 0.10.2 and 0.12.0.
"""

import re
from typing import Any

import jax

from jaxscale.compat import filter_compile_cache

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    r"|send|recv)(-start)?\("
)
_filtered = False
_left_out: list[str] = []


def stays_ordered(text: str) -> bool:
    """Whether every collective of a compiled program is in its entry computation.

    Args:
        text: `compiled.as_text()`.

    Example:
        >>> loop = "%body (x: f32[]) -> f32[] {\\n  ROOT %y = f32[] all-reduce(%x), to_apply=%add\\n}"
        >>> stays_ordered(loop), stays_ordered(loop.replace("%body", "ENTRY %main"))
        (False, True)
    """
    entry = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        elif not entry and _COLLECTIVE.search(line):
            return False
    return True


def keep_ordered_programs() -> None:
    """Have JAX's persistent compile cache neither keep nor load a program that would lose its collectives' order.

    It holds for all that the process compiles from now on, whoever chose the cache's folder; calls after the first do
    nothing. Programs of one device, and those of TPUs and GPUs, are kept as before.
    """
    global _filtered
    if not _filtered:
        _filtered = True
        filter_compile_cache(_may_be_kept)


def left_out() -> int:
    """How many programs have been compiled so far that the cache would have kept, and did not."""
    return len(_left_out)


def _may_be_kept(name: str, executable: Any) -> bool:
    """Whether a program can be loaded; those that were just compiled and cannot are counted."""
    if executable.client.platform != "cpu" or (jax.process_count() == 1 and len(executable.local_devices()) == 1):
        return True
    if all(stays_ordered(module.to_string()) for module in executable.hlo_modules()):
        return True
    config: Any = jax.config
    if name and config.jax_compilation_cache_dir is not None:
        _left_out.append(name)
    return False
