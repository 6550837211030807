"""Where the axes of a mesh lie on the links of a platform, and the seconds of collectives over them.

Devices are numbered row by row, and the last axis of the mesh varies fastest. So each axis covers a range of strides:

    TPU slice   an axis covers a part of one torus dim, a whole dim or several dims. A whole dim of the least length
                that wraps around is a ring, over which a device sends in both directions at once; a part is a line
    GPU host    within a host, a device sends over NVLink; between hosts, each GPU has its own network card
    slices      between slices and hosts, the devices of a group on one of them share its network
    all-gather  (n-1)/n of the result passes each device; an axis over several hosts or slices is gathered inside each
                and between them, and the slower part counts. A reduce-scatter is the reverse; an all-reduce is both
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

WRAP_LENGTHS = {"v4": 4, "v5p": 4, "7x": 4, "v5e": 16, "v6e": 16}
"""Least number of chips along a torus dim that wraps around, by chip (Cloud TPU documentation, topologies)."""
LATENCY_SECONDS = {"ici": 1e-6, "nvlink": 3e-6, "pcie": 5e-6, "dcn": 2e-5}
"""Assumed seconds of one step of a collective, by link; the book above measures about 1e-6 for a hop of ICI."""

NETWORK_BANDWIDTH = 25e9
"""Assumed bytes/s of a chip's network card (200 Gb/s), used if the tables list no link between hosts."""


@dataclasses.dataclass(frozen=True)
class Route:
    """The links over which the devices of one or several mesh axes communicate.

    Args:
        local_count: number of the group's devices in each slice or host.
        parts: number of slices or hosts that a group spans.
        local_bandwidth: bytes/s that pass a device in a ring over the links inside a slice or host.
        parts_bandwidth: bytes/s that one device sends to other slices or hosts.
        is_switched: whether a switch, not a torus, connects the devices inside a slice or host.
        local_link_name: name of the links inside a slice or host; "" if the devices are not connected.
        link_bandwidth: bytes/s of one link inside a slice or host, in one direction.
    """

    local_count: int
    parts: int
    local_bandwidth: float
    parts_bandwidth: float
    is_switched: bool
    local_link_name: str
    link_bandwidth: float

    @property
    def slowest_link_name(self) -> str:
        """The name of the slowest link: "dcn" between slices or hosts; "" if the devices are not connected."""
        return "dcn" if self.parts > 1 else self.local_link_name


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
    group_route = route(axes, mesh, platform)
    device_count = group_route.local_count * group_route.parts
    if device_count == 1 or nbytes <= 0 or not group_route.local_bandwidth:
        return 0.0
    latency_seconds = LATENCY_SECONDS[group_route.slowest_link_name] * max(1.0, math.log2(device_count))
    if kind == "collective-permute":
        bandwidth = group_route.parts_bandwidth if group_route.parts > 1 else group_route.link_bandwidth
        return latency_seconds + (nbytes / bandwidth if bandwidth else 0.0)
    if kind == "all-to-all":
        crossing_share = (
            (group_route.local_count - 1) / group_route.local_count
            if group_route.is_switched
            else group_route.local_count / 4
        )
        local_seconds = nbytes * crossing_share / group_route.local_bandwidth if group_route.local_count > 1 else 0.0
        parts_seconds = (
            nbytes * (group_route.parts - 1) / group_route.parts / group_route.parts_bandwidth
            if group_route.parts > 1
            else 0.0
        )
        return latency_seconds + max(local_seconds, parts_seconds)
    local_seconds = nbytes * (group_route.local_count - 1) / group_route.local_count / group_route.local_bandwidth
    parts_seconds = 0.0
    if group_route.parts > 1:  # each device of the group in a slice or host sends a part
        parts_seconds = (
            nbytes
            * (group_route.parts - 1)
            / group_route.parts
            / (group_route.parts_bandwidth * group_route.local_count)
        )
    round_count = 2 if kind == "all-reduce" else 1
    return round_count * (latency_seconds + max(local_seconds, parts_seconds))


@functools.lru_cache(maxsize=4096)
def route(axes: tuple[str, ...], mesh: MeshSpec, platform: Platform) -> Route:
    """Return the links over which the devices along some mesh axes communicate.

    Args:
        axes: mesh axes along which devices communicate.
        mesh: mesh of the step.
        platform: platform that the step would run on.

    Example:
        >>> group_route = route(("fsdp",), MeshSpec(fsdp=4, tensor=4), Platform.parse("gpu h100 x 16"))
        >>> group_route.local_count, group_route.parts, group_route.slowest_link_name
        (2, 2, 'dcn')
    """
    local_link = next((link for link in platform.links if link.name in ("ici", "nvlink")), None)
    local_link = local_link or next((link for link in platform.links if link.name == "pcie"), None)
    local_counts, part_counts = _local_and_part_counts(mesh, platform)
    local_count = math.prod(local_counts[axis] for axis in axes)
    part_count = math.prod(part_counts[axis] for axis in axes)
    if local_link is None:
        return Route(local_count, part_count, 0.0, 0.0, False, "", 0.0)
    device_share = 1 / platform.chip.devices
    link_bandwidth = local_link.bandwidth * device_share
    local_bandwidth = link_bandwidth
    if local_link.per == "link" and local_count > 1:
        local_bandwidth *= _parallel_link_count(axes, local_counts, platform)
    return Route(
        local_count, part_count, local_bandwidth, _network_bandwidth(platform) * device_share,
        local_link.per != "link", local_link.name, link_bandwidth,
    )  # fmt: skip


def _local_and_part_counts(mesh: MeshSpec, platform: Platform) -> tuple[dict[str, int], dict[str, int]]:
    """Return, by axis, the number of devices inside a slice or host, and the number of slices or hosts it spans."""
    axis_sizes = mesh.sizes
    if platform.chip.kind == "tpu":
        slice_counts = slices_per_axis(tuple(axis_sizes.values()), platform.slices) or (1,) * len(axis_sizes)
        part_counts = dict(zip(axis_sizes, slice_counts, strict=True))
        return {axis: axis_sizes[axis] // part_counts[axis] for axis in axis_sizes}, part_counts
    free_devices = (platform.chip.chips_per_host or platform.chips) * platform.chip.devices  # devices of a host
    local_counts, part_counts = {}, {}
    for axis in reversed(AXES):
        local_counts[axis] = math.gcd(axis_sizes[axis], max(1, free_devices))
        part_counts[axis] = axis_sizes[axis] // local_counts[axis]
        free_devices = free_devices // local_counts[axis] if part_counts[axis] == 1 else 1
    return local_counts, part_counts


def _parallel_link_count(axes: tuple[str, ...], local_counts: dict[str, int], platform: Platform) -> int:
    """Return how many links of a torus a device uses at once along some mesh axes: 2 for each ring, 1 for each line."""
    topology = platform.topology or (platform.chips,)
    wrap_length = WRAP_LENGTHS.get(platform.chip.name, 16)
    strides_by_dim: list[tuple[int, int]] = []  # first stride and end of each torus dim
    stride = 1
    for dim_length in reversed(topology):
        strides_by_dim.append((stride, stride * dim_length))
        stride *= dim_length
    dims_and_link_counts = set()
    axis_stride = 1 / platform.chip.devices
    for axis in reversed(AXES):
        axis_end = axis_stride * local_counts[axis]
        for torus_dim, (first_stride, end_stride) in enumerate(strides_by_dim):
            covered_length = min(axis_end, end_stride) / max(axis_stride, first_stride)
            if axis in axes and covered_length > 1:
                dim_length = end_stride // first_stride
                dims_and_link_counts.add(
                    (torus_dim, 2 if covered_length >= dim_length and dim_length % wrap_length == 0 else 1)
                )
        axis_stride = axis_end
    return max(1, sum(link_count for _, link_count in dims_and_link_counts))


def _network_bandwidth(platform: Platform) -> float:
    """Return the bytes/s that one chip sends to other slices or hosts; `NETWORK_BANDWIDTH` if no link is known."""
    link: Link | None = next((link for link in platform.links if link.name == "dcn"), None)
    if link is None:
        return NETWORK_BANDWIDTH
    return link.bandwidth / ((platform.chip.chips_per_host or 1) if link.per == "host" else 1)
