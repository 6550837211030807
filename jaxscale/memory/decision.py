"""Decision: a MemoryPlan resolved for one model, block by block, to names of values. Frozen, to and from JSON."""

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
    """The values of a block that are kept from its forward to its backward pass; the others are recomputed.

    The block's inputs are always kept. Bytes, FLOP and seconds are of one block, per device and microbatch.

    Args:
        block: fingerprint of the block (`programs.block.BlockGraph`).
        keep: names of the values kept on the device.
        offload: names of the values kept in host memory.
        bytes: of the values kept on the device.
        host_bytes: of the values in host memory.
        flop: recomputed in the backward pass, of matrix products and convolutions.
        seconds: modelled, of recomputation and of copies that are not hidden; 0 without a chip.
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
        duplicates = sorted(set(self.keep) & set(self.offload))
        if duplicates:
            raise UserError(
                f"save set of block {self.block}: {', '.join(duplicates)} both kept and offloaded; choose one"
            )


@dataclasses.dataclass(frozen=True)
class Group:
    """Neighbouring layers of a stack with the same save set.

    Args:
        layers: their number.
        save: the save set of each; `None` keeps everything, unwrapped.
    """

    layers: int
    save: SaveSet | None = None


@dataclasses.dataclass(frozen=True)
class StackDecision:
    """The save sets of the layers of a stack of alike blocks.

    Args:
        groups: neighbouring layers with one save set each; at most two, from the first layer on.
        segment: k: only every k-th block's input is kept, and the values of `groups` only while their segment is
            recomputed; `None` for one level.
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


@dataclasses.dataclass(frozen=True)
class ChainDecision:
    """The save sets of the blocks of a chain, and the segments that run again.

    Args:
        nodes: the plan.
        options: ways to keep each block; `Save(stage, option)` chooses one.
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
        saves: one save set for each kind of block; empty if a policy of JAX selects the kept values.
        stack: the groups and segments of the model's one scanned stack; `None`: all layers use `saves`.
        chain: the save sets and segments of the model's one chain; `None` for other plans.
        blocks: fingerprints of the model's kinds of blocks, in order of first appearance.
        layers: blocks of the model.
        bytes: kept on the device, of the whole model: inputs of blocks, and values of save sets; if segments run
            again, the most that is kept at any one time.
        host_bytes: in host memory, of the whole model.
        flop: recomputed in one backward pass, of the whole model.
        seconds: modelled seconds of recomputation and copies, of the whole model; 0 without a chip.

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
        kinds = [save.block for save in self.saves]
        if len(set(kinds)) < len(kinds):
            raise UserError("a decision has one save set for each kind of block; got two for one")

    @property
    def bytes_of_a_block(self) -> float:
        """Bytes kept on the device per block, on average."""
        return self.bytes / max(self.layers, 1)

    def write(self, path: Any) -> None:
        """Write a JSON file for `read_decision` and the memory plan `file:PATH`."""
        Path(path).write_text(json.dumps(to_json(self), indent=1) + "\n")


def read_decision(path: Any) -> Decision:
    """The decision in a file of `Decision.write`.

    Raises:
        UserError: no such file, not JSON, or not a decision.
    """
    return from_json(Decision, read_json(Path(path)), str(path))
