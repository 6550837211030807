"""The bytes of memory that a program may use per device. They are the default limit of a plan."""

import os

from jaxscale.compiler.gpu_target import TARGETS
from jaxscale.errors import UserError
from jaxscale.platforms.platform import Platform

POOL_SHARE = 0.75
"""Share of a GPU's memory that JAX allocates for arrays by default (JAX documentation, "GPU memory allocation")."""


def usable_bytes(platform: Platform) -> int | None:
    """Return the bytes of device memory that a program may use on one device of a platform.

    On a TPU this is the "available HBM" that libtpu reports; on a GPU, JAX's pool, by default 75 % of the memory
    (`XLA_PYTHON_CLIENT_MEM_FRACTION`); on a CPU, an equal share of main memory. For attached devices
    (`platforms/detect.py`) it is their allocator's limit.

    Raises:
        UserError: `XLA_PYTHON_CLIENT_MEM_FRACTION` is not a number above 0.

    Example:
        >>> usable_bytes(Platform.parse("tpu v5e:4x4")) / 2**30
        15.75
    """
    chip = platform.chip
    if chip.kind == "cpu":
        from jaxscale.platforms.detect import host_memory

        memory_bytes = chip.memory or host_memory()
        return None if memory_bytes is None else memory_bytes // platform.chips
    if chip.kind == "gpu" and chip.usable_memory is None and chip.memory is not None:
        # the driver reports a few per cent more than the datasheet
        memory_bytes = TARGETS[chip.name].memory_bytes if chip.name in TARGETS else chip.memory
        return int(memory_bytes * _pool_fraction())
    return platform.device_memory


def host_share(platform: Platform) -> int | None:
    """Return the bytes of host memory for each device of a platform; `None` if unknown.

    Example:
        >>> host_share(Platform.parse("tpu v5e:4x4")) / 2**30
        64.0
    """
    chip = platform.chip
    if chip.host_memory is None or chip.chips_per_host is None:
        return None
    return chip.host_memory // (chip.chips_per_host * chip.devices)


def _pool_fraction() -> float:
    """Return the share of a GPU's memory in JAX's pool: `XLA_PYTHON_CLIENT_MEM_FRACTION`, by default `POOL_SHARE`."""
    variable_name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    fraction_text = os.environ.get(variable_name) or str(POOL_SHARE)
    try:
        fraction = float(fraction_text)
    except ValueError:
        fraction = 0.0
    if not fraction > 0:
        raise UserError(
            f"{variable_name}={fraction_text!r}: expected a number above 0, such as 0.9; the default is {POOL_SHARE}"
        )
    return min(fraction, 1.0)
