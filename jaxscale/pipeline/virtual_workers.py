"""Virtual workers: pipelines of unlike devices that run side by side, as one list of places to partition blocks over.

References:
    Park et al. 2020, "HetPipe" (arXiv:2005.14038), its equal distribution of devices.
"""

from collections.abc import Mapping, Sequence

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.price import Device


def virtual_workers(devices: Sequence[Device], slowness: Mapping[str, float], workers: int) -> tuple[Device, ...]:
    """The places of pipelines that are made of unlike devices and run side by side, one program for all (HetPipe).

    Every worker gets one device of each run of `workers` in the order of speed, HetPipe's equal distribution: so all
    workers are alike, place by place. At each place what counts is the slowest kind, the least memory and the slowest
    link of the devices there.

    Args:
        devices: all of them; as many as `workers` times the places.
        slowness: of each kind: seconds relative to the fastest.
        workers: how many pipelines.

    Returns:
        The device that stands for each place, the fastest kind first.

    Raises:
        UserError: a number of devices that does not divide; a kind without slowness.

    Example:
        >>> four = [Device(kind="a"), Device(kind="b"), Device(kind="b"), Device(kind="a")]
        >>> [place.kind for place in virtual_workers(four, {"a": 1.0, "b": 2.5}, 2)]
        ['a', 'b']
    """
    if workers < 1 or len(devices) % workers:
        raise UserError(f"got {len(devices)} devices for {workers} virtual workers, expected a multiple of them")
    for device in devices:
        if device.kind not in slowness:
            raise unknown("kind of device", device.kind, slowness)
    ordered = sorted(devices, key=lambda device: slowness[device.kind])
    places = []
    for at in range(0, len(ordered), workers):
        here = ordered[at : at + workers]
        memory = [device.memory_bytes for device in here if device.memory_bytes is not None]
        places.append(
            Device(
                memory_bytes=min(memory, default=None),
                kind=here[-1].kind,
                link=min(device.link for device in here),
                latency=max(device.latency for device in here),
            )
        )
    return tuple(places)
