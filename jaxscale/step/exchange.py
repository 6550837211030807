"""Exchange: what replicas send one another in a step, and what a codec for it keeps in the train state.

A codec compresses what is sent. The residual is the difference between a gradient and what the codec sent of it, and
is sent in later steps. A stage is the exchange of all gradients by a codec (`GradientExchange`).
Under a codec the gradients of each replica come from `Objective.gradients_apart`. Under any ZeRO stage, they are
split over the devices inside a replica as far as their dims can be split evenly, so that no two of these devices send
the same number.
`replicas/reduce.py` computes their mean, which is then placed like the gradients of the plan.
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
"""Name of the `StateExtra` of a codec."""
ONE, ALL = "one", "all"
"""Keys of a saved extra: the states of a single replica in place of all, and the states of every replica."""


def stage_of(plan: Plan, pure_model: PureModel, layout: Layout) -> GradientExchange | None:
    """The exchange of the model's gradients by the plan's codec; `None` if XLA reduces them.

    Raises:
        UserError: the codec can be applied to none of the gradients.
    """
    if not isinstance(plan.reduce, Codec):
        return None
    leaves = leaves_of_gradients(plan, pure_model, layout)
    return GradientExchange(plan.reduce, layout.mesh, leaves, REPLICA_AXIS, pure_model.seed)


def leaves_of_gradients(plan: Plan, pure_model: PureModel, layout: Layout) -> dict[str, GradientLeaf]:
    """Shape and placement of each gradient that replicas send, by name.

    Each is split over the devices of a replica, along dims that can be split evenly.

    Args:
        plan: the plan, with or without a pipeline.
        pure_model: the model as pure functions.
        layout: the mesh, and the placements of gradients before this split.
    """
    leaf_of_gradient = {}
    for name, leaf in named_leaves(pure_model.params).items():
        spec, names = layout.placements[name].gradient, pure_model.names.get(name)
        for axis in ("fsdp", "data", *((PIPE_AXIS,) if plan.pipeline is not None else ())):
            spec = split(leaf.shape, names, spec, layout.mesh, axis)
        is_stacked = pure_model.stacked(name)
        stack, first_layer = in_one_stack(name) if is_stacked else (None, 0)
        leaf_of_gradient[name] = GradientLeaf(tuple(leaf.shape), spec, is_stacked, stack, first_layer)
    return leaf_of_gradient


class Exchanged(NamedTuple):
    """The inputs of an update, after replicas have exchanged gradients.

    Args:
        gradients: mean gradients, placed by the plan; under DiLoCo each replica's own gradients along a first dim.
        norm: global norm of the mean gradient, by which a step is judged good or bad.
        norms: norms that gradients are clipped by: `norm`, or under DiLoCo each replica's own.
        metrics: metrics of the exchange.
        extra: new values of entries of `TrainState.extra`, by name; kept only if the step is good.
    """

    gradients: Params
    norm: Float[Array, ""]
    norms: Array
    metrics: dict[str, Array]
    extra: dict[str, CodecStates]


Exchange = Callable[[Params, TrainState], Exchanged]
"""From the gradients of a step, and the state before it, to the inputs of the update."""


def by_compiler(layout: Layout) -> Exchange:
    """An `Exchange` that sends nothing, for gradients that XLA has reduced to their mean already.

    Args:
        layout: placements of the gradients.
    """

    def exchange(gradients: Params, state: TrainState) -> Exchanged:
        norm = global_norm(gradients, layout.gradients)
        return Exchanged(gradients, norm, norm, {}, {})

    return exchange


def by_codec(stage: GradientExchange, messages: Messages | None, layout: Layout) -> Exchange:
    """An `Exchange` that sends gradients by a codec and returns their mean.

    The norm is the global norm of the mean gradient. If momenta are sent instead, it is the root of the mean square of
    the norms of the replicas' own gradients.

    Args:
        stage: the exchange of gradients by the codec.
        messages: computes what each replica sends in place of its gradient; `None` if it sends its gradient.
        layout: placements of the gradients.
    """

    def exchange(gradients: Params, state: TrainState) -> Exchanged:
        momenta, updates = None, state.step
        if messages is not None:
            momenta = jax.vmap(messages, in_axes=(0, None))(gradients, state.optimizer)
            updates = messages.count(state.optimizer)
            gradients = momenta.message
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
        if momenta is not None:
            norm = jnp.where(momenta.frozen[0], jnp.sqrt(jnp.mean(jnp.square(momenta.norm))), norm)
        metrics = {"residual_norm": reduced.residual_norm, "wire_bytes": stage.wire_bytes_at(updates)}
        return Exchanged(mean, norm, norm, metrics, {REDUCE: reduced.states})

    return exchange


def none_yet(gradients: Params, state: TrainState) -> Exchanged:
    """The `Exchange` of replicas that train alone, which sends no gradients.

    The norm by which all replicas judge a step is the root of the mean square of their gradients' norms.
    """
    norms = jax.vmap(optax.tree.norm)(gradients)
    return Exchanged(gradients, jnp.sqrt(jnp.mean(jnp.square(norms))), norms, {}, {})


def describe_codec(stage: GradientExchange, optimizer: Optimizer) -> list[str]:
    """Lines for the user on a codec, before the first step."""
    lines, codec, (last_change, _) = [], stage.codec, stage.codec.timetable[-1]
    if last_change:
        lines.append(f"reduce {codec}: more bytes are sent in each step before step {last_change}")
    if codec.late and codec.feedback and (momentum := optimizer.momentum_after()):
        name, decay = momentum
        lines.append(
            f"reduce {codec} with {optimizer.name}, {name} {decay:g}: this momentum repeats gradients that arrive many "
            f"steps late, which costs loss (0.2 nats of 2.3 in 400 steps at 1 %); take {name} 0, or codec dgc, which "
            "has SGD's momentum built in"
        )
    small_text = f"; {len(stage.plain_names)} of {len(stage.leaves)} gradients are small and sent as float32"
    return [
        f"reduce {codec}: {bytes_at_least(stage.wire_bytes)} per device and step over {stage.axis}, "
        f"{stage.exact_bytes / stage.wire_bytes:.1f} times fewer than float32{small_text * bool(stage.plain_names)}",
        *lines,
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class CodecResiduals:
    """The extra of a codec: its state for each gradient, by the gradient's name.

    Args:
        stage: the exchange of gradients by the codec.
        optimizer: the experiment's optimizer.
        each_step: whether the codec runs in every step; if not, it runs when DiLoCo's replicas meet.
    """

    stage: GradientExchange
    optimizer: Optimizer
    each_step: bool = True
    name: str = dataclasses.field(default=REDUCE, init=False)
    label: str = dataclasses.field(default="residuals", init=False)

    def placed(self, layout: Layout) -> Layout:
        """As in `StateExtra`."""
        return layout.with_extra(self.name, self.stage.abstract_states())

    def init(self, state: TrainState) -> CodecStates:
        """As in `StateExtra`."""
        return self.stage.init()

    def saved(self, state: TrainState) -> TrainState:
        """As in `StateExtra`: the states of every replica, and the states of a single replica in place of all."""
        states = state.extra[self.name]
        return _with(state, self.name, {ALL: states, ONE: self.stage.merge(states)})

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """As in `StateExtra`."""
        return _with(
            abstract, self.name, {ALL: self.stage.abstract_states(), ONE: self.stage.abstract_states(is_merged=True)}
        )

    def loaded(self, state: TrainState) -> TrainState:
        """As in `StateExtra`.

        If the number of replicas has changed, each starts from the saved state of a single replica. An array that is
        missing there too starts from its initial value.
        """
        stage, states, one_replica = self.stage, state.extra[self.name][ALL], state.extra[self.name][ONE]
        if not lacks(states):
            return _with(state, self.name, states)
        merged = {name: {key: x for key, x in arrays.items() if x is not None} for name, arrays in one_replica.items()}
        spread_states = jax.jit(stage.spread, out_shardings=stage.shardings())(merged)
        states = {
            name: {key: spread_states[name][key] if array is None else array for key, array in arrays.items()}
            for name, arrays in states.items()
        }
        return _with(state, self.name, states)

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """As in `StateExtra`: a residual is taken apart like its parameter, behind the dim of replicas.

        Arrays of one name must have one shape. So an array whose shape is not its gradient's has the codec and a hash
        of the shards in its name too.
        """
        stage = self.stage

        def part(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Part:
            group, name, key = (entry.key for entry in path)  # group: ONE or ALL
            replica_prefix = f"of_{stage.replicas}" if group == ALL else ONE
            if key == RESIDUAL:
                prefix = f"{self.name}/{replica_prefix}/{key}/{name}"
                return naming.behind_replicas(group == ALL, leaf, lambda one: naming.of_param(prefix, (), name, one))
            gradient_leaf = stage.leaves[name]
            fields = ", ".join(
                f"{field.name}={getattr(gradient_leaf, field.name)!r}" for field in dataclasses.fields(gradient_leaf)
            )
            # checkpoints hold the hash: a class may get another name, and this text keeps its own
            facts = f"({str(stage.codec)!r}, Leaf({fields}), {tuple(stage.mesh.shape.items())[1:]!r})"
            return plain(
                f"{self.name}/{replica_prefix}/{stage.codec} {zlib.crc32(facts.encode()):08x}/{key}/{name}", leaf
            )

        return jax.tree_util.tree_map_with_path(part, abstract.extra[self.name])

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """As in `StateExtra`."""
        wanted_words = [name.split("/") for name in wanted if name.startswith(f"{self.name}/")]
        missing_words = [words for words in wanted_words if "/".join(words) not in names]
        if not any(words[1] != ONE for words in missing_words):
            return ""
        lost_states = {words[2].split(" ")[0] for words in missing_words if words[1] == ONE} - {RESIDUAL}
        if any(words[1:3] == [ONE, RESIDUAL] for words in missing_words):
            return f"; it has no state of reduce {self.stage.codec}, which starts from its initial value"
        lacks_residuals = any(words[2] == RESIDUAL for words in missing_words)
        note = "; each replica starts from the mean of the saved residuals" * lacks_residuals
        return note + f"; other state of reduce {self.stage.codec} starts from its initial value" * bool(lost_states)

    def describe(self) -> list[str]:
        """As in `StateExtra`; `Replicas.describe` covers a codec that runs when replicas meet."""
        return describe_codec(self.stage, self.optimizer) if self.each_step else []

    def check(self, program: CompiledProgram) -> None:
        """As in `StateExtra`: compare what is sent over the codec's axis."""
        if self.each_step:
            stage, slices = self.stage, program.slices
            check_codec(
                stage, bytes_over(program.collectives, stage.axis, stage.replicas, slices=slices), slices=slices
            )


def _with(state: TrainState, name: str, value: PyTree) -> TrainState:
    """The state with another value of one extra."""
    return dataclasses.replace(state, extra={**state.extra, name: value})
