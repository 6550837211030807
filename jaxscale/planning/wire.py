"""What a train step sends over the network: bytes of a device per step and axis, and the seconds of the slow axis.

Before anything is compiled the replica axis alone is told, whose bytes follow from the plan: what its codec says, the
meetings of DiLoCo spread over the steps between them, or else the gradients' shards in the type they are reduced in, at
the least. Afterwards the compiler's program tells them of every axis. Seconds are bytes over a link's bandwidth, as if
nothing else used it; latency, and what computing hides, are left out.
"""

import dataclasses
import math
from collections.abc import Iterable

from jaxscale.compression import wire
from jaxscale.platforms import megascale
from jaxscale.platforms.hlo import Collective
from jaxscale.platforms.platform import Platform
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.slices import across
from jaxscale.step.exchange import leaves_of_gradients
from jaxscale.step.layout import REPLICA_AXIS
from jaxscale.step.train_step import TrainStep
from jaxscale.values.units import size


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a device sends over the slow axis.

    Args:
        bytes: in a step; of DiLoCo in the mean over steps.
        exact_bytes: of the gradients in float32, in every step.
        by: what sends them: a codec, "diloco", or a type.
        link: name of the links; empty where the platform's table has none there.
        seconds: of a step's bytes; `None` without a link.
    """

    bytes: int
    exact_bytes: int
    by: str
    link: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        took = f", {self.seconds:.2g} s over {self.link}" if self.seconds is not None else ""
        fewer = self.exact_bytes / max(self.bytes, 1)
        beside = f", {fewer:.3g} times fewer than float32 gradients" if fewer > 1 else ""
        return f"{REPLICA_AXIS}: {size(self.bytes)} per device and step by {self.by}{beside}{took}"


def wire_of(step: TrainStep, platform: Platform) -> Wire | None:
    """What a step sends over the slow axis; `None` where its mesh has none.

    Args:
        step: that is built.
        platform: where it runs.
    """
    plan, replicas = step.plan, step.mesh.shape[REPLICA_AXIS]
    if replicas == 1:
        return None
    codec, replicas_alone = step.codec, step.replicas
    if codec is not None:
        sent, exact, by = codec.wire_bytes, codec.exact_bytes, f"reduce {codec.codec}"
    elif replicas_alone is not None:
        parts, every = range(len(replicas_alone.fragments)), replicas_alone.diloco.every
        sent = math.ceil(sum(map(replicas_alone.wire_bytes, parts)) / every)
        exact, by = sum(map(replicas_alone.exact_bytes, parts)), f"diloco every {every} steps"
    else:
        leaves = leaves_of_gradients(plan, step.functional, step.layout)
        numbers = sum(math.prod(leaf.shape) // _ways(step, leaf.axes) for leaf in leaves.values())
        by = plan.reduce or plan.precision
        exact = wire.all_reduce(wire.FLOAT32 * numbers, replicas)
        sent = exact // (1 if by == "float32" else 2)
    assert plan.mesh is not None
    link, bandwidth = slow_link(platform, plan.mesh)
    return Wire(sent, exact, str(by), link, sent / bandwidth if bandwidth else None)


def slow_link(platform: Platform, mesh: MeshSpec) -> tuple[str, float]:
    """Name and bytes/s, of one device and direction, of the links that the replica axis lies on; 0 where none is known.

    Example:
        >>> slow_link(Platform.parse("tpu v5e:4x4 x 2"), MeshSpec(replica=2, fsdp=16))
        ('dcn', 3125000000.0)
        >>> slow_link(Platform.parse("gpu h100 x 8"), MeshSpec(replica=2, fsdp=4))
        ('nvlink', 450000000000.0)
    """
    parts = platform.slices if platform.chip.kind == "tpu" else platform.hosts or 1
    cut = across(tuple(mesh.sizes.values()), parts)
    inside = cut is not None and cut[list(mesh.sizes).index(REPLICA_AXIS)] == 1
    names = ("ici", "nvlink", "pcie") if inside else ("dcn",)
    link = next((link for link in platform.links if link.name in names), None)
    if link is None:
        return "", 0.0
    chips = (platform.chip.chips_per_host or 1) if link.per == "host" else 1
    return link.name, link.bandwidth / (chips * platform.chip.devices)


def sent_by_axes(found: Iterable[Collective], mesh: MeshSpec, slices: int = 1) -> dict[str, int]:
    """Bytes that a device of a compiled step sends, by the axes that its collectives span, by the rings' formulas.

    Args:
        found: its collectives.
        mesh: it was compiled for.
        slices: of the platform; what crosses them is listed with what a device hands over.

    Example:
        >>> gather = Collective("all-gather", ("fsdp",), 4096, 2, "bf16", "main")
        >>> sent_by_axes([gather], MeshSpec(fsdp=4))
        {'fsdp': 6144}
    """
    crossing = megascale.split(mesh.sizes, slices)[1]
    sums: dict[str, int] = {}
    for one in found:
        axes = "other groups" if one.axes is None else "+".join(one.axes)
        n = math.prod(mesh.sizes[axis] for axis in one.axes or ())
        if one.kind == "collective-permute" or one.axes is None:
            sent = one.bytes
        elif one.kind == "all-gather":
            handed = slices > 1 and set(one.axes) & set(crossing)
            sent = wire.all_gather(one.bytes if handed else one.bytes // n, n)
        else:
            sent = (wire.all_reduce if one.kind == "all-reduce" else wire.all_to_all)(one.bytes, n)
        sums[axes] = sums.get(axes, 0) + sent * one.count
    return sums


def _ways(step: TrainStep, axes: Iterable[str]) -> int:
    return math.prod(step.mesh.shape[axis] for axis in axes)
