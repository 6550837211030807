"""Exchange: what replicas send one another in a step, and what a codec of it keeps in the train state.

Under a codec the gradients of each replica come from `Objective.gradients_apart`. They are split over the devices
inside a replica as far as they divide, whatever ZeRO's stage: no two devices of a replica send the same number.
`replicas/reduce.py` makes their mean, which goes where the plan has its gradients.
"""

import dataclasses
import zlib
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jaxscale.layers.stack import in_one_stack
from jaxscale.offload.updates import global_norm
from jaxscale.optim.one_bit import Messages
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.plan import Plan
from jaxscale.replicas.codec import Codec
from jaxscale.replicas.reduce import RESIDUAL, CodecStates, GradientExchange, GradientLeaf
from jaxscale.sharding.zero import split
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.state.naming import Naming, Part, plain
from jaxscale.state.pure_model import PureModel
from jaxscale.state.train_state import TrainState
from jaxscale.step.compiled_checks import bytes_over, check_codec
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Float, Params, PyTree
from jaxscale.values.byte_sizes import bytes_at_least

REDUCE = "reduce"
"""Name of the extra."""
ONE, ALL = "one", "all"


def stage_of(plan: Plan, pure_model: PureModel, layout: Layout) -> GradientExchange | None:
    """A plan's codec at work on the gradients of its model; `None` where XLA reduces.

    Raises:
        UserError: the codec is for none of the gradients.
    """
    if not isinstance(plan.reduce, Codec):
        return None
    leaves = leaves_of_gradients(plan, pure_model, layout)
    return GradientExchange(plan.reduce, layout.mesh, leaves, REPLICA_AXIS, pure_model.seed)


def leaves_of_gradients(plan: Plan, pure_model: PureModel, layout: Layout) -> dict[str, GradientLeaf]:
    """Gradients as they cross the replica axis: split over all devices of a replica as far as they divide."""
    leaves = {}
    for name, leaf in named_leaves(pure_model.params).items():
        spec, names = layout.placements[name].gradient, pure_model.names.get(name)
        for axis in ("fsdp", "data", *((PIPE_AXIS,) if plan.pipeline is not None else ())):
            spec = split(leaf.shape, names, spec, layout.mesh, axis)
        stacked = pure_model.stacked(name)
        stack, first = in_one_stack(name) if stacked else (None, 0)
        leaves[name] = GradientLeaf(tuple(leaf.shape), spec, stacked, stack, first)
    return leaves


class Exchanged(NamedTuple):
    """What an update takes, once replicas have exchanged gradients.

    Args:
        gradients: means, where the plan has them; under DiLoCo each replica's own, along a first dim.
        norm: global norm of the mean gradient, by which a step is judged.
        norms: that gradients are clipped by: `norm`, or each replica's own.
        metrics: of the exchange.
        extra: what it changes of `TrainState.extra`; taken where the step is good.
    """

    gradients: Params
    norm: Float[Array, ""]
    norms: Array
    metrics: dict[str, Array]
    extra: dict[str, CodecStates]


Exchange = Callable[[Params, TrainState], Exchanged]
"""From the gradients of a step, and the state before it, to what the update takes."""


def by_compiler(layout: Layout) -> Exchange:
    """No exchange: XLA has reduced the gradients, which are means.

    Args:
        layout: where they lie.
    """

    def exchange(gradients: Params, state: TrainState) -> Exchanged:
        norm = global_norm(gradients, layout.gradients)
        return Exchanged(gradients, norm, norm, {}, {})

    return exchange


def by_codec(stage: GradientExchange, messages: Messages | None, layout: Layout) -> Exchange:
    """The mean of what replicas send by a codec.

    Its norm is the global norm of the mean gradient, or, where momenta are sent, the root of the mean square of the
    replicas' own.

    Args:
        stage: of the codec.
        messages: what each replica sends in place of its gradient; `None` where it sends that.
        layout: where gradients lie.
    """

    def exchange(gradients: Params, state: TrainState) -> Exchanged:
        sent, updates = None, state.step
        if messages is not None:
            sent = jax.vmap(messages, in_axes=(0, None))(gradients, state.optimizer)
            updates = messages.count(state.optimizer)
            gradients = sent.message
        placed = {}
        for name, gradient in named_leaves(gradients).items():
            spec = PartitionSpec(REPLICA_AXIS, *stage.leaves[name].spec)
            sharding = NamedSharding(layout.mesh, spec)
            placed[name] = jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), sharding)
        reduced = stage(placed, state.extra[REDUCE], updates)
        mean = jax.tree_util.tree_map_with_path(
            lambda path, sharding: jax.lax.with_sharding_constraint(reduced.mean[path_name(path)], sharding),
            layout.gradients,
        )
        norm = global_norm(mean, layout.gradients)
        if sent is not None:
            norm = jnp.where(sent.frozen[0], jnp.sqrt(jnp.mean(jnp.square(sent.norm))), norm)
        metrics = {"residual_norm": reduced.residual_norm, "wire_bytes": stage.wire_bytes_at(updates)}
        return Exchanged(mean, norm, norm, metrics, {REDUCE: reduced.states})

    return exchange


def none_yet(gradients: Params, state: TrainState) -> Exchanged:
    """No exchange: replicas train alone, and judge a step together by the root of the mean square of their norms."""
    norms = jax.vmap(optax.tree.norm)(gradients)
    return Exchanged(gradients, jnp.sqrt(jnp.mean(jnp.square(norms))), norms, {}, {})


def describe_codec(stage: GradientExchange, optimizer: Optimizer) -> list[str]:
    """Lines for the user on a codec, before the first step."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class CodecResiduals:
    """The extra of a codec: what it keeps of each gradient, by name.

    Args:
        stage: of the codec.
        optimizer: of the experiment.
        each_step: the codec is at work in every step; else when replicas meet.
    """

    stage: GradientExchange
    optimizer: Optimizer
    each_step: bool = True
    name: str = dataclasses.field(default=REDUCE, init=False)
    label: str = dataclasses.field(default="residuals", init=False)

    def placed(self, layout: Layout) -> Layout:
        """As of `StateExtra`."""
        return layout.with_extra(self.name, self.stage.abstract())

    def init(self, state: TrainState) -> CodecStates:
        """As of `StateExtra`."""
        return self.stage.init()

    def saved(self, state: TrainState) -> TrainState:
        """As of `StateExtra`: the states of every replica, and what one would have in place of all."""
        states = state.extra[self.name]
        return _with(state, self.name, {ALL: states, ONE: self.stage.merged(states)})

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """As of `StateExtra`."""
        return _with(abstract, self.name, {ALL: self.stage.abstract(), ONE: self.stage.abstract(one=True)})

    def loaded(self, state: TrainState) -> TrainState:
        """As of `StateExtra`.

        With another number of replicas each takes what one would have; what that lacks too begins anew.
        """
        value, stage = state.extra[self.name], self.stage
        states = value[ALL]
        if not lacks(states):
            return _with(state, self.name, states)
        one = {name: {key: part for key, part in mine.items() if part is not None} for name, mine in value[ONE].items()}
        fresh = jax.jit(stage.spread, out_shardings=stage.shardings())(one)
        states = {
            name: {key: fresh[name][key] if part is None else part for key, part in mine.items()}
            for name, mine in states.items()
        }
        return _with(state, self.name, states)

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """As of `StateExtra`: a residual is taken apart as its parameter is, behind the dim of replicas.

        Arrays of one name have one shape: what is not shaped as its gradient is named by the codec and the shards too.
        """
        stage = self.stage

        def part(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Part:
            which, name, key = (step.key for step in path)
            count = f"of_{stage.replicas}" if which == ALL else ONE
            if key == RESIDUAL:
                prefix = f"{self.name}/{count}/{key}/{name}"
                return naming.behind_replicas(which == ALL, leaf, lambda one: naming.of_param(prefix, (), name, one))
            gradient = stage.leaves[name]
            fields = ", ".join(
                f"{field.name}={getattr(gradient, field.name)!r}" for field in dataclasses.fields(gradient)
            )
            # checkpoints hold the hash: a class may get another name, and this text keeps its own
            facts = f"({str(stage.codec)!r}, Leaf({fields}), {tuple(stage.mesh.shape.items())[1:]!r})"
            return plain(f"{self.name}/{count}/{stage.codec} {zlib.crc32(facts.encode()):08x}/{key}/{name}", leaf)

        return jax.tree_util.tree_map_with_path(part, abstract.extra[self.name])

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """As of `StateExtra`."""
        asked = [name.split("/") for name in wanted if name.startswith(f"{self.name}/")]
        missing = [parts for parts in asked if "/".join(parts) not in names]
        if not any(parts[1] != ONE for parts in missing):
            return ""
        lost = sorted({parts[2].split(" ")[0] for parts in missing if parts[1] == ONE} - {RESIDUAL})
        if any(parts[1:3] == [ONE, RESIDUAL] for parts in missing):
            return f"; it holds nothing of what reduce {self.stage.codec} keeps: that begins anew"
        spread = any(parts[2] == RESIDUAL for parts in missing)
        note = "; what replicas owed goes on as its mean" * spread
        return note + f"; the rest of what reduce {self.stage.codec} keeps begins anew" * bool(lost)

    def describe(self) -> list[str]:
        """As of `StateExtra`; a codec of meetings is described with them."""
        return describe_codec(self.stage, self.optimizer) if self.each_step else []

    def check(self, program: CompiledProgram) -> None:
        """As of `StateExtra`: what crosses the codec's axis."""
        if self.each_step:
            stage, slices = self.stage, program.slices
            check_codec(
                stage, bytes_over(program.collectives, stage.axis, stage.replicas, slices=slices), slices=slices
            )


def _with(state: TrainState, name: str, value: PyTree) -> TrainState:
    return dataclasses.replace(state, extra={**state.extra, name: value})
