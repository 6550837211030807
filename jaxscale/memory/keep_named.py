"""Save sets made real: a block's program run again with a name on each chosen value, under `jax.checkpoint` with a
policy of names.

A policy of JAX sees operations, not values, so a name is the one robust way to say which values are meant. The names
are inserted in the traced program, and the user names nothing. A save set holds for one program: applied to another
(another model, another version of it, other shapes) it is refused.

It leaves out what it cannot do: to keep a value that an operation's own derivative makes inside and does not name.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import BlockFunction, Wrapper, as_it_is, run_again
from jaxscale.costs.block import MARK, graph_of
from jaxscale.costs.inline import Program, inline
from jaxscale.errors import UserError
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import EVERYTHING, value_index

_LATER = f"{MARK}offloaded later:"


class StaleGraph(UserError):
    """A save set of one block was given to another."""


def keep_everything(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of a save set of everything: ours, which tells our checkpoints from the user's."""
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
        """What `jax.checkpoint` asks of every operation."""
        return self._policy(primitive, *inputs, **params)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A wrapper of blocks that keeps of each what its save set says.

    Args:
        saves: by the fingerprint of the block that each was made for.
        prepare: what happens to a block's arguments in front of it, in the forward pass and once more in the backward
            pass; `None` leaves them. Save sets know the block alone.
        everything: policy of a save set of everything.
        later: what sets offload stays on the device, for whoever moves all of a stage at once: see `hosted`.
    """

    saves: Mapping[str, SaveSet]
    prepare: Callable[[Any], Any] | None = None
    everything: Callable[..., Any] = keep_everything
    later: bool = False

    @property
    def hosted(self) -> frozenset[str]:
        """Names that values have which are to be offloaded later."""
        names = {name for save in self.saves.values() for name in save.offload}
        return frozenset({_LATER + name for name in names} | {_given(name) for name in names})

    def __call__(self, block: BlockFunction, rolled: bool) -> BlockFunction:
        """The block as it runs."""

        def kept(*args: Any) -> Any:
            prepare = self.prepare
            ready = args if prepare is None else jax.eval_shape(prepare, args)
            closed, shapes = jax.make_jaxpr(block, return_shape=True)(*ready)
            program = inline(closed)
            save = _of(program, self.saves)
            tags = _tags(program, save, self.later)
            policy = self.everything if save.keep == (EVERYTHING,) else _policy(closed, ready, program, save)
            if self.later and isinstance(policy, KeepNamed):
                policy = KeepNamed(policy.keep | self.hosted)

            def run(consts: Any, args: Any) -> list[Any]:
                leaves = jax.tree.leaves(args if prepare is None else prepare(args))
                given = (*consts, *leaves)
                return program.run(given, lambda n, value: checkpoint_name(value, tags[n]) if n in tags else value)

            again = run_again(run, rolled=rolled, policy=policy)
            return jax.tree.unflatten(jax.tree.structure(shapes), again(closed.consts, args))

        return kept


def keeping(saves: Sequence[SaveSet]) -> Keeping:
    """What a `blocks.Treatment` needs to run every block under the save set made for it.

    Args:
        saves: one for each kind of block, told apart by fingerprint.

    Raises:
        StaleGraph: while tracing: a block that none of the sets was made for.
        UserError: two unlike sets for one block; while tracing: a name that the block has not.
    """
    by_block: dict[str, SaveSet] = {}
    for save in saves:
        if by_block.setdefault(save.block, save) != save:
            raise UserError(f"block {save.block}: got two save sets, expected one")

    return Keeping(by_block)


def _of(program: Program, by_block: Mapping[str, SaveSet]) -> SaveSet:
    found = program.fingerprint()
    if found not in by_block:
        made_for = ", ".join(sorted(by_block)) or "(none)"
        raise StaleGraph(
            f"the memory plan was made for block {made_for}, and this model has block {found}: another model, another "
            "version of it, or other shapes; make the plan anew"
        )
    return by_block[found]


def _tags(program: Program, save: SaveSet, later: bool) -> dict[int, str]:
    """The name to give each value that the set keeps and the block itself makes, by number."""
    marks = {**dict.fromkeys(save.keep, MARK), **dict.fromkeys(save.offload, _LATER if later else MARK)}
    return {number: marks[name] + name for number, name in program.names().items() if name in marks}


def _policy(closed: Any, args: Sequence[Any], program: Program, save: SaveSet) -> KeepNamed:
    own = set(program.names().values())
    others = [name for name in (*save.keep, *save.offload) if name not in own]
    if others:
        # residuals of operations with their own derivative carry the names that these gave
        graph = graph_of(closed, args)
        for name in others:
            value_index(graph, name)

    def marks(names: Sequence[str]) -> frozenset[str]:
        return frozenset(MARK + name if name in own else _given(name) for name in names)

    return KeepNamed(marks(save.keep), marks(save.offload))


def _given(name: str) -> str:
    """The name that an operation gave a residual of its own."""
    return re.sub(r" \(\d+\)$", "", name)


def keeping_or_not(save: SaveSet | None) -> Wrapper:
    """The wrapper of one set; of `None` the one that leaves blocks alone."""
    return as_it_is if save is None else keeping([save])
