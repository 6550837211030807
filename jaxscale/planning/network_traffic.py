"""Network traffic of a train step: bytes per device, step and mesh axis, and seconds on the slow axis.

The slow axis is the mesh axis of replicas. The plan determines the traffic over the slow axis. With a codec, it is the
bytes of encoded gradients; with DiLoCo, the mean bytes that its exchanges send per step. Otherwise, it is the bytes of
the gradient shards in the type in which gradients are reduced. The traffic over every axis is read from a compiled
program. Seconds are bytes divided by the link's bandwidth, as if nothing else used the link. Left out: latency, and
overlap with computation.
"""

import dataclasses
import math
from collections.abc import Iterable

from jaxscale.compiler.collectives import Collective
from jaxscale.platforms import megascale
from jaxscale.platforms.platform import Platform
from jaxscale.replicas import wire
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.layout import REPLICA_AXIS
from jaxscale.step.exchange import gradient_leaves_of
from jaxscale.step.train_step import TrainStep
from jaxscale.tpu_slices import slices_per_axis
from jaxscale.values.units import size


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of a device over the slow axis.

    Args:
        sent_bytes: bytes sent per step; for DiLoCo, the mean over steps.
        exact_bytes: bytes that would be sent per step if float32 gradients were reduced in every step.
        sender: what sends the bytes: "reduce" followed by the codec, "diloco" followed by the interval, or, without a
            codec and DiLoCo, the type in which gradients are reduced.
        link_name: name of the links along the axis; "" if the platform's table lists no such link.
        seconds: modeled seconds to send the bytes of a step; `None` if the table lists no such link.
    """

    sent_bytes: int
    exact_bytes: int
    sender: str
    link_name: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        duration_text = f", {self.seconds:.2g} s over {self.link_name}" if self.seconds is not None else ""
        ratio = self.exact_bytes / max(self.sent_bytes, 1)
        comparison_text = f", {ratio:.3g} times fewer than float32 gradients" if ratio > 1 else ""
        return (
            f"{REPLICA_AXIS}: {size(self.sent_bytes)} per device and step by {self.sender}"
            f"{comparison_text}{duration_text}"
        )


def slow_axis_traffic(step: TrainStep, platform: Platform) -> Traffic | None:
    """Return the traffic of a step over the slow axis; `None` if the mesh has only one replica.

    Args:
        step: a train step.
        platform: platform that the step runs on.
    """
    plan, axis_sizes = step.plan, step.mesh.shape
    if axis_sizes[REPLICA_AXIS] == 1:
        return None
    exchange, diloco_replicas = step.gradient_exchange, step.replicas
    if exchange is not None:
        sent_bytes, exact_bytes, sender = exchange.wire_bytes, exchange.exact_bytes, f"reduce {exchange.codec}"
    elif diloco_replicas is not None:
        fragment_indices, interval = range(len(diloco_replicas.names_of_fragments)), diloco_replicas.diloco.every
        sent_bytes = math.ceil(sum(map(diloco_replicas.wire_bytes, fragment_indices)) / interval)
        exact_bytes, sender = sum(map(diloco_replicas.exact_bytes, fragment_indices)), f"diloco every {interval} steps"
    else:
        gradient_leaves = gradient_leaves_of(plan, step.pure_model, step.layout).values()
        element_counts = [
            math.prod(leaf.shape) // math.prod(axis_sizes[axis] for axis in leaf.axes) for leaf in gradient_leaves
        ]
        element_count = sum(element_counts)  # in a device's shards of the gradients
        sender = str(plan.reduce or plan.precision)
        exact_bytes = wire.all_reduce(wire.FLOAT32 * element_count, axis_sizes[REPLICA_AXIS])
        sent_bytes = exact_bytes // (1 if sender == "float32" else 2)
    assert plan.mesh is not None
    link_name, bandwidth = slow_link(platform, plan.mesh)
    return Traffic(sent_bytes, exact_bytes, sender, link_name, sent_bytes / bandwidth if bandwidth else None)


def slow_link(platform: Platform, mesh: MeshSpec) -> tuple[str, float]:
    """Return the name of the links along the replica axis, and their bytes/s per device and direction.

    If the links are unknown, return ("", 0.0).

    Example:
        >>> slow_link(Platform.parse("tpu v5e:4x4 x 2"), MeshSpec(replica=2, fsdp=16))
        ('dcn', 3125000000.0)
        >>> slow_link(Platform.parse("gpu h100 x 8"), MeshSpec(replica=2, fsdp=4))
        ('nvlink', 450000000000.0)
    """
    group_count = platform.slices if platform.chip.kind == "tpu" else platform.hosts or 1
    axis_group_counts = slices_per_axis(tuple(mesh.sizes.values()), group_count)
    is_within_group = axis_group_counts is not None and axis_group_counts[list(mesh.sizes).index(REPLICA_AXIS)] == 1
    link_names = ("ici", "nvlink", "pcie") if is_within_group else ("dcn",)
    link = next((link for link in platform.links if link.name in link_names), None)
    if link is None:
        return "", 0.0
    chips_per_link = (platform.chip.chips_per_host or 1) if link.per == "host" else 1
    return link.name, link.bandwidth / (chips_per_link * platform.chip.devices)


def sent_bytes_by_axes(collectives: Iterable[Collective], mesh: MeshSpec, slice_count: int = 1) -> dict[str, int]:
    """Return the bytes that a device sends in a compiled step, by the mesh axes of the collectives.

    Each collective is assumed to run around a ring of devices.

    Args:
        collectives: collectives of the compiled step.
        mesh: mesh for which the step was compiled.
        slice_count: number of TPU slices of the platform. For an all-gather across slices, `Collective.bytes` counts
            only the bytes that one device contributes.

    Example:
        >>> gather = Collective("all-gather", ("fsdp",), 4096, 2, "bf16", "main")
        >>> sent_bytes_by_axes([gather], MeshSpec(fsdp=4))
        {'fsdp': 6144}
    """
    axes_between_slices = megascale.split_axes(mesh.sizes, slice_count)[1]
    bytes_by_axes: dict[str, int] = {}
    for collective in collectives:
        axes_name = "other groups" if collective.axes is None else "+".join(collective.axes)
        device_count = math.prod(mesh.sizes[axis] for axis in collective.axes or ())
        if collective.kind == "collective-permute" or collective.axes is None:
            sent_bytes = collective.bytes
        elif collective.kind == "all-gather":
            is_contribution = slice_count > 1 and not set(collective.axes).isdisjoint(axes_between_slices)
            contributed_bytes = collective.bytes if is_contribution else collective.bytes // device_count
            sent_bytes = wire.all_gather(contributed_bytes, device_count)
        else:
            formula = wire.all_reduce if collective.kind == "all-reduce" else wire.all_to_all
            sent_bytes = formula(collective.bytes, device_count)
        bytes_by_axes[axes_name] = bytes_by_axes.get(axes_name, 0) + sent_bytes * collective.count
    return bytes_by_axes
