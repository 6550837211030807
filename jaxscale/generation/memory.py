"""A check, before compilation, that the device has enough memory left for the caches and logits of decoding."""

import contextlib
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.trees import tree_bytes


def check_memory(generator: Any, row_count: int, slot_count: int) -> None:
    """Raise UserError if the caches and logits of `row_count` rows need more memory than a device has left.

    Args:
        generator: the model and its placement.
        row_count: number of rows that decode together.
        slot_count: number of positions of each row in the cache.
    """
    free_bytes = available_bytes(generator.devices[0])
    if free_bytes is None:
        return
    needed_bytes = row_count * row_bytes(generator, slot_count) / generator.row_shard_count
    if needed_bytes > free_bytes:
        max_row_count = int(free_bytes / max(needed_bytes / row_count, 1))
        raise UserError(
            f"samples: got {row_count} continuations at once, whose keys and values take {needed_bytes / 1e9:.3g} GB, "
            f"expected at most the {free_bytes / 1e9:.3g} GB that the device has left: draw at most {max_row_count} at "
            "once, or fewer tokens"
        )


def row_bytes(generator: Any, slot_count: int) -> int:
    """Return the bytes of a row: its cache, and its logits in float32 before and after the filters."""
    import jax

    cache = jax.eval_shape(lambda: generator.model.init_cache(1, slot_count, generator.dtype))
    return tree_bytes(cache) + 2 * 4 * generator.model.vocab


def available_bytes(device: Any, file: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that a device has left, in bytes; `None` if the platform does not report it."""
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        if "bytes_limit" not in statistics:
            return None
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None
