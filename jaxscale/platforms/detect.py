"""The Platform that this process runs on, from JAX's devices.

An unknown chip is not an error. It becomes a Chip without a peak, and a run on it reports no `mfu`.
"""

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxscale.platforms.platform import Chip, Platform, chips

DEVICE_FILES = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia[0-9]*", "kfd", "dxg")}
"""Patterns of the device files under /dev: those of TPUs, and those of GPUs (by NVIDIA, by AMD, and in WSL)."""


def detect(devices: Sequence[Any] | None = None) -> Platform:
    """Return the platform of these devices.

    Args:
        devices: JAX devices; by default those of all processes of the run.

    Returns:
        The platform. Its chip is taken from the tables, with the memory size that the backend reports. A chip that is
        in no table has no rates. The topology of a TPU slice is derived from the chips' coordinates.
    """
    import jax

    devices = list(jax.devices() if devices is None else devices)
    chip = chip_of(devices[0].device_kind, devices[0].platform)
    chip = dataclasses.replace(chip, **_measured_fields(chip, devices))
    if chip.kind != "tpu":
        return Platform(chip, len(devices))
    coordinates = {(getattr(device, "slice_index", 0) or 0, *device.coords) for device in devices}
    slice_count = len({coordinate[0] for coordinate in coordinates})
    first_slice = min(coordinates)[0]
    positions = [position for slice_index, *position in coordinates if slice_index == first_slice]
    box_sides = tuple(max(axis_positions) - min(axis_positions) + 1 for axis_positions in zip(*positions, strict=True))
    plane_sides = box_sides[:2] if box_sides[2:] == (1,) and chip.name in ("v5e", "v6e") else box_sides
    # the chips of a process may be only a part of a slice, and that part may not be a box
    topology = plane_sides if math.prod(plane_sides) == len(positions) else None
    chip = dataclasses.replace(chip, devices=max(1, len(devices) // len(coordinates)))
    return Platform(chip, len(positions), topology, slice_count)


def chip_of(device_kind: str, platform: str) -> Chip:
    """Return the chip for a device kind that JAX reports. A chip that is in no table has no rates and no memory size.

    Args:
        device_kind: `jax.Device.device_kind`.
        platform: `jax.Device.platform`: "tpu", "gpu" (or "cuda", "rocm") or "cpu".

    Example:
        >>> chip_of("TPU v5 lite", "tpu").name
        'v5e'
        >>> chip_of("NVIDIA GeForce RTX 4090", "gpu").peak("bfloat16") is None
        True
    """
    for chip in chips().values():
        if device_kind in chip.device_kinds:
            return chip
    kind = platform if platform in ("tpu", "cpu") else "gpu"
    return Chip(device_kind, kind, (device_kind,), (f"unknown to jaxscale: JAX reports {device_kind!r}",))


def accelerators(folder: pathlib.Path = pathlib.Path("/dev")) -> frozenset[str]:
    """Return the kinds of accelerators ("tpu", "gpu") that have device files. This does not start a backend."""
    return frozenset(
        kind for kind, patterns in DEVICE_FILES.items() if any(next(folder.glob(pattern), None) for pattern in patterns)
    )


def hush_absent_gpus() -> None:
    """If there is no GPU, suppress JAX's log message about the CUDA plugin.

    The plugin may be installed only to compile for GPUs. But JAX starts every installed plugin, and logs a traceback if
    the CUDA plugin finds no drivers.
    """
    if "gpu" not in accelerators():
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_worth_logging)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for the log record about the CUDA plugin without drivers, and True for all other records."""
    message = record.getMessage()
    return not ("plugin configuration error" in message and "xla_cuda" in message)


def host_memory() -> int | None:
    """Return the bytes of main memory, or the control group's limit if that is lower; None if unknown."""
    try:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit_text = file.read().strip()
    except OSError:
        return total_bytes
    return min(total_bytes, int(limit_text)) if limit_text.isascii() and limit_text.isdecimal() else total_bytes


def _measured_fields(chip: Chip, devices: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of the chip that are measured on this machine, by name: memory sizes and chips per host."""
    first_process_devices = [device for device in devices if device.process_index == devices[0].process_index]
    value_by_field: dict[str, Any] = {"host_memory": host_memory()}
    if chip.kind == "cpu":
        return value_by_field | {"memory": host_memory(), "chips_per_host": len(first_process_devices)}
    limit_bytes = None
    # devices of other processes, and devices without hardware, have no statistics; the error depends on the backend
    with contextlib.suppress(Exception):
        limit_bytes = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit_bytes:
        value_by_field["usable_memory"] = limit_bytes * chip.devices
        value_by_field["memory"] = chip.memory or value_by_field["usable_memory"]
    return value_by_field | {"chips_per_host": max(1, len(first_process_devices) // chip.devices)}
