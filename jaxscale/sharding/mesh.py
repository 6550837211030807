"""MeshSpec: the number of devices along each axis of parallelism.

A `MeshSpec` is a value with a text form; only its method `build` needs devices.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.tpu_slices import slices_per_axis
from jaxscale.values import check_types
from jaxscale.values.drawn import drawn
from jaxscale.values.limits import MAX_AXIS_DEVICES, check_at_most
from jaxscale.values.read_files import whole_number

AXES = ("replica", "data", "pipe", "fsdp", "expert", "sequence", "tensor")
"""Mesh axes, from the slowest link to the fastest: replicas lie on different slices, tensor shards on nearby chips."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Number of devices along each mesh axis. The text form, such as `"data:2,fsdp:4"`, omits axes of one device.

    Args:
        replica: copies of the whole model across slices or nodes (HSDP's outer axis).
        data: data-parallel copies of the model inside a slice.
        pipe: pipeline stages.
        fsdp: devices over which ZeRO shards.
        expert: devices over which the experts are distributed.
        sequence: devices over which a sequence is split (context parallelism).
        tensor: devices over which heads, mlp and vocabulary are split (Megatron's tensor parallelism).

    Example:
        >>> MeshSpec.parse("data:2,fsdp:4")
        MeshSpec(replica=1, data=2, pipe=1, fsdp=4, expert=1, sequence=1, tensor=1)
        >>> str(MeshSpec(fsdp=4)), MeshSpec(fsdp=4, tensor=2).devices
        ('fsdp:4', 8)
    """

    replica: int = 1
    data: int = 1
    pipe: int = 1
    fsdp: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1

    _repr_html_ = drawn

    def __post_init__(self) -> None:
        check_types(self)
        for axis, count in self.sizes.items():
            if count < 1:
                raise UserError(f"mesh axis {axis}: got {count!r}, expected a whole number of devices >= 1")
            check_at_most(f"mesh axis {axis}", count, MAX_AXIS_DEVICES)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along every axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Number of shards into which the rows of a batch are split."""
        return self.replica * self.data * self.fsdp

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Return the mesh that a text form such as "data:2,fsdp:4" specifies. "1" specifies a single device."""
        if not text.strip():
            raise UserError("mesh: got an empty text, expected AXIS:DEVICES such as data:2,fsdp:4, or 1 for one device")
        device_counts: dict[str, int] = {}
        for entry in filter(None, (entry_text.strip() for entry_text in text.split(","))):
            if entry == "1":
                continue
            axis, colon, count_text = entry.partition(":")
            count = whole_number(count_text)
            if axis not in AXES and not colon:
                digits, axis_text = "".join(filter(str.isdecimal, entry)), entry.strip("0123456789=-x ")
                example = f"{axis_text if axis_text in AXES else 'data'}:{digits}" if digits else "data:2"
                raise UserError(
                    f"mesh {text!r}: unknown mesh axis {entry!r}: expected AXIS:DEVICES, such as {example}, with "
                    f"one of {', '.join(sorted(AXES))}{'' if digits else near_miss(axis, AXES)}"
                )
            if axis not in AXES:
                raise unknown("mesh axis", axis, AXES)
            if not colon or count is None:
                raise UserError(f"mesh {text!r}: got {entry!r}, expected AXIS:DEVICES such as data:2,fsdp:4")
            if axis in device_counts:
                raise UserError(f"mesh {text!r}: got axis {axis} twice, expected it once")
            device_counts[axis] = count
        return cls(**device_counts)

    def __str__(self) -> str:
        return ",".join(f"{axis}:{count}" for axis, count in self.sizes.items() if count > 1) or "1"

    def build(self, devices: Sequence[Any] | None = None) -> Any:
        """Build the `jax.sharding.Mesh`, with all axes in Auto mode. The order of the devices follows their links.

        Args:
            devices: the devices; by default all devices of JAX. The mesh uses the first `self.devices` of them. If they
                are `jax.sharding.AbstractDevice`s, the result is an `AbstractMesh`: programs can be traced for it, but
                not run.

        Raises:
            UserError: there are fewer devices than the mesh takes, a process has no device of the mesh, or the TPU
                slices have unequal numbers of devices.
        """
        import jax
        from jax.experimental import mesh_utils
        from jax.sharding import AbstractDevice, AbstractMesh, AxisType

        all_devices = list(jax.devices() if devices is None else devices)
        if len(all_devices) < self.devices:
            raise UserError(
                f"mesh {self} takes {self.devices} devices, but there are {len(all_devices)} "
                f"({all_devices[0].device_kind}): use a smaller mesh, or set jax_num_cpu_devices for virtual CPU "
                "devices"
            )
        axis_sizes, axis_types = tuple(self.sizes.values()), (AxisType.Auto,) * len(AXES)
        if isinstance(all_devices[0], AbstractDevice):
            return AbstractMesh(axis_sizes, AXES, axis_types=axis_types, abstract_device=all_devices[0])
        mesh_devices = all_devices[: self.devices]
        process_indices, mesh_process_indices = (
            {getattr(device, "process_index", 0) for device in devices} for devices in (all_devices, mesh_devices)
        )
        if idle_process_indices := sorted(process_indices - mesh_process_indices):
            raise UserError(
                f"mesh {self} takes {self.devices} of {len(all_devices)} devices, so that "
                f"{len(idle_process_indices)} of {len(process_indices)} processes have none: use a mesh of "
                f"{len(all_devices)} devices, or start fewer processes"
            )
        device_count_by_slice = collections.Counter(getattr(device, "slice_index", 0) for device in mesh_devices)
        slice_count = len(device_count_by_slice)
        if len(set(device_count_by_slice.values())) > 1:
            raise UserError(
                f"mesh {self}: got TPU slices with {' and '.join(map(str, device_count_by_slice.values()))} of the "
                f"mesh's {self.devices} devices, expected the same number on each slice; use a mesh of "
                f"{min(device_count_by_slice.values()) * slice_count} devices, or a mesh within one slice"
            )
        # an axis may cover only a part of a dim of the torus, such as tensor:2 on 4x4
        if slice_count == 1:
            device_array = mesh_utils.create_device_mesh(axis_sizes, mesh_devices, allow_split_physical_axes=True)
        else:
            dcn_shape = self.across(slice_count)
            ici_shape = [
                axis_size // axis_slice_count for axis_size, axis_slice_count in zip(axis_sizes, dcn_shape, strict=True)
            ]
            device_array = mesh_utils.create_hybrid_device_mesh(
                ici_shape, dcn_shape, mesh_devices, allow_split_physical_axes=True
            )
        return jax.sharding.Mesh(device_array, AXES, axis_types=axis_types)

    def across(self, slices: int) -> tuple[int, ...]:
        """Return the number of slices that each axis spans, in the order of `AXES`. Only the slowest axes span slices.

        Args:
            slices: number of TPU slices, which must have equal sizes.

        Raises:
            UserError: the slowest axes cannot be split evenly over the slices.

        Example:
            >>> MeshSpec.parse("pipe:4,fsdp:8").across(2)
            (1, 1, 2, 1, 1, 1, 1)
        """
        slice_counts = slices_per_axis(tuple(self.sizes.values()), slices)
        if slice_counts is None:
            raise UserError(
                f"mesh {self} on {slices} slices: its slowest axes cannot be split evenly over the slices; use axes "
                f"such as replica:{slices} (axes across slices send messages over the slow network between them)"
            )
        return slice_counts
