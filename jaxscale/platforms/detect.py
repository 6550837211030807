"""The Platform that this process runs on, from JAX's devices.

An unknown chip is no error. It becomes a Chip without a peak, and a run on it reports no `mfu`.
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
"""Device files under /dev: of TPUs, and of GPUs of NVIDIA, of AMD and in WSL."""


def detect(devices: Sequence[Any] | None = None) -> Platform:
    """The platform of `devices`.

    Args:
        devices: JAX devices; by default those of all processes of the run.

    Returns:
        The platform. Its chip comes from the tables, with the memory that the backend grants; a chip that is in no
        table has unknown facts. A TPU slice's topology comes from the chips' coordinates.
    """
    import jax

    devices = list(jax.devices() if devices is None else devices)
    chip = chip_of(devices[0].device_kind, devices[0].platform)
    chip = dataclasses.replace(chip, **_measured_facts(chip, devices))
    if chip.kind != "tpu":
        return Platform(chip, len(devices))
    coordinates = {(getattr(device, "slice_index", 0) or 0, *device.coords) for device in devices}
    slices = len({coordinate[0] for coordinate in coordinates})
    first_slice = min(coordinates)[0]
    positions = [position for slice_index, *position in coordinates if slice_index == first_slice]
    sides = tuple(max(axis) - min(axis) + 1 for axis in zip(*positions, strict=True))
    plane_sides = sides[:2] if sides[2:] == (1,) and chip.name in ("v5e", "v6e") else sides
    # the chips of a process may form a part of a slice that is no box
    topology = plane_sides if math.prod(plane_sides) == len(positions) else None
    chip = dataclasses.replace(chip, devices=max(1, len(devices) // len(coordinates)))
    return Platform(chip, len(positions), topology, slices)


def chip_of(device_kind: str, platform: str) -> Chip:
    """The chip of a device kind as printed by JAX; a chip that is in no table has no facts.

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
    """The kinds of accelerators ("tpu", "gpu") with device files in the system; no backend is started."""
    return frozenset(
        kind for kind, patterns in DEVICE_FILES.items() if any(next(folder.glob(pattern), None) for pattern in patterns)
    )


def hush_absent_gpus() -> None:
    """Without a GPU, silence JAX's log about the CUDA plugin, which may be installed to compile ahead of time.

    JAX starts every installed plugin, and logs a traceback because this one finds no drivers.
    """
    if "gpu" not in accelerators():
        logging.getLogger("jax._src.xla_bridge").addFilter(_not_about_cuda_plugin)


def _not_about_cuda_plugin(record: logging.LogRecord) -> bool:
    """Whether a log record is kept: it does not report that the CUDA plugin finds no drivers."""
    return not ("plugin configuration error" in record.getMessage() and "xla_cuda" in record.getMessage())


def host_memory() -> int | None:
    """Bytes of main memory, or the limit of the control group; None if the system does not report it."""
    try:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit_text = file.read().strip()
    except OSError:
        return total_bytes
    return min(total_bytes, int(limit_text)) if limit_text.isdigit() else total_bytes


def _measured_facts(chip: Chip, devices: Sequence[Any]) -> dict[str, Any]:
    """Fields of the chip that are measured on this machine: memory of device and host, and chips of one host."""
    local_devices = [device for device in devices if device.process_index == devices[0].process_index]
    facts: dict[str, Any] = {"host_memory": host_memory()}
    if chip.kind == "cpu":
        return facts | {"memory": host_memory(), "chips_per_host": len(local_devices)}
    limit_bytes = None
    # devices of another process, and described ones, have no statistics; the error depends on the backend
    with contextlib.suppress(Exception):
        limit_bytes = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit_bytes:
        facts["usable_memory"] = limit_bytes * chip.devices
        facts["memory"] = chip.memory or facts["usable_memory"]
    return facts | {"chips_per_host": max(1, len(local_devices) // chip.devices)}
