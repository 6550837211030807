"""Virtual workers: pipelines of unlike devices that run side by side, reduced to one list of devices for a partition.

Each position on the pipe axis has one device of every pipeline. In the partition, one device stands for all of them.

References:
    Park et al. 2020, "HetPipe" (arXiv:2005.14038), its equal distribution of devices.
"""

from collections.abc import Mapping, Sequence

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.choose.price import PipelineDevice


def virtual_workers(
    devices: Sequence[PipelineDevice], slowness: Mapping[str, float], workers: int
) -> tuple[PipelineDevice, ...]:
    """Return, for pipelines that run side by side in one program, one device that stands for each position (HetPipe).

    Devices are sorted by speed and divided into groups of `workers` devices, one group for each position. Every
    pipeline gets one device of each group (HetPipe's equal distribution), so all pipelines are alike. The device that
    stands for a position has the slowest kind, the least memory and the slowest link of its group.

    Args:
        devices: all devices, `workers` for each position.
        slowness: for each kind of device, its seconds relative to those of the fastest kind.
        workers: number of pipelines.

    Returns:
        For each position, the device that stands for it; positions with the fastest kind come first.

    Raises:
        UserError: `workers` does not divide the number of devices, or a kind has no slowness.

    Example:
        >>> four = [PipelineDevice(kind=kind) for kind in "abba"]
        >>> [device.kind for device in virtual_workers(four, {"a": 1.0, "b": 2.5}, 2)]
        ['a', 'b']
    """
    if workers < 1:
        raise UserError(f"got {workers} virtual workers, expected 1 or more")
    if len(devices) % workers:
        raise UserError(f"got {len(devices)} devices for {workers} virtual workers, expected a multiple of {workers}")
    for device in devices:
        if device.kind not in slowness:
            raise unknown("kind of device", device.kind, slowness)
    sorted_devices = sorted(devices, key=lambda device: slowness[device.kind])
    position_devices = []
    for start in range(0, len(sorted_devices), workers):
        group_devices = sorted_devices[start : start + workers]
        memory_bytes = min(
            (device.memory_bytes for device in group_devices if device.memory_bytes is not None), default=None
        )
        link, latency = min(device.link for device in group_devices), max(device.latency for device in group_devices)
        position_devices.append(PipelineDevice(memory_bytes, group_devices[-1].kind, link, latency))
    return tuple(position_devices)
