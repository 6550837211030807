"""Apply save sets: name each chosen value in a block's traced program, and run the program under `jax.checkpoint` with
a policy that keeps values by name.

A policy of JAX sees operations, not values, so a name is the one robust way to select a value. The names are inserted
into the traced program; the user does not have to name anything. A save set is valid for one program: an error is
raised if it is applied to another program (a different model, version or shape).

Not supported: values inside an operation whose custom derivative does not name them.
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

_LATER_PREFIX = f"{MARK}offloaded later:"
"""Prefix of the names of values that are offloaded later."""


class StaleGraph(UserError):
    """The error that is raised if a save set is applied to a block for which it was not made."""


def keep_everything(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The policy of `jax.checkpoint` that keeps every value; it marks a checkpoint as jaxscale's, not the user's."""
    return True


@dataclasses.dataclass(frozen=True)
class KeepNamed:
    """Policy of `jax.checkpoint` that keeps the values with certain names, on the device or on the host.

    Args:
        keep: names kept on the device.
        offload: names kept in the host's pinned memory.
    """

    keep: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    @functools.cached_property
    def _policy(self) -> Callable[..., Any]:
        """The policy of JAX that this policy calls."""
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
        """Return whether to keep the outputs of an operation; `jax.checkpoint` calls this."""
        return self._policy(primitive, *inputs, **params)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A wrapper of blocks that keeps the values of each block's save set.

    Args:
        save_by_block: the save set of each kind of block, by the block's fingerprint.
        prepare_args: function from the wrapped block's arguments to those of the block itself; it runs in the forward
            pass and again in the backward pass. `None` leaves the arguments unchanged. Save sets do not include the
            values that this function computes.
        everything_policy: policy of `jax.checkpoint` for a save set that keeps everything.
        is_offload_deferred: whether the values to offload stay on the device until all values of a pipeline stage move
            to the host at once. A policy then keeps the values under `deferred_names`.
    """

    save_by_block: Mapping[str, SaveSet]
    prepare_args: Callable[[Any], Any] | None = None
    everything_policy: Callable[..., Any] = keep_everything
    is_offload_deferred: bool = False

    @property
    def deferred_names(self) -> frozenset[str]:
        """The names that the values to offload have in the traced program if the offload is deferred."""
        names = {name for save in self.save_by_block.values() for name in save.offload}
        return frozenset({_LATER_PREFIX + name for name in names} | {_residual_name(name) for name in names})

    def __call__(self, block: BlockFunction, is_rolled: bool) -> BlockFunction:
        """Return the block, wrapped to keep the values of its save set; `is_rolled` is true in a scan."""

        def keeping_block(*args: Any) -> Any:
            """Trace the block, name the values of its save set, and run it under a policy that keeps these names."""
            prepare_args = self.prepare_args
            args_to_trace = args if prepare_args is None else jax.eval_shape(prepare_args, args)
            jaxpr, abstract_results = jax.make_jaxpr(block, return_shape=True)(*args_to_trace)
            program = inline(jaxpr)
            save = _matching_save(program, self.save_by_block)
            name_by_number = _names_to_insert(program, save, self.is_offload_deferred)
            policy = self.everything_policy
            if save.keep != (EVERYTHING,):
                policy = _policy_of(jaxpr, args_to_trace, program, save)
            if self.is_offload_deferred and isinstance(policy, KeepNamed):
                policy = KeepNamed(policy.keep | self.deferred_names)

            def insert_name(value_number: int, value: Any) -> Any:
                """Return the value with this number; a value to keep gets its checkpoint name."""
                is_kept = value_number in name_by_number
                return checkpoint_name(value, name_by_number[value_number]) if is_kept else value

            def run_program(consts: Any, unprepared_args: Any) -> list[Any]:
                """Run the block's program on its constants and arguments; return the leaves of the block's result."""
                prepared_leaves = jax.tree.leaves(
                    unprepared_args if prepare_args is None else prepare_args(unprepared_args)
                )
                return program.run((*consts, *prepared_leaves), insert_name)

            checkpointed_program = run_again(run_program, rolled=is_rolled, policy=policy)
            return jax.tree.unflatten(jax.tree.structure(abstract_results), checkpointed_program(jaxpr.consts, args))

        return keeping_block


def keeping(saves: Sequence[SaveSet]) -> Keeping:
    """Return a wrapper for `blocks.Treatment` that runs every block under its save set.

    Args:
        saves: one save set for each kind of block.

    Raises:
        StaleGraph: no save set was made for a block; raised when the block is traced.
        UserError: two different save sets are for one block, or a block lacks a value of its save set; a missing value
            is found when the block is traced.
    """
    save_by_block: dict[str, SaveSet] = {}
    for save in saves:
        if save_by_block.setdefault(save.block, save) != save:
            raise UserError(f"block {save.block}: got two save sets, expected one")

    return Keeping(save_by_block)


def _matching_save(program: InlinedProgram, save_by_block: Mapping[str, SaveSet]) -> SaveSet:
    """Return the save set that was made for the block with this program."""
    fingerprint = program.fingerprint()
    if fingerprint not in save_by_block:
        fingerprints_text = ", ".join(sorted(save_by_block)) or "(none)"
        raise StaleGraph(
            f"the memory plan was made for block {fingerprints_text}, but this model has block {fingerprint}: the "
            "model, its version or its shapes differ; make the plan again",
            page="techniques/save_sets",
        )
    return save_by_block[fingerprint]


def _names_to_insert(program: InlinedProgram, save: SaveSet, is_offload_deferred: bool) -> dict[int, str]:
    """Return the names to insert for the values of a save set, by the number of each value in the program."""
    offload_prefix = _LATER_PREFIX if is_offload_deferred else MARK
    prefix_by_name = {**dict.fromkeys(save.keep, MARK), **dict.fromkeys(save.offload, offload_prefix)}
    return {
        value_number: prefix_by_name[name] + name
        for value_number, name in program.name_by_number().items()
        if name in prefix_by_name
    }


def _policy_of(jaxpr: Any, args: Sequence[Any], program: InlinedProgram, save: SaveSet) -> KeepNamed:
    """Return the policy that keeps the values of a save set; first check that the block has these values."""
    block_names = set(program.name_by_number().values())
    residual_names = [name for name in (*save.keep, *save.offload) if name not in block_names]
    if residual_names:
        # residuals that an operation with a custom derivative names itself
        graph = graph_of(jaxpr, args)
        for name in residual_names:
            value_index(graph, name)  # refuses a name that the block does not have

    def traced_names(names: Sequence[str]) -> frozenset[str]:
        """Return the names that values of the save set have in the traced program."""
        return frozenset(MARK + name if name in block_names else _residual_name(name) for name in names)

    return KeepNamed(traced_names(save.keep), traced_names(save.offload))


def _residual_name(name: str) -> str:
    """Return the name that an operation gave to a residual: `name`, without the suffix that makes it unique."""
    return re.sub(r" \(\d+\)$", "", name)
