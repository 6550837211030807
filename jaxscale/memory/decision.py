"""Decision: what a MemoryPlan comes to for one model, block by block: names, not rules. Frozen, and JSON both ways."""

import dataclasses

from jaxscale.errors import UserError
from jaxscale.values import check_types


@dataclasses.dataclass(frozen=True)
class SaveSet:
    """What of one block's forward pass is there when its backward pass runs; the rest is recomputed.

    The inputs of the block are there in any case. Bytes, FLOP and seconds are of one block, per device and microbatch.

    Args:
        block: fingerprint of the block (`costs.block.BlockGraph`).
        keep: names of the values kept on the device.
        offload: names of the values kept in host memory.
        bytes: of the values kept on the device.
        host_bytes: of the values in host memory.
        flop: recomputed in the backward pass, of matrix products and convolutions.
        seconds: modelled, of recomputation and of copies that nothing hides; 0 where no chip is known.
    """

    block: str
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    bytes: int = 0
    host_bytes: int = 0
    flop: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        both = sorted(set(self.keep) & set(self.offload))
        if both:
            raise UserError(f"save set of block {self.block}: {', '.join(both)} both kept and offloaded; choose one")


@dataclasses.dataclass(frozen=True)
class Group:
    """Neighbouring layers of a stack that keep the same.

    Args:
        layers: how many.
        save: what each of them keeps; `None` keeps everything, unwrapped.
    """

    layers: int
    save: SaveSet | None = None


@dataclasses.dataclass(frozen=True)
class StackDecision:
    """What the layers of a stack of alike blocks keep.

    Args:
        groups: neighbouring layers with one save set each; at most two, from the first layer on.
        segment: k: only every k-th block's input is kept, and what `groups` says only while its segment is recomputed;
            `None` for one level.
    """

    groups: tuple[Group, ...]
    segment: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= len(self.groups) <= 2:
            raise UserError(f"a stack takes one or two groups of layers, got {len(self.groups)}")
        if self.segment is not None and self.segment < 1:
            raise UserError(f"segment: got {self.segment}, expected a whole number >= 1")

    @property
    def layers(self) -> int:
        """Layers of all groups."""
        return sum(group.layers for group in self.groups)
