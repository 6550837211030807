"""Virtual workers: pipelines of unlike devices that run side by side, as one list of places for a partition.

A place is a position on the pipe axis, which one device of each pipeline takes.

References:
    Park et al. 2020, "HetPipe" (arXiv:2005.14038), its equal distribution of devices.
"""

from collections.abc import Mapping, Sequence

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.choose.price import PipelineDevice


def virtual_workers(
    devices: Sequence[PipelineDevice], slowness: Mapping[str, float], workers: int
) -> tuple[PipelineDevice, ...]:
    """Return the places of pipelines of unlike devices that run side by side in one program (HetPipe).

    Devices are sorted by speed, and each group of `workers` devices gives one to every worker (HetPipe's equal
    distribution), so all workers are alike, place by place. A place has the slowest kind, the least memory and the
    slowest link of its devices.

    Args:
        devices: all devices, `workers` of them for each place.
        slowness: seconds of each kind of device relative to the fastest kind.
        workers: number of pipelines.

    Returns:
        The device that stands for each place, the fastest kind first.

    Raises:
        UserError: `workers` does not divide the number of devices, or a kind has no slowness.

    Example:
        >>> four = [PipelineDevice(kind=kind) for kind in "abba"]
        >>> [place.kind for place in virtual_workers(four, {"a": 1.0, "b": 2.5}, 2)]
        ['a', 'b']
    """
    if workers < 1 or len(devices) % workers:
        raise UserError(f"got {len(devices)} devices for {workers} virtual workers, expected a multiple of {workers}")
    for device in devices:
        if device.kind not in slowness:
            raise unknown("kind of device", device.kind, slowness)
    sorted_devices = sorted(devices, key=lambda device: slowness[device.kind])
    places = []
    for start in range(0, len(sorted_devices), workers):
        group = sorted_devices[start : start + workers]
        memory_bytes = min((device.memory_bytes for device in group if device.memory_bytes is not None), default=None)
        link, latency = min(device.link for device in group), max(device.latency for device in group)
        places.append(PipelineDevice(memory_bytes, group[-1].kind, link, latency))
    return tuple(places)
