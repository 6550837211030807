"""Apply save sets: name each chosen value in a block's traced program, and run the program under `jax.checkpoint` with
a policy that keeps values by name.

A policy of JAX sees operations, not values, so a name is the one robust way to select a value. The names are inserted
into the traced program; the user names nothing. A save set is valid for one program: applied to another (a different
model, version or shape) it raises an error.

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
"""Prefix of the names of values that are offloaded later."""


class StaleGraph(UserError):
    """A save set was applied to a block that it was not made for."""


def keep_everything(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of `jax.checkpoint` that keeps every value; it distinguishes our checkpoints from the user's."""
    return True


@dataclasses.dataclass(frozen=True)
class KeepNamed:
    """Policy of `jax.checkpoint` that keeps the values with these names, on the device or on the host.

    Args:
        keep: names kept on the device.
        offload: names kept in the host's pinned memory.
    """

    keep: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    @functools.cached_property
    def _policy(self) -> Callable[..., Any]:
        """JAX's policy for these names."""
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
        """Whether to keep the outputs of an operation; `jax.checkpoint` calls this."""
        return self._policy(primitive, *inputs, **params)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A wrapper of blocks that keeps the values of each block's save set.

    Args:
        saves: save sets by the fingerprint of their block.
        prepare: function applied to a block's arguments, in the forward pass and again in the backward pass; `None`
            leaves them unchanged. Save sets do not include the values inside it.
        everything: policy for a save set that keeps everything.
        later: whether offloaded values (`hosted`) stay on the device until all values of a stage move at once.
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
        """The block under the policy of its save set; `rolled` is true in a scan."""

        def keeping_block(*args: Any) -> Any:
            """Trace the block, name the values of its save set, and run it under a policy that keeps these names."""
            prepare = self.prepare
            prepared_args = args if prepare is None else jax.eval_shape(prepare, args)
            jaxpr, result_shapes = jax.make_jaxpr(block, return_shape=True)(*prepared_args)
            program = inline(jaxpr)
            save = _matching_save(program, self.saves)
            tag_by_number = _tag_by_number(program, save, self.later)
            policy = self.everything if save.keep == (EVERYTHING,) else _policy_of(jaxpr, prepared_args, program, save)
            if self.later and isinstance(policy, KeepNamed):
                policy = KeepNamed(policy.keep | self.hosted)

            def name_kept(number: int, value: Any) -> Any:
                """Return a value of the program, given its number; if it is kept, insert its name."""
                return checkpoint_name(value, tag_by_number[number]) if number in tag_by_number else value

            def run(consts: Any, args: Any) -> list[Any]:
                """Run the block's program on its constants and arguments; return the leaves of the block's result."""
                leaves = jax.tree.leaves(args if prepare is None else prepare(args))
                return program.run((*consts, *leaves), name_kept)

            run_recomputed = run_again(run, rolled=rolled, policy=policy)
            return jax.tree.unflatten(jax.tree.structure(result_shapes), run_recomputed(jaxpr.consts, args))

        return keeping_block


def keeping(saves: Sequence[SaveSet]) -> Keeping:
    """The wrapper of a `blocks.Treatment` that runs every block under its save set.

    Args:
        saves: one save set for each kind of block, which its fingerprint identifies.

    Raises:
        StaleGraph: when the block is traced, if none of the sets was made for it.
        UserError: two different sets are for one block; or, when it is traced, the block lacks a value of its set.
    """
    save_by_block: dict[str, SaveSet] = {}
    for save in saves:
        if save_by_block.setdefault(save.block, save) != save:
            raise UserError(f"block {save.block}: got two save sets, expected one")

    return Keeping(save_by_block)


def _matching_save(program: InlinedProgram, save_by_block: Mapping[str, SaveSet]) -> SaveSet:
    """The save set that was made for the block of this program."""
    fingerprint = program.fingerprint()
    if fingerprint not in save_by_block:
        expected = ", ".join(sorted(save_by_block)) or "(none)"
        raise StaleGraph(
            f"the memory plan was made for block {expected}, but this model has block {fingerprint}: the model, "
            "its version or its shapes differ; make the plan again",
            page="techniques/save_sets",
        )
    return save_by_block[fingerprint]


def _tag_by_number(program: InlinedProgram, save: SaveSet, later: bool) -> dict[int, str]:
    """The names to insert for kept values that have a number in the program, by that number."""
    prefix_of_name = {**dict.fromkeys(save.keep, MARK), **dict.fromkeys(save.offload, _LATER if later else MARK)}
    return {number: prefix_of_name[name] + name for number, name in program.names().items() if name in prefix_of_name}


def _policy_of(jaxpr: Any, args: Sequence[Any], program: InlinedProgram, save: SaveSet) -> KeepNamed:
    """The policy that keeps the values of a save set, after a check that the block has them."""
    block_names = set(program.names().values())
    residual_names = [name for name in (*save.keep, *save.offload) if name not in block_names]
    if residual_names:
        # an operation with its own derivative names its residuals itself
        graph = graph_of(jaxpr, args)
        for name in residual_names:
            value_index(graph, name)

    def inserted_names(names: Sequence[str]) -> frozenset[str]:
        """The names of these values in the program in which the wrapper inserted names."""
        return frozenset(MARK + name if name in block_names else _residual_name(name) for name in names)

    return KeepNamed(inserted_names(save.keep), inserted_names(save.offload))


def _residual_name(name: str) -> str:
    """The name that an operation gave to its residual: `name` without the number that makes it unique in the block."""
    return re.sub(r" \(\d+\)$", "", name)
