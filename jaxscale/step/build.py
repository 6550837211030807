"""build: make the train step of an Experiment under a Plan, with every check that needs no trace of the step."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxscale.blocks import Treatment
from jaxscale.compat import is_backend_started
from jaxscale.compiler.kept_programs import keep_ordered_programs
from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import NothingQuantized
from jaxscale.memory.decision import Decision
from jaxscale.model_traits import ModelTraits
from jaxscale.optim.groups import describe_groups
from jaxscale.optim.optimizer import describe_warmup
from jaxscale.optim.update_guard import GuardedAdvance, UpdateGuard
from jaxscale.platforms.cpu_memory import keep_freed_memory
from jaxscale.platforms.cpu_threads import provide_threads
from jaxscale.platforms.detect import host_memory
from jaxscale.programs.elementwise import first_mixing_primitive
from jaxscale.recipe.combinations import check
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.requests import Facts
from jaxscale.sharding.memory_space import check_host_memory
from jaxscale.state.ema import WeightAverage
from jaxscale.state.extra import StateExtra
from jaxscale.state.layout import REPLICA_AXIS, Device, Layout, vocab_multiple
from jaxscale.state.pure_model import PureModel
from jaxscale.state.train_state import TrainState
from jaxscale.step.exchange import (
    CodecResiduals,
    ExchangeResult,
    exchange_by_codec,
    exchange_by_compiler,
    gradient_exchange_of,
    gradient_leaves_of,
    no_exchange,
)
from jaxscale.step.gradients import Objective, Whole
from jaxscale.step.host import advance_of, check_host_size, rate_verdict_of
from jaxscale.step.memory_resolve import decide_memory, depths_of_groups, describe_decision, treatment_of
from jaxscale.step.pipelined.asynchronous import AsyncPipeline, InFlight
from jaxscale.step.pipelined.gradients import Pipelined
from jaxscale.step.planned_model import PlannedModel
from jaxscale.step.replicas import Replicas
from jaxscale.step.resolve import ResolvedPlan, describe_products, needs_decision, resolve
from jaxscale.step.synchronous import SynchronousStep
from jaxscale.step.train_step import StepParts, TrainStep
from jaxscale.step.update import Update, describe_kinds, describe_state
from jaxscale.trees import leaf_bytes, named_leaves
from jaxscale.typing import Array, Bool


def build(experiment: Experiment, plan: Plan | None = None, *, devices: Sequence[Device] | None = None) -> TrainStep:
    """Build the train step of an experiment under a plan, and check the plan. Nothing is compiled or allocated yet.

    Args:
        experiment: what to train.
        plan: how to train; the experiment's own plan by default.
        devices: the devices to run on; all of JAX's by default.

    Raises:
        UserError: the plan does not fit the model, the batch or the devices.
    """
    plan = plan_of(experiment, plan)
    keep_ordered_programs()
    thread_note = provide_threads()
    if not is_backend_started():  # later, its threads have arenas of their own, so that little would be kept
        keep_freed_memory()
    experiment.optimizer.try_own(experiment.steps)
    device_list = list(jax.devices() if devices is None else devices)
    resolved_plan = resolve(experiment, plan, device_list, thread_note)
    assert resolved_plan.plan.mesh is not None
    assembly = Assembly.of(resolved_plan, resolved_plan.plan.mesh.build(device_list))
    assembly.check_combination()
    decision = None
    if needs_decision(resolved_plan.plan.memory):
        decision = decide_memory(assembly.objective(), device_list)
        group_depths = depths_of_groups(decision)
        # the step of a pipeline divides the few layers of a stage into groups by itself
        if group_depths and resolved_plan.stages is None:
            assembly = Assembly.of(resolved_plan, assembly.layout.mesh, group_depths)
    assembly.check(device_list, 0 if decision is None else decision.host_bytes)
    return TrainStep(assembly.parts(decision, device_list))


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """A resolved plan, with the model and the optimizer from which a train step is composed.

    Args:
        resolved_plan: the experiment, and the plan with its mesh and stages settled.
        pure_model: the model as pure functions.
        update: the optimizer under the plan; `Update` describes its parts.
        layout: the mesh, and the placement of every leaf of a train state without extras.
    """

    resolved_plan: ResolvedPlan
    pure_model: PureModel
    update: Update
    layout: Layout

    @classmethod
    def of(
        cls, resolved_plan: ResolvedPlan, mesh: Mesh | AbstractMesh, group_depths: tuple[int, ...] = ()
    ) -> "Assembly":
        """Return a resolved plan with its model, its optimizer and their layout.

        Args:
            resolved_plan: the experiment, and the plan with its mesh and stages settled.
            mesh: the mesh of the devices.
            group_depths: number of layers in each group of layers that the memory rule treats alike; () for one group.
        """
        experiment, plan, stages = resolved_plan.experiment, resolved_plan.plan, resolved_plan.stages
        layer_of_row = () if stages is None else stages.layer_of_row
        pure_model = PureModel.of(
            experiment.model,
            experiment.seed,
            vocab_multiple(plan),
            group_depths,
            layer_of_row,
            train=experiment.train,
            frozen_dtype=plan.precision,
        )
        update = Update.of(experiment, plan, pure_model, mesh)
        try:
            layout = Layout.of(pure_model, update.clipped_rule, plan, mesh)
        except NothingQuantized as error:
            raise UserError(_few_bits_text(plan, pure_model, error)) from None
        return cls(resolved_plan, pure_model, update, layout)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_combination(self) -> None:
        """Check the plan against every row of the tables in `recipe/combinations.py`.

        Raises:
            Incompatible: settings of the plan do not work together; the error gives the reason and an alternative.
        """
        plan, stages, update = self.resolved_plan.plan, self.resolved_plan.stages, self.update
        has_partial_updates = plan.asynchronous or (plan.offload.any and plan.offload.optimizer_state != "host")
        mixing_operation = (
            first_mixing_primitive(update.float32_rule, self.pure_model.abstract_params)
            if has_partial_updates
            else None
        )
        state_leaves = jax.tree.leaves(self.layout.abstract.optimizer)
        owner_names = self.layout.owner_names(update.clipped_rule)
        has_reshaped_state = mixing_operation is not None and any(
            leaf.ndim and not owner_name for leaf, owner_name in zip(state_leaves, owner_names, strict=True)
        )
        is_foreign = ModelTraits.of(self.resolved_plan.experiment.model).foreign
        is_mixed_within_layers = update.by_layer_flags is not None and not has_reshaped_state
        facts = Facts(
            plan,
            self.resolved_plan.experiment,
            state=tuple(
                name
                for name in named_leaves(self.pure_model.abstract_model_state)
                if name not in self.pure_model.frozen
            ),
            has_blocks=bool(self.pure_model.block_param_names),
            has_unlike_blocks=stages is not None and bool(stages.chain),
            separate_blocks=() if stages is None or not is_foreign else stages.chain,
            has_copies=stages is not None and bool(stages.copy_transfers),
            mixing=None if is_mixed_within_layers else mixing_operation,
            has_reshaped_state=has_reshaped_state,
        )
        check(facts)

    def check(self, devices: Sequence[Device], host_activation_bytes: int) -> None:
        """Refuse settings of the plan that have no effect, or that need more host memory than there is.

        Args:
            devices: the devices to run on.
            host_activation_bytes: bytes of activations that each device keeps on the host for the backward pass.

        Raises:
            UserError: a setting is refused; the error gives the reason, and what to do instead.
        """
        experiment, plan, layout = self.resolved_plan.experiment, self.resolved_plan.plan, self.layout
        layout.check_axes_used(experiment.model)
        layout.check_blocks_split(self.pure_model)
        layout.check_zero_used(self.update.clipped_rule)
        check_effect(experiment, layout)
        if plan.offload.any:
            check_host_memory(devices, str(plan.offload))
        if host_activation_bytes:
            check_host_memory(devices, f"memory {plan.memory}")
        check_host_size(layout, host_memory(), host_activation_bytes)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def objective(self, treatment: Treatment | None = None) -> Objective:
        """Return the `Objective` of the model: its loss under the plan.

        Args:
            treatment: how the blocks of the model run; `None` before the memory rule has made its decision.
        """
        plan, experiment, stages = self.resolved_plan.plan, self.resolved_plan.experiment, self.resolved_plan.stages
        planned = PlannedModel(experiment, plan, self.pure_model, self.layout, treatment)
        return Whole(planned) if stages is None else Pipelined(planned, stages)

    def parts(self, decision: Decision | None, devices: Sequence[Device]) -> StepParts:
        """Compose the parts of the train step, and return them.

        Args:
            decision: the values that the blocks keep; `None` if the memory rule does not depend on the blocks.
            devices: the devices to run on.
        """
        plan, update, experiment, layout = (
            self.resolved_plan.plan,
            self.update,
            self.resolved_plan.experiment,
            self.layout,
        )
        lines = [self.resolved_plan.line, *describe_frozen(self.pure_model), *describe_ignored_axes(self.pure_model)]
        lines += describe_groups(experiment.optimizer, update.param_infos)
        lines += describe_warmup(experiment.optimizer, experiment.steps)
        if decision is not None:
            lines.append(describe_decision(decision, devices[0].platform))
        lines += describe_products(plan, devices[0])
        if self.pure_model.tensor_dims and experiment.optimizer.custom is None:
            lines.append(describe_kinds(update.param_infos))
        lines += describe_state(plan, layout.abstract.optimizer, self.pure_model.parameters)
        objective = self.objective(treatment_of(plan, decision, layout.platform))
        extras: tuple[StateExtra, ...] = ()
        async_pipeline = replicas = None
        if plan.asynchronous:
            assert isinstance(objective, Pipelined)
            async_pipeline = AsyncPipeline(objective.planned, objective.stages, update.clipped_rule)
            objective, layout = async_pipeline.synchronous, async_pipeline.layout
            gradient_exchange = async_pipeline.gradient_exchange
            step_function, extras = async_pipeline.step, (InFlight(async_pipeline),)
        else:
            gradient_exchange = gradient_exchange_of(plan, self.pure_model, layout)
            if gradient_exchange is not None:
                extras = (CodecResiduals(gradient_exchange, experiment.optimizer, plan.diloco is None),)
            manual_axes = () if plan.diloco is None else (REPLICA_AXIS,)
            advance = advance_of(plan, update, layout, UpdateGuard(experiment.guard.update, manual_axes))
            if plan.diloco is not None:
                displacement_leaves = gradient_leaves_of(plan, self.pure_model, layout)
                replicas = Replicas(
                    plan.diloco,
                    layout,
                    update.clipped_rule,
                    displacement_leaves,
                    UpdateGuard(experiment.guard.update),
                    gradient_exchange,
                )
                extras = (*extras, replicas)
                gradient_fn, exchange = functools.partial(replicas.gradients, objective), no_exchange
                update_fn = functools.partial(replicas.update, advance)
            else:
                if gradient_exchange is None:
                    gradient_fn, exchange = objective.gradients, exchange_by_compiler(layout)
                else:
                    gradient_fn = objective.gradients_by_replica
                    exchange = exchange_by_codec(gradient_exchange, update.messages, layout)
                update_fn = functools.partial(_update_shared_weights, advance)
                if experiment.optimizer.ema is not None:
                    weight_average = WeightAverage(experiment.optimizer.ema)
                    extras, update_fn = (*extras, weight_average), weight_average.update_fn_with_average(update_fn)
            step_function = SynchronousStep(
                gradient_fn,
                exchange,
                update_fn,
                experiment.guard,
                rate_verdict_of(plan, update, experiment),
                frozenset(self.pure_model.frozen),
            )
        return StepParts(
            objective,
            layout,
            update,
            step_function,
            extras=extras,
            async_pipeline=async_pipeline,
            replicas=replicas,
            gradient_exchange=gradient_exchange,
            stages=self.resolved_plan.stages,
            decision=decision,
            lines=tuple(lines),
        )


def _few_bits_text(plan: Plan, pure_model: PureModel, error: NothingQuantized) -> str:
    """Return the error message for a plan that specifies quantized moments, but would quantize none."""
    shape_by_name = {
        name: leaf.shape for name, leaf in named_leaves(pure_model.abstract_params).items() if len(leaf.shape) > 1
    }
    largest_name = max(shape_by_name, key=lambda name: math.prod(shape_by_name[name]), default=None)
    largest_text = ""
    if largest_name is not None and not error.reason:
        largest_text = (
            f" The largest matrix of this model is {largest_name}, of "
            f"{math.prod(shape_by_name[largest_name]):,} numbers."
        )
    return (
        f"plan.state.moments {plan.state.moments} would quantize no leaf of the optimizer's state.{error.reason} In "
        f"few bits are the moments of matrices of {error.least:,} numbers or more outside embeddings, head and norms."
        f"{largest_text} Leave plan.state.moments out, which keeps float32"
    )


def describe_ignored_axes(pure_model: PureModel) -> list[str]:
    """Return a line for the user on axis names of the module that are not logical axes; [] if there are none."""
    ignored_axes = pure_model.ignored_axes
    if not ignored_axes:
        return []
    return [
        f"axes {', '.join(ignored_axes)}: these names of the model are not logical axes, so their dims are kept "
        f"whole; ForeignModel(axes={{{ignored_axes[0]!r}: 'mlp'}}, ...) would give one a logical axis"
    ]


def describe_frozen(pure_model: PureModel) -> list[str]:
    """Return lines for the user on the trained and the quantized parameters; [] if all parameters are trained."""
    if not pure_model.frozen:
        return []
    trained_names = list(named_leaves(pure_model.abstract_params))
    parameter_count = pure_model.parameters + pure_model.frozen_parameters
    more_text = f" and {len(trained_names) - 4} more" if len(trained_names) > 4 else ""
    lines = [
        f"train {pure_model.train}: {pure_model.parameters:,} of {parameter_count:,} parameters, "
        f"in {', '.join(trained_names[:4])}{more_text}; the others are kept unchanged, in {pure_model.frozen_dtype}"
    ]
    few_bit_weights = pure_model.few_bit_weights.values()
    if few_bit_weights:
        number_count = sum(math.prod(weight.shape) for weight in few_bit_weights)
        byte_count = sum(leaf_bytes(array) for weight in few_bit_weights for array in (weight.codes, weight.scale))
        formats_text = " and ".join(sorted({weight.format for weight in few_bit_weights}))
        lines.append(
            f"base {formats_text}: {number_count:,} parameters that are not trained are in few bits, at "
            f"{byte_count / number_count:.2f} bytes each with their scales"
        )
    return lines


def _update_shared_weights(
    advance: GuardedAdvance, exchange_result: ExchangeResult, state: TrainState, is_good: Bool[Array, ""]
) -> tuple[TrainState, Bool[Array, ""]]:
    """Update weights that all replicas share, if the step is good; return the new state, and whether it was updated."""
    gradients, clip_norm = exchange_result.gradients, exchange_result.clip_norms
    params, optimizer_state, is_good = advance(gradients, state.optimizer, state.params, clip_norm, is_good)
    return dataclasses.replace(state, params=params, optimizer=optimizer_state), is_good


def check_effect(experiment: Experiment, layout: Layout) -> None:
    """Refuse settings of the plan that have no effect, as far as the shapes of arrays show it.

    `traced_checks.py` checks the settings whose effect only a trace shows.

    Args:
        experiment: the experiment, whose data may specify the shapes of a batch.
        layout: the layout of the train state, under the plan.

    Raises:
        UserError: a setting would have no effect; the error gives the reason, and what to do instead.
    """
    plan, state_leaves = layout.plan, jax.tree.leaves(layout.abstract.optimizer)
    row_length = _target_position_count(experiment)
    if plan.kernels.loss_chunk is not None and plan.kernels.scores == "auto" and row_length is not None:
        shard_count = math.prod(layout.mesh.shape[axis] for axis in layout.rules.inner_seq)
        local_length = row_length // shard_count if row_length % shard_count == 0 else row_length
        if plan.kernels.loss_chunk >= local_length:
            local_text = f", {local_length} on each of {shard_count} devices" if local_length != row_length else ""
            raise UserError(
                f"loss_chunk {plan.kernels.loss_chunk}: a row has {row_length} target positions{local_text}, so one "
                f"chunk would hold all of them; take less than {local_length}, or leave loss_chunk out"
            )
    if plan.offload.optimizer_state == "streamed" and not any(leaf.ndim for leaf in state_leaves):
        rule_names = [
            "the custom rule" if member.custom is not None else member.name
            for member in experiment.optimizer.members().values()
        ]
        rule_name = " and ".join(dict.fromkeys(rule_names))
        raise UserError(
            f"optimizer_state streamed: {rule_name} keeps no array that could lie on the host; leave optimizer_state "
            "out, or put the weights on the host with weights=host"
        )
    pipeline = plan.pipeline
    if plan.asynchronous and pipeline is not None and pipeline.synchronous_steps >= experiment.steps:
        raise UserError(
            f"synchronous_steps {pipeline.synchronous_steps} with pipeline {pipeline}: the run has {experiment.steps} "
            "steps, so every step would be synchronous; take fewer, or a synchronous pipeline"
        )


def _target_position_count(experiment: Experiment) -> int | None:
    """Return the number n of target positions in a row; `None` if the data specifies no targets of shape (rows, n)."""
    shapes_of = getattr(experiment.data, "shapes", None)
    target_shape: Sequence[int] = () if shapes_of is None else shapes_of(experiment.batch).get("targets", ((), ""))[0]
    return target_shape[1] if len(target_shape) == 2 else None
