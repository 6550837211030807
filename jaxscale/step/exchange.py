"""Exchange: how replicas average their gradients in a step, and the state that a codec keeps between steps.

A codec compresses the gradients that replicas send. The residual of a gradient is the part that the codec has not sent
yet, and sends in later steps. A `GradientExchange` applies one codec to all gradients of the model.

Under a codec, `Objective.gradients_by_replica` computes the gradients of each replica. Under every ZeRO stage, each
gradient that has an evenly divisible dim is then split over the devices of its replica, so no two devices of a replica
send the same values. `replicas/reduce.py` computes the mean gradients, which the plan's layout then places.
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
from jaxscale.sharding.zero import split_spec
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.state.naming import Naming, Part, part_of_whole
from jaxscale.state.pure_model import PureModel
from jaxscale.state.train_state import TrainState
from jaxscale.step.compiled_checks import bytes_over, check_codec
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Float, Params, PyTree
from jaxscale.values.byte_sizes import bytes_at_least

REDUCE = "reduce"
"""Name of the `StateExtra` of a codec."""
ONE_REPLICA, ALL_REPLICAS = "one", "all"
"""Keys of the extra in a checkpoint: for states merged over the replicas, and for the states of every replica."""


def gradient_exchange_of(plan: Plan, pure_model: PureModel, layout: Layout) -> GradientExchange | None:
    """Return the exchange of the model's gradients by the plan's codec; `None` if XLA reduces them.

    Raises:
        UserError: the codec supports none of the gradients.
    """
    if not isinstance(plan.reduce, Codec):
        return None
    gradient_leaves = gradient_leaves_of(plan, pure_model, layout)
    return GradientExchange(plan.reduce, layout.mesh, gradient_leaves, REPLICA_AXIS, pure_model.seed)


def gradient_leaves_of(plan: Plan, pure_model: PureModel, layout: Layout) -> dict[str, GradientLeaf]:
    """Return the shape and placement of each gradient that replicas send, by the name of its parameter.

    Each gradient is split over the devices of a replica, along dims that can be split evenly.

    Args:
        plan: the plan, with or without a pipeline.
        pure_model: the model as pure functions.
        layout: the mesh, and the placements of gradients before this split.
    """
    gradient_leaves = {}
    for name, abstract_param in named_leaves(pure_model.abstract_params).items():
        shape, axis_names = tuple(abstract_param.shape), pure_model.axis_names.get(name)
        spec = layout.placements[name].gradient
        for axis in ("fsdp", "data", *((PIPE_AXIS,) if plan.pipeline is not None else ())):
            spec = split_spec(shape, axis_names, spec, layout.mesh, axis)
        is_stacked = pure_model.is_stacked(name)
        stack_name, first_layer = in_one_stack(name) if is_stacked else (None, 0)
        gradient_leaves[name] = GradientLeaf(shape, spec, is_stacked, stack_name, first_layer)
    return gradient_leaves


class ExchangeResult(NamedTuple):
    """The inputs of an update, after replicas have exchanged gradients.

    Args:
        gradients: mean gradients, placed by the plan; under DiLoCo each replica's own gradients along a first dim.
        norm: global norm of the mean gradients, or a substitute for that norm; the guard judges the step by `norm`.
        clip_norms: the norm by which gradients are clipped: `norm`, or under DiLoCo an array of the replicas' norms.
        metrics: metrics of the exchange, by name.
        extra: new values of entries of `TrainState.extra`, by name; the step stores them only if it is good.
    """

    gradients: Params
    norm: Float[Array, ""]
    clip_norms: Array
    metrics: dict[str, Array]
    extra: dict[str, CodecStates]


Exchange = Callable[[Params, TrainState], ExchangeResult]
"""A function from the gradients of a step and the state before the step to the inputs of the update."""


def exchange_by_compiler(layout: Layout) -> Exchange:
    """Return an `Exchange` that sends nothing, for gradients that XLA has already averaged.

    Args:
        layout: the layout of the train state, with the placements of the gradients.
    """

    def exchange(gradients: Params, state: TrainState) -> ExchangeResult:
        norm = global_norm(gradients, layout.gradient_shardings)
        return ExchangeResult(gradients, norm, norm, {}, {})

    return exchange


def exchange_by_codec(gradient_exchange: GradientExchange, messages: Messages | None, layout: Layout) -> Exchange:
    """Return an `Exchange` that sends gradients by a codec and computes their mean.

    The `norm` of its result is the global norm of the mean gradients. If replicas send momenta instead, `norm` is the
    root mean square of the norms of the replicas' own gradients.

    Args:
        gradient_exchange: the exchange of gradients by the codec.
        messages: function that computes the momenta that each replica sends (1-bit Adam and LAMB); `None` if replicas
            send gradients.
        layout: the layout of the train state, with the placements of the gradients.
    """

    def exchange(gradients: Params, state: TrainState) -> ExchangeResult:
        replica_messages, arrays_to_send, update_count = None, gradients, state.step
        if messages is not None:
            replica_messages = jax.vmap(messages, in_axes=(0, None))(gradients, state.optimizer)
            arrays_to_send, update_count = replica_messages.message, messages.count(state.optimizer)
        array_by_name = {}
        for name, array in named_leaves(arrays_to_send).items():
            spec = PartitionSpec(REPLICA_AXIS, *gradient_exchange.leaves[name].spec)
            sharding = NamedSharding(layout.mesh, spec)
            array_by_name[name] = jax.lax.with_sharding_constraint(array.astype(jnp.float32), sharding)
        reduction = gradient_exchange(array_by_name, state.extra[REDUCE], update_count)
        means = jax.tree_util.tree_map_with_path(
            lambda path, sharding: jax.lax.with_sharding_constraint(reduction.mean[path_name(path)], sharding),
            layout.gradient_shardings,
        )
        norm = global_norm(means, layout.gradient_shardings)
        if replica_messages is not None:
            norm = jnp.where(
                replica_messages.is_momentum[0], jnp.sqrt(jnp.mean(jnp.square(replica_messages.norm))), norm
            )
        wire_bytes = gradient_exchange.wire_bytes_at(update_count)
        metrics = {"residual_norm": reduction.residual_norm, "wire_bytes": wire_bytes}
        return ExchangeResult(means, norm, norm, metrics, {REDUCE: reduction.states})

    return exchange


def no_exchange(gradients: Params, state: TrainState) -> ExchangeResult:
    """Return the gradients unchanged: the `Exchange` of replicas that train alone and send no gradients.

    The `norm` of the result is the root mean square of the norms of the replicas' gradients.
    """
    replica_norms = jax.vmap(optax.tree.norm)(gradients)
    return ExchangeResult(gradients, jnp.sqrt(jnp.mean(jnp.square(replica_norms))), replica_norms, {}, {})


def describe_codec(gradient_exchange: GradientExchange, optimizer: Optimizer) -> list[str]:
    """Return lines for the user on a codec, to print before the first step."""
    codec, later_lines = gradient_exchange.codec, []
    last_phase_start, _ = codec.timetable[-1]
    if last_phase_start:
        later_lines.append(f"reduce {codec}: more bytes are sent in each step before step {last_phase_start}")
    for member in optimizer.members().values():
        option_and_decay = member.momentum_after()
        if not (codec.late and codec.feedback and option_and_decay):
            continue
        option_name, decay = option_and_decay
        later_lines.append(
            f"reduce {codec} with {member.name}, {option_name} {decay:g}: this momentum repeats gradients that arrive "
            f"many steps late, which raises the loss (0.2 nats of 2.3 in 400 steps at 1 %); take {option_name} 0, or "
            "codec dgc, which has SGD's momentum built in"
        )
    plain_count, leaf_count = len(gradient_exchange.plain_names), len(gradient_exchange.leaves)
    small_text = f"; {plain_count} of {leaf_count} gradients are small and sent as float32" if plain_count else ""
    wire_bytes, bytes_ratio = gradient_exchange.wire_bytes, gradient_exchange.exact_bytes / gradient_exchange.wire_bytes
    return [
        f"reduce {codec}: {bytes_at_least(wire_bytes)} per device and step over {gradient_exchange.axis}, "
        f"{bytes_ratio:.1f} times fewer than float32{small_text}",
        *later_lines,
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class CodecResiduals:
    """The `StateExtra` of a codec: the codec's states for each gradient, by the gradient's name.

    Args:
        gradient_exchange: the exchange of gradients by the codec.
        optimizer: the experiment's optimizer.
        is_used_in_every_step: whether the codec runs in every step; if not, the codec runs when DiLoCo's replicas meet.
        name: key of this extra in `TrainState.extra`.
        label: name of this extra in tables of memory.
    """

    gradient_exchange: GradientExchange
    optimizer: Optimizer
    is_used_in_every_step: bool = True
    name: str = dataclasses.field(default=REDUCE, init=False)
    label: str = dataclasses.field(default="residuals", init=False)

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout of a train state with the codec's states, given the layout without them."""
        return layout.with_extra(self.name, self.gradient_exchange.abstract_states())

    def init(self, state: TrainState) -> CodecStates:
        """Return the codec's initial states."""
        return self.gradient_exchange.init()

    def to_saved(self, state: TrainState) -> TrainState:
        """Return the train state for a checkpoint, with the codec states of every replica and their merged states."""
        states = state.extra[self.name]
        return _with_extra(state, self.name, {ALL_REPLICAS: states, ONE_REPLICA: self.gradient_exchange.merge(states)})

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the shapes, dtypes and placements of the train state that `to_saved` returns."""
        abstract_states = self.gradient_exchange.abstract_states()
        abstract_merged_states = self.gradient_exchange.abstract_states(is_merged=True)
        return _with_extra(abstract, self.name, {ALL_REPLICAS: abstract_states, ONE_REPLICA: abstract_merged_states})

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the train state of a step, from the one that a checkpoint holds.

        If the number of replicas has changed, each replica starts from the merged states. An array that the merged
        states lack starts from its initial value.
        """
        saved_states, saved_merged_states = state.extra[self.name][ALL_REPLICAS], state.extra[self.name][ONE_REPLICA]
        if not lacks(saved_states):
            return _with_extra(state, self.name, saved_states)
        merged_states = {
            name: {key: array for key, array in array_by_key.items() if array is not None}
            for name, array_by_key in saved_merged_states.items()
        }
        shardings = self.gradient_exchange.shardings()
        spread_states = jax.jit(self.gradient_exchange.spread, out_shardings=shardings)(merged_states)
        states = {
            name: {key: spread_states[name][key] if array is None else array for key, array in array_by_key.items()}
            for name, array_by_key in saved_states.items()
        }
        return _with_extra(state, self.name, states)

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return the `Part` of each state, which specifies how a checkpoint names and divides the state.

        A residual is divided into arrays as its parameter is, separately for each replica. The shape of any other state
        depends on the codec and on the gradient's shards, so the name of the state contains the codec, and a hash of
        the codec and the shards.
        """
        gradient_exchange = self.gradient_exchange

        def part_of(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Part:
            group, name, key = (entry.key for entry in path)  # group: ONE_REPLICA or ALL_REPLICAS
            has_replicas = group == ALL_REPLICAS
            replica_prefix = f"of_{gradient_exchange.replicas}" if has_replicas else ONE_REPLICA
            if key == RESIDUAL:
                prefix = f"{self.name}/{replica_prefix}/{key}/{name}"
                return naming.with_replica_dim(
                    has_replicas, leaf, lambda replica_leaf: naming.part_of_param(prefix, (), name, replica_leaf)
                )
            gradient_leaf = gradient_exchange.leaves[name]
            fields_text = ", ".join(
                f"{field.name}={getattr(gradient_leaf, field.name)!r}" for field in dataclasses.fields(gradient_leaf)
            )
            # checkpoints contain a hash of this text, so it contains `Leaf`, although the class is now `GradientLeaf`
            axes_and_sizes = tuple(gradient_exchange.mesh.shape.items())[1:]
            hashed_text = f"({str(gradient_exchange.codec)!r}, Leaf({fields_text}), {axes_and_sizes!r})"
            codec_text = f"{gradient_exchange.codec} {zlib.crc32(hashed_text.encode()):08x}"
            return part_of_whole(f"{self.name}/{replica_prefix}/{codec_text}/{key}/{name}", leaf)

        return jax.tree_util.tree_map_with_path(part_of, abstract.extra[self.name])

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user on states that a checkpoint lacks; empty if the step needs none of them.

        Args:
            saved_names: names of the arrays in the checkpoint.
            step_names: names of the arrays that the step restores.
        """
        step_word_lists = [name.split("/") for name in step_names if name.startswith(f"{self.name}/")]
        missing_word_lists = [words for words in step_word_lists if "/".join(words) not in saved_names]
        if not any(words[1] != ONE_REPLICA for words in missing_word_lists):
            return ""
        codec_text = f"reduce {self.gradient_exchange.codec}"
        lost_names = {words[2].split(" ")[0] for words in missing_word_lists if words[1] == ONE_REPLICA} - {RESIDUAL}
        if any(words[1:3] == [ONE_REPLICA, RESIDUAL] for words in missing_word_lists):
            return f"; it has no state of {codec_text}, which starts from its initial value"
        lacks_residuals = any(words[2] == RESIDUAL for words in missing_word_lists)
        note = "; each replica starts from the mean of the saved residuals" * lacks_residuals
        return note + f"; other state of {codec_text} starts from its initial value" * bool(lost_names)

    def describe(self) -> list[str]:
        """Return lines for the user on a codec that runs in every step; [] if only DiLoCo's meetings use the codec."""
        return describe_codec(self.gradient_exchange, self.optimizer) if self.is_used_in_every_step else []

    def check(self, program: CompiledProgram) -> None:
        """Compare the bytes that the compiled step sends over the codec's axis with the expected bytes."""
        if self.is_used_in_every_step:
            axis, replica_count = self.gradient_exchange.axis, self.gradient_exchange.replicas
            sent_bytes = bytes_over(program.collectives, axis, replica_count, slice_count=program.slice_count)
            check_codec(self.gradient_exchange, sent_bytes, slice_count=program.slice_count)


def _with_extra(state: TrainState, name: str, extra_value: PyTree) -> TrainState:
    """Return a train state in which the extra of this name has the value `extra_value`."""
    return dataclasses.replace(state, extra={**state.extra, name: extra_value})
