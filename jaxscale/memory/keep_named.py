"""Apply save sets: name each chosen value in a block's traced program, and run it under `jax.checkpoint` with a policy
of names.

A policy of JAX sees operations, not values, so a name is the one robust way to select a value. The names are inserted
in the traced program, and the user names nothing. A save set is valid for one program: applied to another (another
model, another version of it, other shapes) it raises an error.

Left out: values inside an operation with its own derivative that does not name them.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import BlockFunction, run_again
from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.save_set import EVERYTHING, value_index
from jaxscale.programs.block import MARK, graph_of
from jaxscale.programs.inline import InlinedProgram, inline

_LATER = f"{MARK}offloaded later:"


class StaleGraph(UserError):
    """A save set was applied to a block that it was not made for."""


def keep_everything(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of a save set of everything; it distinguishes our checkpoints from the user's."""
    return True


@dataclasses.dataclass(frozen=True)
class KeepNamed:
    """Policy of `jax.checkpoint`: values of these names are kept, on the device or on the host.

    Args:
        keep: names kept on the device.
        offload: names kept in the host's pinned memory.
    """

    keep: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    @functools.cached_property
    def _policy(self) -> Callable[..., Any]:
        policies = jax.checkpoint_policies
        if not self.offload:
            return policies.save_only_these_names(*sorted(self.keep))
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.keep),
            names_which_can_be_offloaded=sorted(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> Any:
        """Whether an operation's outputs are kept, for `jax.checkpoint`."""
        return self._policy(primitive, *inputs, **params)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A wrapper of blocks that keeps the values of each block's save set.

    Args:
        saves: save sets by the fingerprint of their block.
        prepare: applied to a block's arguments, in the forward pass and again in the backward pass; `None` leaves them
            unchanged. Save sets do not cover it.
        everything: policy of a save set of everything.
        later: offloaded values stay on the device, until all values of a stage move at once: see `hosted`.
    """

    saves: Mapping[str, SaveSet]
    prepare: Callable[[Any], Any] | None = None
    everything: Callable[..., Any] = keep_everything
    later: bool = False

    @property
    def hosted(self) -> frozenset[str]:
        """Names of the values that are offloaded later."""
        names = {name for save in self.saves.values() for name in save.offload}
        return frozenset({_LATER + name for name in names} | {_residual_name(name) for name in names})

    def __call__(self, block: BlockFunction, rolled: bool) -> BlockFunction:
        """The block as it runs."""

        def keeping_block(*args: Any) -> Any:
            prepare = self.prepare
            prepared = args if prepare is None else jax.eval_shape(prepare, args)
            closed, shapes = jax.make_jaxpr(block, return_shape=True)(*prepared)
            program = inline(closed)
            save = _matching_save(program, self.saves)
            tags = _tags(program, save, self.later)
            policy = self.everything if save.keep == (EVERYTHING,) else _policy(closed, prepared, program, save)
            if self.later and isinstance(policy, KeepNamed):
                policy = KeepNamed(policy.keep | self.hosted)

            def name_kept(number: int, value: Any) -> Any:
                return checkpoint_name(value, tags[number]) if number in tags else value

            def run(consts: Any, args: Any) -> list[Any]:
                leaves = jax.tree.leaves(args if prepare is None else prepare(args))
                return program.run((*consts, *leaves), name_kept)

            recomputed = run_again(run, rolled=rolled, policy=policy)
            return jax.tree.unflatten(jax.tree.structure(shapes), recomputed(closed.consts, args))

        return keeping_block


def keeping(saves: Sequence[SaveSet]) -> Keeping:
    """The wrapper of a `blocks.Treatment` that runs every block under its save set.

    Args:
        saves: one for each kind of block, identified by fingerprint.

    Raises:
        StaleGraph: while tracing: a block that none of the sets was made for.
        UserError: two different sets for one block; while tracing: a name that the block does not have.
    """
    by_block: dict[str, SaveSet] = {}
    for save in saves:
        if by_block.setdefault(save.block, save) != save:
            raise UserError(f"block {save.block}: got two save sets, expected one")

    return Keeping(by_block)


def _matching_save(program: InlinedProgram, by_block: Mapping[str, SaveSet]) -> SaveSet:
    """The save set that was made for a block."""
    fingerprint = program.fingerprint()
    if fingerprint not in by_block:
        expected = ", ".join(sorted(by_block)) or "(none)"
        raise StaleGraph(
            f"the memory plan was made for block {expected}, and this model has block {fingerprint}: another model, "
            "another version of it, or other shapes; make the plan again"
        )
    return by_block[fingerprint]


def _tags(program: InlinedProgram, save: SaveSet, later: bool) -> dict[int, str]:
    """The name to insert for each kept value that the block itself computes, by number."""
    marks = {**dict.fromkeys(save.keep, MARK), **dict.fromkeys(save.offload, _LATER if later else MARK)}
    return {number: marks[name] + name for number, name in program.names().items() if name in marks}


def _policy(closed: Any, args: Sequence[Any], program: InlinedProgram, save: SaveSet) -> KeepNamed:
    """The policy that keeps the values of a save set, after a check that the block has them."""
    block_names = set(program.names().values())
    residuals = [name for name in (*save.keep, *save.offload) if name not in block_names]
    if residuals:
        # residuals of operations with their own derivative have the names given by those operations
        graph = graph_of(closed, args)
        for name in residuals:
            value_index(graph, name)

    def marks(names: Sequence[str]) -> frozenset[str]:
        return frozenset(MARK + name if name in block_names else _residual_name(name) for name in names)

    return KeepNamed(marks(save.keep), marks(save.offload))


def _residual_name(name: str) -> str:
    """The name that an operation gives to its residual."""
    return re.sub(r" \(\d+\)$", "", name)
