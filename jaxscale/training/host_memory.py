"""Check that a host with CPU devices has enough memory for the train state, before the state is created.

A state that is larger than the memory ends the process without a message, or makes the machine swap for hours. On other
platforms, the compiled program reports the memory that it needs, and a device refuses an allocation that is too large.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxscale.errors import UserError
from jaxscale.platforms.detect import host_memory
from jaxscale.values.units import size

_WARNING_SHARE = 0.7  # gradients and activations need memory, too


def state_bytes(step: Any) -> int:
    """Return the bytes of the train state that this process holds: parameters, optimizer state and all other arrays.

    Args:
        step: the train step.
    """
    import jax

    abstract_state = step.layout.abstract
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)
        for leaf in jax.tree.leaves(abstract_state)
    )


def check_host_holds(needed_bytes: int, say: Callable[[str], None], available_bytes: int | None = None) -> None:
    """Check that the host has enough memory for the train state.

    Args:
        needed_bytes: bytes of the part of the state that this process holds.
        say: function that is called with a warning if the state takes more than 70 % of the memory.
        available_bytes: memory of the host or of its control group; `None` reads it from the system.

    Raises:
        UserError: the state is larger than the memory.

    Example:
        >>> check_host_holds(3 * 2**40, print, available_bytes=2**34)
        Traceback (most recent call last):
        jaxscale.errors.UserError: parameters and optimizer state take 3.00 TiB, but this host's processes may use \
16.0 GiB: use a smaller model, --plan.state.moments int8, or more hosts
    """
    limit_bytes = host_memory() if available_bytes is None else available_bytes
    if limit_bytes is None:
        return
    need_text = f"parameters and optimizer state take {size(needed_bytes)}"
    if needed_bytes > limit_bytes:
        raise UserError(
            f"{need_text}, but this host's processes may use {size(limit_bytes)}: use a smaller model, "
            "--plan.state.moments int8, or more hosts"
        )
    if needed_bytes > _WARNING_SHARE * limit_bytes:
        say(f"warning: {need_text} of the {size(limit_bytes)} that this host's processes may use; a step needs more")
