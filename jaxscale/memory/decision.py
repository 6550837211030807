"""Decision: what a MemoryPlan comes to for one model, block by block: names, not rules. Frozen, and JSON both ways."""

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


@dataclasses.dataclass(frozen=True)
class ChainDecision:
    """What the blocks of a chain keep, and which segments run again.

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
    """What a memory plan comes to for one model, per device and microbatch.

    Args:
        plan: what was asked for.
        saves: one save set for each kind of block; none where a policy of JAX's says what is kept.
        stack: how the layers of the model's one scanned stack differ; `None`: all as `saves` says.
        chain: what the blocks of the model's one chain keep, and which of them run again; `None`: no chain's plan.
        blocks: fingerprints of the model's kinds of blocks, in the order in which they come first.
        layers: blocks of the model.
        bytes: kept on the device, of the whole model: inputs of blocks, and what save sets keep; where segments run
            again, the most that is kept at any one time.
        host_bytes: in host memory, of the whole model.
        flop: recomputed in one backward pass, of the whole model.
        seconds: modelled, for the same; 0 where no chip is known.

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
        """Kept on the device, of one block on average."""
        return self.bytes / max(self.layers, 1)

    def write(self, path: Any) -> None:
        """To a JSON file that `read_decision`, and the memory plan `file:PATH`, read."""
        Path(path).write_text(json.dumps(to_json(self), indent=1) + "\n")


def read_decision(path: Any) -> Decision:
    """The decision of a file that `Decision.write` wrote.

    Raises:
        UserError: no such file, not JSON, or not a decision.
    """
    return from_json(Decision, read_json(Path(path)), str(path))
