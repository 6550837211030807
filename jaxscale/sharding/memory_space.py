"""The memory space of an array: device memory, or host memory that the device reads by DMA ("pinned_host").

The memory space is part of an array's type. All operands of an operation must lie in one memory space, so arrays on the
host are moved to the device explicitly. The gradient of the argument of `to_device` lies on the host, because the
transpose of a move is the move back.

The CPU backend supports these memory kinds, but has only one memory. On a CPU, offload is a rehearsal: the program
computes the same values, but moves no bytes.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractDevice, NamedSharding

from jaxscale.errors import UserError
from jaxscale.typing import Array

Tree = TypeVar("Tree")

HOST_KIND = "pinned_host"
"""Memory kind of the host memory that a device can read and write."""

HOST_BYTES_FACTOR = 2
"""Bytes of host memory for each offloaded byte: XLA may hold the old and the new copy of a buffer at the same time."""


def on_host(x: Any) -> bool:
    """Return whether an array lies in host memory. The array may be traced."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Move every leaf of a tree to device memory, with the same sharding. Call this function under `jit`.

    Example:
        >>> bool(jax.jit(lambda x: to_device(to_host(x)) + 1)(1) == 2)
        True
    """
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if on_host(leaf) else leaf, tree)


def to_host(tree: Tree) -> Tree:
    """Move every leaf of a tree to host memory, with the same sharding. Call this function under `jit`."""
    return jax.tree.map(lambda leaf: leaf if on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host), tree)


def row_major(x: Array) -> Array:
    """Return an array in row-major layout, that of host memory. XLA copies it if it chose another layout.

    Example:
        >>> bool(jax.jit(lambda x: row_major(x).sum() == x.sum())(jax.numpy.ones((2, 3))))
        True
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def in_memory_of(reference_sharding: NamedSharding, sharding: NamedSharding) -> NamedSharding:
    """Return `sharding` with host memory as its memory kind if `reference_sharding` has it, otherwise unchanged."""
    return sharding.with_memory_kind(HOST_KIND) if reference_sharding.memory_kind == HOST_KIND else sharding


def is_rehearsal(devices: Iterable[Any]) -> bool:
    """Return whether offload on these devices is only a rehearsal, because all of them are CPUs."""
    return all(device.platform == "cpu" for device in devices)


def check_host_memory(devices: Iterable[Any], option: str) -> None:
    """Raise UserError if a device has no host memory, which an option needs.

    Args:
        devices: devices of the mesh.
        option: the option that needs host memory, as the user wrote it.

    Raises:
        UserError: a device has no memory of the kind `pinned_host`, or JAX cannot list the memories of any device.
    """
    # an `AbstractDevice` lists no memories; the TPUs and GPUs that it describes have host memory
    attached_devices = [device for device in devices if not isinstance(device, AbstractDevice)]
    memory_kinds_by_device = [[memory.kind for memory in device.addressable_memories()] for device in attached_devices]
    if attached_devices and not any(memory_kinds_by_device):
        raise UserError(
            f"{option}: {attached_devices[0].device_kind} is described, not attached, and JAX lists no memories of it, "
            "so a part of the step cannot be compiled alone; use fit --verify, which compiles the whole step, or keep "
            "the values on the device"
        )
    for device, memory_kinds in zip(attached_devices, memory_kinds_by_device, strict=True):
        if memory_kinds and HOST_KIND not in memory_kinds:  # devices of other processes list no memories
            raise UserError(
                f"{option}: {device.device_kind} ({device.platform}) has no memory of kind {HOST_KIND} "
                f"(it has {', '.join(memory_kinds)}), so nothing can be put on the host; keep the values on the device"
            )
