"""Where the axes of a mesh lie on the links of a platform, and the seconds of collectives over them.

Devices are ordered row by row, the last axis of the mesh the fastest, so that each axis covers a range of strides:

    TPU slice   an axis covers a part of one torus dim, a whole dim or several dims. A whole dim of the least length
                that wraps around is a ring, over which a device sends in both directions at once; a part is a line
    GPU host    within a host, a device sends over NVLink; between hosts, each GPU has its own network card
    slices      between slices and hosts, the devices of a group on one of them share its network
    all-gather  (n-1)/n of the result passes each device; an axis over several hosts or slices is gathered there first,
                and the slower of the two parts counts. A reduce-scatter is the reverse; an all-reduce is both
    all-to-all  n/4 of the data crosses each link of a ring in each direction; a switch sends (n-1)/n

References:
    Austin et al. 2025, "How to Scale Your Model", chapters on sharded matrices and on GPUs: these formulas.
    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
"""

import dataclasses
import functools
import math

from jaxscale.platforms.megascale import CollectiveKind
from jaxscale.platforms.platform import Link, Platform
from jaxscale.sharding.mesh import AXES, MeshSpec
from jaxscale.tpu_slices import slices_per_axis

WRAP = {"v4": 4, "v5p": 4, "7x": 4, "v5e": 16, "v6e": 16}
"""Least number of chips along a torus dim that wraps around, by chip (Cloud TPU documentation, topologies)."""
LATENCY = {"ici": 1e-6, "nvlink": 3e-6, "pcie": 5e-6, "dcn": 2e-5}
"""Assumed seconds of one step of a collective, by link: the book above measures about 1e-6 for a hop of ICI."""

NETWORK = 25e9
"""Assumed bytes/s of a chip's network card, of 200 Gb/s, if the tables have no link between hosts."""


@dataclasses.dataclass(frozen=True)
class Route:
    """The links over which the devices of one or several mesh axes communicate.

    Args:
        local: number of devices of a group inside one slice or host.
        parts: number of slices or hosts that a group spans.
        local_bandwidth: bytes/s that pass a device in a ring over the links inside a slice or host.
        parts_bandwidth: bytes/s that one device sends to other slices or hosts.
        is_switched: whether devices inside are connected by a switch, not by a torus.
        local_name: name of the links inside.
        link_bandwidth: bytes/s of one link inside, in one direction.
    """

    local: int
    parts: int
    local_bandwidth: float
    parts_bandwidth: float
    is_switched: bool
    local_name: str
    link_bandwidth: float

    @property
    def slowest(self) -> str:
        """The name of the slowest link: "dcn" between slices or hosts; "" if the devices are not connected."""
        return "dcn" if self.parts > 1 else self.local_name


def collective_seconds(
    kind: CollectiveKind, nbytes: float, axes: tuple[str, ...], mesh: MeshSpec, platform: Platform
) -> float:
    """Return the seconds of one collective, if nothing else uses its links.

    Args:
        kind: kind of the collective.
        nbytes: bytes of the whole array, per device, as in `compiler.collectives.Collective`: the result of an
            all-gather or an all-reduce, the operand of a reduce-scatter, the data sent by an all-to-all or a permute.
        axes: mesh axes along which devices communicate.
        mesh: mesh of the step.
        platform: platform with known links; without links, as on a CPU, the seconds are 0.

    Example:
        >>> v5p = Platform.parse("tpu v5p:4x4x4")
        >>> f"{collective_seconds('all-gather', 2e9, ('fsdp',), MeshSpec(fsdp=64), v5p):.2e}"
        '3.29e-03'
        >>> h100 = Platform.parse("gpu h100 x 16")
        >>> f"{collective_seconds('all-gather', 2e9, ('fsdp',), MeshSpec(fsdp=16), h100):.2e}"
        '3.97e-03'
    """
    path = route(axes, mesh, platform)
    device_count = path.local * path.parts
    if device_count == 1 or nbytes <= 0 or not path.local_bandwidth:
        return 0.0
    latency = LATENCY[path.slowest] * max(1.0, math.log2(device_count))
    if kind == "collective-permute":
        bandwidth = path.parts_bandwidth if path.parts > 1 else path.link_bandwidth
        return latency + (nbytes / bandwidth if bandwidth else 0.0)
    if kind == "all-to-all":
        share = (path.local - 1) / path.local if path.is_switched else path.local / 4
        local_seconds = nbytes * share / path.local_bandwidth if path.local > 1 else 0.0
        parts_seconds = nbytes * (path.parts - 1) / path.parts / path.parts_bandwidth if path.parts > 1 else 0.0
        return latency + max(local_seconds, parts_seconds)
    local_seconds = nbytes * (path.local - 1) / path.local / path.local_bandwidth
    parts_seconds = 0.0
    if path.parts > 1:  # the devices of a group on one slice or host each send a part
        parts_seconds = nbytes * (path.parts - 1) / path.parts / (path.parts_bandwidth * path.local)
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (latency + max(local_seconds, parts_seconds))


@functools.lru_cache(maxsize=4096)
def route(axes: tuple[str, ...], mesh: MeshSpec, platform: Platform) -> Route:
    """Return the links over which the devices of some mesh axes communicate.

    Args:
        axes: mesh axes along which devices communicate.
        mesh: mesh of the step.
        platform: platform that the step would run on.

    Example:
        >>> path = route(("fsdp",), MeshSpec(fsdp=4, tensor=4), Platform.parse("gpu h100 x 16"))
        >>> path.local, path.parts, path.slowest
        (2, 2, 'dcn')
    """
    local_link = next((link for link in platform.links if link.name in ("ici", "nvlink")), None)
    local_link = local_link or next((link for link in platform.links if link.name == "pcie"), None)
    local_sizes, part_sizes = _divided(mesh, platform)
    local = math.prod(local_sizes[axis] for axis in axes)
    parts = math.prod(part_sizes[axis] for axis in axes)
    if local_link is None:
        return Route(local, parts, 0.0, 0.0, False, "", 0.0)
    device_share = 1 / platform.chip.devices
    link_bandwidth = local_link.bandwidth * device_share
    bandwidth = link_bandwidth
    if local_link.per == "link" and local > 1:
        bandwidth *= _directions(axes, local_sizes, platform)
    return Route(
        local, parts, bandwidth, _network(platform) * device_share, local_link.per != "link", local_link.name,
        link_bandwidth,
    )  # fmt: skip


def _divided(mesh: MeshSpec, platform: Platform) -> tuple[dict[str, int], dict[str, int]]:
    """Return the devices along each axis inside a slice or host, and the slices or hosts that each axis spans."""
    sizes = mesh.sizes
    if platform.chip.kind == "tpu":
        spanned = slices_per_axis(tuple(sizes.values()), platform.slices) or (1,) * len(sizes)
        part_sizes = dict(zip(sizes, spanned, strict=True))
        return {axis: sizes[axis] // part_sizes[axis] for axis in sizes}, part_sizes
    room = (platform.chip.chips_per_host or platform.chips) * platform.chip.devices  # devices of a host
    local_sizes, part_sizes = {}, {}
    for axis in reversed(AXES):
        local_sizes[axis] = math.gcd(sizes[axis], max(1, room))
        part_sizes[axis] = sizes[axis] // local_sizes[axis]
        room = room // local_sizes[axis] if part_sizes[axis] == 1 else 1
    return local_sizes, part_sizes


def _directions(axes: tuple[str, ...], sizes: dict[str, int], platform: Platform) -> int:
    """Return over how many links at once a device of a torus sends along some axes: 2 per ring, 1 per line."""
    topology = platform.topology or (platform.chips,)
    wrap = WRAP.get(platform.chip.name, 16)
    dims: list[tuple[int, int]] = []  # first stride and end of each torus dim
    stride = 1
    for length in reversed(topology):
        dims.append((stride, stride * length))
        stride *= length
    directions = set()
    axis_stride = 1 / platform.chip.devices
    for axis in reversed(AXES):
        axis_end = axis_stride * sizes[axis]
        for index, (first, end) in enumerate(dims):
            covered = min(axis_end, end) / max(axis_stride, first)
            if axis in axes and covered > 1:
                length = end // first
                directions.add((index, 2 if covered >= length and length % wrap == 0 else 1))
        axis_stride = axis_end
    return max(1, sum(count for _, count in directions))


def _network(platform: Platform) -> float:
    """Return the bytes/s that one chip sends to other slices or hosts; `NETWORK` if the tables have no such link."""
    link: Link | None = next((link for link in platform.links if link.name == "dcn"), None)
    if link is None:
        return NETWORK
    return link.bandwidth / ((platform.chip.chips_per_host or 1) if link.per == "host" else 1)
