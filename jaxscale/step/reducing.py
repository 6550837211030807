"""Reducing: where a plan's codec meets its mesh, its model and its train state.

Gradients of each replica come from `Objective.gradients_apart`, split over the devices inside a replica as far as they
divide, whatever ZeRO's stage: no two devices of a replica send the same number. `compression/reduce.py` makes their
mean, which goes where the plan has its gradients.
"""

import dataclasses
import zlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.compression.codec import Codec
from jaxscale.compression.codecs.one_bit import OneBit
from jaxscale.compression.reduce import RESIDUAL, Leaf, Stage
from jaxscale.errors import UserError
from jaxscale.layers.stack import in_one_stack
from jaxscale.optim.offloaded import global_norm
from jaxscale.optim.one_bit import Messages
from jaxscale.optim.optimizer import Optimizer
from jaxscale.sharding.zero import split
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.layout import PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Params
from jaxscale.values.byte_sizes import bytes_at_least

REDUCE = "reduce"
"""Prefix of what codecs keep, in a checkpoint; another plan leaves it behind."""
ONE, ALL = "one", "all"


def with_messages(experiment: Experiment, plan: Plan) -> Plan:
    """The plan of an optimizer whose replicas send momenta (1-bit Adam and LAMB): the codec that takes them, in it.

    Args:
        experiment: with its optimizer and steps.
        plan: with its mesh settled.

    Raises:
        UserError: the run ends before anything is sent in few bits.
    """
    messages, name = experiment.optimizer.messages(experiment.steps), experiment.optimizer.name
    if messages is None:
        return plan
    assert plan.mesh is not None
    if messages.freeze >= experiment.steps:
        raise UserError(
            f"optimizer.freeze: {name} would freeze its variance after {messages.freeze} updates, and the run has "
            f"{experiment.steps}: nothing would be sent in few bits; freeze earlier (0.15 to 0.25 of the run), or take "
            f"{name.removeprefix('one_bit_').replace('adam', 'adamw')}"
        )
    return dataclasses.replace(plan, reduce=OneBit(start=messages.freeze))


def stage_of(plan: Plan, functional: Functional, layout: Layout) -> Stage | None:
    """The reduce stage of a plan; `None` where XLA reduces.

    Raises:
        UserError: the codec is for none of the gradients.
    """
    if not isinstance(plan.reduce, Codec):
        return None
    leaves = leaves_of_gradients(plan, functional, layout)
    return Stage(plan.reduce, layout.mesh, leaves, REPLICA_AXIS, functional.seed)


def leaves_of_gradients(plan: Plan, functional: Functional, layout: Layout) -> dict[str, Leaf]:
    """Gradients as they cross the replica axis: split over all devices of a replica as far as they divide."""
    leaves = {}
    for name, leaf in named_leaves(functional.params).items():
        spec, names = layout.placements[name].gradient, functional.names.get(name)
        for axis in ("fsdp", "data", *((PIPE_AXIS,) if plan.pipeline is not None else ())):
            spec = split(leaf.shape, names, spec, layout.mesh, axis)
        stacked = functional.stacked(name)
        stack, first = in_one_stack(name) if stacked else (None, 0)
        leaves[name] = Leaf(tuple(leaf.shape), spec, stacked, stack, first)
    return leaves


def with_states(layout: Layout, stage: Stage | None) -> Layout:
    """The layout of a train state that has the codec's states in it."""
    if stage is None:
        return layout
    return dataclasses.replace(
        layout,
        state=dataclasses.replace(layout.state, reduce=stage.shardings()),
        abstract=dataclasses.replace(layout.abstract, reduce=stage.abstract()),
    )


def exchanged(
    stage: Stage, messages: Messages | None, gradients: Params, state: TrainState, layout: Layout
) -> tuple[Params, Array, Any, dict[str, Array]]:
    """The mean of what replicas send, its norm, the codec's states, and what of it goes to the metrics.

    Args:
        stage: of the codec.
        messages: what each replica sends in place of its gradient; `None` where it sends that.
        gradients: of each replica, along a first dim.
        state: before the step.
        layout: where gradients lie.

    Returns:
        The mean, placed as the plan has its gradients; the global norm of the mean gradient, or, where momenta are
        sent, the root of the mean square of the replicas' own; states; metrics.
    """
    own, updates = None, state.step
    if messages is not None:
        own, updates = (
            jax.vmap(messages, in_axes=(0, None))(gradients, state.optimizer),
            messages.count(state.optimizer),
        )
        gradients = own.message
    given = {}
    for name, gradient in named_leaves(gradients).items():
        spec = PartitionSpec(REPLICA_AXIS, *stage.leaves[name].spec)
        given[name] = jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), NamedSharding(layout.mesh, spec))
    found = stage(given, state.reduce, updates)
    mean = jax.tree_util.tree_map_with_path(
        lambda path, sharding: jax.lax.with_sharding_constraint(found.mean[path_name(path)], sharding),
        layout.gradients,
    )
    norm = global_norm(mean, layout.gradients)
    if own is not None:
        norm = jnp.where(own.frozen[0], jnp.sqrt(jnp.mean(jnp.square(own.norm))), norm)
    metrics = {"residual_norm": found.residual_norm, "wire_bytes": stage.wire_bytes_at(updates)}
    return mean, norm, found.states, metrics


def describe_reduce(stage: Stage | None, optimizer: Optimizer) -> list[str]:
    """What a user should know of the codec before the first step; nothing where there is none."""
    if stage is None:
        return []
    lines, codec, (last, _) = [], stage.codec, stage.codec.timetable[-1]
    if last:
        lines.append(f"reduce {codec}: more than that is sent before step {last}")
    if codec.late and codec.feedback and (carried := optimizer.momentum_after()):
        name, decay = carried
        lines.append(
            f"reduce {codec} with {optimizer.name}, {name} {decay:g}: what arrives many steps late is carried on by "
            f"that momentum, which costs loss (0.2 nats of 2.3 in 400 steps at 1 %); take {name} 0: codec dgc brings "
            "SGD's momentum with it"
        )
    few = f"; {len(stage.plain)} of {len(stage.leaves)} gradients are small and go as they are" if stage.plain else ""
    return [
        f"reduce {codec}: {bytes_at_least(stage.wire_bytes)} per device and step over {stage.axis}, "
        f"{stage.exact_bytes / stage.wire_bytes:.1f} times fewer than float32{few}",
        *lines,
    ]


# -- in checkpoints ----------------------------------------------------------------------------------------------------


def kept(stage: Stage, states: Any) -> dict[str, Any]:
    """States as a checkpoint holds them: those of every replica, and what one would have in place of all."""
    return {ALL: states, ONE: stage.merged(states)}


def kept_abstract(stage: Stage) -> dict[str, Any]:
    """Their shapes, dtypes and placements."""
    return {ALL: stage.abstract(), ONE: stage.abstract(one=True)}


def kept_prefix(stage: Stage, path: Any) -> tuple[str, str, bool, bool]:
    """Of a leaf of what is kept: the prefix of its name, its gradient, whether it is a residual, and of all replicas.

    Arrays of one name have one shape: what is not shaped as its gradient is named by the codec and the shards too.
    """
    which, name, key = (part.key for part in path)
    count = f"of_{stage.replicas}" if which == ALL else ONE
    if key == RESIDUAL:
        return f"{REDUCE}/{count}/{key}", name, True, which == ALL
    leaf = stage.leaves[name]
    mark = zlib.crc32(repr((str(stage.codec), leaf, tuple(stage.mesh.shape.items())[1:])).encode())
    return f"{REDUCE}/{count}/{stage.codec} {mark:08x}/{key}", name, False, which == ALL


def restored(stage: Stage, found: Mapping[str, Any]) -> Any:
    """The states of what `kept` gave, with `None` for what a checkpoint lacks.

    With another number of replicas each takes what one would have; what that lacks too begins anew.
    """
    every = found[ALL]
    if all(part is not None for mine in every.values() for part in mine.values()):
        return every
    one = {name: {key: part for key, part in mine.items() if part is not None} for name, mine in found[ONE].items()}
    fresh = jax.jit(stage.spread, out_shardings=stage.shardings())(one)
    return {
        name: {key: fresh[name][key] if part is None else part for key, part in mine.items()}
        for name, mine in every.items()
    }


def said_of_restored(stage: Stage | None, names: Container[str], wanted: Iterable[str]) -> str:
    """What of a codec's states a checkpoint with arrays of these names lacks, as a user should know; mostly nothing.

    Args:
        stage: of the step that goes on.
        names: of the checkpoint's arrays.
        wanted: names of the step's.
    """
    if stage is None:
        return ""
    asked = [name.split("/") for name in wanted if name.startswith(f"{REDUCE}/")]
    lacking = [parts for parts in asked if "/".join(parts) not in names]
    if not any(parts[1] != ONE for parts in lacking):
        return ""
    left = sorted({parts[2].split(" ")[0] for parts in lacking if parts[1] == ONE} - {RESIDUAL})
    if any(parts[1:3] == [ONE, RESIDUAL] for parts in lacking):
        return f"; it holds nothing of what reduce {stage.codec} keeps: that begins anew"
    spread = any(parts[2] == RESIDUAL for parts in lacking)
    said = "; what replicas owed goes on as its mean" * spread
    return said + f"; the rest of what reduce {stage.codec} keeps begins anew" * bool(left)
