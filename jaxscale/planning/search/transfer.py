"""Sizes of a model that determine its collectives (`Sizes`), and a group of equal collectives (`Transfer`)."""

import dataclasses
from typing import Literal

from jaxscale.platforms.megascale import CollectiveKind
from jaxscale.platforms.platform import DeviceKind
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec

Purpose = Literal["weights", "gradients", "activations", "sequence", "stages", "replicas"]
PassName = Literal["forward", "backward", "update"]
WeightShapes = tuple[tuple[tuple[int, ...], bool], ...]
"""The shape of each weight, paired with whether its first dim is a stack of layers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model on a device, split over tensor and sequence axes but not over ZeRO's axis fsdp.

    Args:
        block_weights: number of elements of all blocks' weights.
        other_weights: number of elements of all other weights, such as embedding and head.
        layers: number of blocks.
        activation_elements: number of elements of a block's input for one row, not divided over the tensor axis.
        kv_elements: number of elements of a block's keys and values for one row.
        table_elements: number of elements of the other weights that are read by index, such as an embedding.
        has_split_ends: whether the tensor axis splits the embedding and the head.
        is_tied: whether the head is the transposed embedding.
        shapes_and_stacked_flags: the shape of each weight, and whether its first dim is a stack of layers.
    """

    block_weights: int
    other_weights: int
    layers: int
    activation_elements: int
    kv_elements: int = 0
    table_elements: int = 0
    has_split_ends: bool = False
    is_tied: bool = False
    shapes_and_stacked_flags: WeightShapes = ()


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A group of equal collectives in a train step.

    Args:
        kind: kind of the collectives.
        axes: mesh axes along which devices communicate.
        nbytes: bytes of the whole array, per device, as in `compiler.collectives.Collective`.
        count: number of executions in a step.
        purpose: what is sent.
        passes: pass in which the data is sent; "update" also stands for weights that are gathered before both passes.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    nbytes: float
    count: float
    purpose: Purpose
    passes: PassName


@dataclasses.dataclass(frozen=True)
class StepTraffic:
    """The arguments of `transfers`, and properties that several of its helpers derive from them."""

    plan: Plan
    sizes: Sizes
    mesh: MeshSpec
    rows: int
    recomputed_share: float
    chip_kind: DeviceKind

    @property
    def microbatch_count(self) -> int:
        """Number of microbatches of a step."""
        return self.plan.microbatches if self.plan.pipeline is None else self.plan.pipeline.shape()[1]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in the type in which the passes compute."""
        return 2 if self.plan.precision == "bfloat16" else 4

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes of an element of a gradient when it is reduced."""
        return 4 if self.plan.reduce == "float32" else self.element_bytes

    @property
    def has_replica_exchange(self) -> bool:
        """Whether a codec or DiLoCo exchanges gradients or weights between replicas, separately from other axes."""
        return self.plan.diloco is not None or not (self.plan.reduce is None or isinstance(self.plan.reduce, str))

    @property
    def zero(self) -> int:
        """The ZeRO stage; 0 if the fsdp axis has one device."""
        return self.plan.zero if self.mesh.fsdp > 1 else 0

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Axes other than fsdp, of several devices each, over which gradients are summed."""
        axes = ("data", "sequence") if self.has_replica_exchange else ("replica", "data", "sequence")
        return tuple(axis for axis in axes if self.mesh.sizes[axis] > 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """All axes over which gradients are summed, including fsdp."""
        return (*self.other_axes, "fsdp")

    @property
    def has_whole_tables(self) -> bool:
        """Whether a table is gathered over the tensor axis, because sequence parallelism splits the positions.

        Without ZeRO, devices exchange the rows that they read if the table is larger.
        """
        is_read_whole = self.zero > 0 or self.sizes.table_elements * self.mesh.tensor <= self.lookup_elements
        return self.plan.sequence_parallel and self.sizes.has_split_ends and self.mesh.tensor > 1 and is_read_whole

    @property
    def has_head_over_both(self) -> bool:
        """Whether the head, whose rows fsdp and tensor split, is gathered over both axes at once."""
        has_both = self.zero == 3 and self.mesh.tensor > 1 and self.sizes.has_split_ends
        return has_both and bool(self.other_axes) and self.plan.pipeline is None

    @property
    def head_elements(self) -> float:
        """Number of elements of a head on a device, tied or not."""
        return self.sizes.table_elements if self.sizes.is_tied else self.sizes.other_weights - self.sizes.table_elements

    @property
    def lookup_elements(self) -> float:
        """Number of elements that one microbatch reads from tables, summed over the devices along the fsdp axis."""
        return self.rows * self.sizes.activation_elements * self.mesh.fsdp

    @property
    def has_sparse_lookups(self) -> bool:
        """Whether devices exchange only the rows that they read from sharded tables, because the tables are larger."""
        table_elements = self.sizes.table_elements * (self.mesh.tensor if self.has_whole_tables else 1)
        return self.zero > 0 and self.plan.pipeline is None and table_elements > self.lookup_elements

    @property
    def sums_lookups_over_both(self) -> bool:
        """Whether rows that are looked up in a table are summed over fsdp and tensor at once, which both split them."""
        is_split_by_both = self.zero == 3 and self.mesh.tensor > 1 and self.sizes.has_split_ends
        return is_split_by_both and self.has_sparse_lookups and not self.plan.sequence_parallel

    @property
    def layer_elements(self) -> float:
        """Number of elements of one block's weights."""
        return self.sizes.block_weights / max(1, self.sizes.layers)

    @property
    def run_count(self) -> int:
        """Number of times that a device runs a block in the forward passes of a step."""
        return self.microbatch_count * self.sizes.layers
