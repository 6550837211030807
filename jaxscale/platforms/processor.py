"""Assumed rates of a processor core, and the effect of its cache: arrays that exceed the cache move through the memory.

    bytes through the memory = sum over microbatches of 2 (kept - cache)+ + LOSS_PASSES (logits - cache)+

Blocks work in the cache. Updates and sums of gradients read and write more than any cache holds, at the rate of the
memory. No datasheet covers all processors, so only the order of plans counts. The rates are those of one core of an AMD
EPYC (Zen 5). Matrix products of 1,024 rows, and a multiplication with an addition of 1 to 4 MiB, were timed. The rest
was fitted to the steps of four models (`experiments/benchmarks/plan_order.py --fitted`) that the benchmark does not
judge.

Left out: caches that cores share, and devices of a process that compete for the memory.
"""

import dataclasses

from jaxscale.platforms.platform import Link, Platform

FLOP_RATE = 3.5e11
"""Peak FLOP/s of a core; matrix products reach the default efficiency, which is a share of the peak."""
CACHE_BANDWIDTH, MEMORY_BANDWIDTH = 3.5e10, 1e10
"""Bytes/s at which a core reads and writes arrays in its cache, and in its memory."""
CACHE_BYTES = 16 * 2**20
"""Bytes of the cache that are available for arrays kept between the passes of a microbatch."""
LOSS_PASSES = 5
"""Number of times that a loss reads or writes its logits and their gradients."""
SUM_BYTES = 20
"""Bytes per weight that each further microbatch moves: it reads weights and gradients, and writes gradients and sum."""
FORMAT_OPERATIONS = {"float32": 0, "fp8": 10, "int8": 12, "dynamic8": 20, "int4": 110}
"""Elementwise operations that convert an optimizer moment from a format and back; int4 has no vector instructions."""


def rated_processor(platform: Platform) -> Platform:
    """Return a platform whose CPU devices each have the assumed rates of one core; the devices share the memory.

    Example:
        >>> rated_processor(Platform.parse("cpu x 8")).chip.peak("float32")
        350000000000.0
    """
    memory_link = Link("pcie", "devices of a process", MEMORY_BANDWIDTH, "chip", "assumed")
    dtypes = ("bfloat16", "float16", "tf32", "float32", "float8", "int8")
    chip = dataclasses.replace(
        platform.chip, memory_bandwidth=CACHE_BANDWIDTH, links=(memory_link,), **dict.fromkeys(dtypes, FLOP_RATE)
    )
    return dataclasses.replace(platform, chip=chip)


def memory_seconds(kept_bytes: float, loss_bytes: float, chunk_share: float, microbatch_count: int) -> float:
    """Return the modeled seconds per step in which the memory moves activations and logits that exceed the cache.

    Args:
        kept_bytes: bytes of the activations that a microbatch keeps for its backward pass.
        loss_bytes: bytes of the logits of a microbatch, and of their gradient if both are alive at once.
        chunk_share: share of a microbatch's logits that one chunk of the loss computes at a time.
        microbatch_count: number of microbatches in a step.

    Example:
        >>> memory_seconds(2**20, 2**24, 1.0, 8)
        0.0
    """
    spilled_kept_bytes = max(0.0, kept_bytes - CACHE_BYTES)
    spilled_loss_bytes = max(0.0, chunk_share * loss_bytes - CACHE_BYTES) / chunk_share
    return microbatch_count * (2 * spilled_kept_bytes + LOSS_PASSES * spilled_loss_bytes) / MEMORY_BANDWIDTH
