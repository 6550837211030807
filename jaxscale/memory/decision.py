"""A decision is a memory plan resolved for one model: the names of the values that each block keeps, saved as JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.memory.chain import Remat, Save, check_nodes
from jaxscale.memory.plan import MemoryPlan
from jaxscale.values import check_types, from_json, read_json, to_json


@dataclasses.dataclass(frozen=True)
class SaveSet:
    """The values of a block that are kept from its forward pass to its backward pass; other values are recomputed.

    The block's inputs are always kept. Bytes, FLOP and seconds are those of one block, per device and microbatch.

    Args:
        block: fingerprint of the block (`programs.block.BlockGraph`).
        keep: names of the values kept on the device.
        offload: names of the values kept in host memory.
        bytes: bytes of the values kept on the device.
        host_bytes: bytes of the values in host memory.
        flop: FLOP of matrix products and convolutions that the backward pass recomputes.
        seconds: modeled seconds of recomputation and of copies that do not overlap with computation; 0 without a
            chip.
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
        duplicate_names = sorted(set(self.keep) & set(self.offload))
        if duplicate_names:
            names_text = ", ".join(duplicate_names)
            raise UserError(f"save set of block {self.block}: {names_text} are both kept and offloaded; list each once")


@dataclasses.dataclass(frozen=True)
class Group:
    """Neighboring layers of a stack that have the same save set.

    Args:
        layers: number of layers.
        save: the save set of each layer; `None` keeps everything, without a checkpoint.
    """

    layers: int
    save: SaveSet | None = None


@dataclasses.dataclass(frozen=True)
class StackDecision:
    """The save sets of the layers of a stack of identical blocks.

    Args:
        groups: one or two groups of neighboring layers, from the first layer on.
        segment: number of blocks in a segment. Only the input of the first block of each segment is kept; the values of
            the save sets are kept only while the segment is recomputed. `None` for a stack without segments.
    """

    groups: tuple[Group, ...]
    segment: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= len(self.groups) <= 2:
            raise UserError(f"stack: got {len(self.groups)} groups of layers, expected one or two")
        if self.segment is not None and self.segment < 1:
            raise UserError(f"segment: got {self.segment}, expected a whole number >= 1")

    @property
    def layers(self) -> int:
        """The number of layers in all groups."""
        return sum(group.layers for group in self.groups)


@dataclasses.dataclass(frozen=True)
class ChainDecision:
    """The save sets of the blocks of a chain, and the segments that run again.

    Args:
        nodes: the plan of the chain.
        options: for each block, the save sets from which `Save(stage, option)` in `nodes` chooses one.
    """

    nodes: tuple[Save | Remat, ...]
    options: tuple[tuple[SaveSet, ...], ...]

    def __post_init__(self) -> None:
        check_types(self)
        check_nodes(self.nodes, len(self.options))


@dataclasses.dataclass(frozen=True)
class Decision:
    """A memory plan resolved for one model, per device and microbatch.

    Args:
        plan: the memory plan.
        saves: one save set for each kind of block; empty if `stack` or `chain` has the save sets.
        stack: the groups and segments of the model's one scanned stack; `None` if all layers use `saves`.
        chain: the save sets and segments of the model's one chain; `None` for other plans.
        blocks: fingerprints of the model's kinds of blocks, in order of first appearance.
        layers: number of blocks in the model.
        bytes: bytes that the whole model keeps on the device: inputs of blocks, and values of save sets. If segments
            run again, this is the largest number of bytes kept at any time.
        host_bytes: bytes that the whole model keeps in host memory.
        flop: FLOP that the backward pass of the whole model recomputes.
        seconds: modeled seconds of recomputation and copies in the whole model; 0 without a chip.

    Example:
        >>> save = SaveSet("block", ("up",), bytes=64)
        >>> decision = Decision(MemoryPlan.parse("save:1MiB"), (save,), layers=2, bytes=192)
        >>> from_json(Decision, to_json(decision)) == decision
        True
    """

    plan: MemoryPlan
    saves: tuple[SaveSet, ...] = ()
    stack: StackDecision | None = None
    chain: ChainDecision | None = None
    blocks: tuple[str, ...] = ()
    layers: int = 0
    bytes: int = 0
    host_bytes: int = 0
    flop: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        fingerprints = [save.block for save in self.saves]
        if len(set(fingerprints)) < len(fingerprints):
            raise UserError("decision: got two save sets for one kind of block, expected one")

    @property
    def bytes_of_a_block(self) -> float:
        """The bytes kept on the device per block, on average."""
        return self.bytes / max(self.layers, 1)

    def write(self, path: Any) -> None:
        """Write the decision to a JSON file, for `read_decision` and for the memory plan `file:PATH`."""
        Path(path).write_text(json.dumps(to_json(self), indent=1) + "\n")


def read_decision(path: Any) -> Decision:
    """Read a decision from a file that `Decision.write` wrote.

    Raises:
        UserError: the file does not exist, is not JSON, or does not contain a decision.

    Example:
        >>> decision = Decision(MemoryPlan.parse("save:1MiB"), (), layers=2, bytes=192)
        >>> decision.write("memory.json")
        >>> read_decision("memory.json") == decision
        True
    """
    return from_json(Decision, read_json(Path(path)), str(path))
