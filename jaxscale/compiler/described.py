"""Programs for GPUs that are not attached: the CUDA plugin describes them without their memories.

JAX silently drops the memory kind of a sharding over such devices; a program would then keep on the device the values
that belong on the host. The compiler supports both memories. So a program is traced and lowered over an abstract mesh,
whose shardings keep their memory kinds. The devices are specified when the program is compiled.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class LoweredFor:
    """A program lowered over an abstract mesh, and the devices to compile it for.

    Args:
        lowered: the lowered program, a `jax.stages.Lowered`.
        devices: devices to compile for, as many as the mesh has, in the mesh's order.
    """

    lowered: Any
    devices: tuple[Any, ...]

    def as_text(self, **options: Any) -> str:
        """Return the program's text."""
        return self.lowered.as_text(**options)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        """Compile the program for its devices; return a `jax.stages.Compiled`."""
        return self.lowered.compile(compiler_options, device_assignment=self.devices)


def lacks_memories(devices: Sequence[Any]) -> bool:
    """Return whether JAX lists no memories for these devices.

    Example:
        >>> import jax
        >>> lacks_memories(jax.devices())
        False
    """
    return not devices[0].addressable_memories()


def abstract_device(device: Any) -> Any:
    """Return the `AbstractDevice` of a device, for `jax.sharding.AbstractMesh`."""
    from jax.sharding import AbstractDevice

    return AbstractDevice(device.device_kind, None, device.platform)


def lower_for(devices: Sequence[Any], traced: Any) -> LoweredFor:
    """Lower a program that was traced over an abstract mesh.

    Args:
        devices: devices to compile for, as many as the mesh has, in the mesh's order.
        traced: the traced program, a `jax.stages.Traced`.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((1,), ("x",), abstract_device=abstract_device(jax.devices()[0]))
        >>> x = jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(mesh, PartitionSpec("x")))
        >>> compiled = lower_for(jax.devices()[:1], jax.jit(lambda x: x + 1).trace(x)).compile()
        >>> compiled.memory_analysis().argument_size_in_bytes
        16
    """
    import jax

    platform_name = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    with jax.default_device(devices[0]):  # the client of this device compiles
        return LoweredFor(traced.lower(lowering_platforms=(platform_name,)), tuple(devices))
