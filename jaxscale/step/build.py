"""build: from an Experiment and a Plan to the train step, with every check that needs no tracing of the step."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxscale.blocks import Treatment
from jaxscale.compiler.kept_programs import keep_ordered_programs
from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.offload.updates import Advance
from jaxscale.platforms.cpu_threads import provide_threads
from jaxscale.platforms.detect import host_memory
from jaxscale.programs.elementwise import first_mixing
from jaxscale.recipe.combinations import check
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.requests import Facts
from jaxscale.sharding.memory_space import check_host_memory
from jaxscale.state.extra import StateExtra
from jaxscale.state.layout import Device, Layout, vocab_multiple
from jaxscale.state.pure_model import PureModel
from jaxscale.state.train_state import TrainState
from jaxscale.step.exchange import (
    CodecResiduals,
    ExchangeResult,
    exchange_by_codec,
    exchange_by_compiler,
    gradient_leaves_of,
    no_exchange,
)
from jaxscale.step.gradients import Objective, Whole
from jaxscale.step.host import advance_of, check_host_size
from jaxscale.step.memory_resolve import decide_memory, describe_decision, layers_of_groups, treatment_of
from jaxscale.step.pipelined.asynchronous import AsyncPipeline, InFlight
from jaxscale.step.pipelined.gradients import Pipelined
from jaxscale.step.planned_model import PlannedModel
from jaxscale.step.replicas import Replicas
from jaxscale.step.resolve import ResolvedPlan, describe_products, needs_decision, resolve
from jaxscale.step.synchronous import SynchronousStep
from jaxscale.step.train_step import StepParts, TrainStep
from jaxscale.step.update import Update, describe_state
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Bool


def build(experiment: Experiment, plan: Plan | None = None, *, devices: Sequence[Device] | None = None) -> TrainStep:
    """Build the train step of an experiment under a plan. Everything is checked; nothing is compiled or allocated yet.

    Args:
        experiment: what to train.
        plan: how to train it; the experiment's own plan by default.
        devices: the devices to run on; all of JAX's by default.

    Raises:
        UserError: the plan does not fit the model, the batch or the devices.
    """
    keep_ordered_programs()
    remark = provide_threads()
    devices = list(jax.devices() if devices is None else devices)
    resolved = resolve(experiment, experiment.plan if plan is None else plan, devices, remark)
    assert resolved.plan.mesh is not None
    assembly = Assembly.of(resolved, resolved.plan.mesh.build(devices))
    assembly.check_combination()
    decision = None
    if needs_decision(resolved.plan.memory):
        decision = decide_memory(assembly.objective(), devices)
        groups = layers_of_groups(decision)
        if groups and resolved.stages is None:  # a pipeline's step divides the few layers of a stage into groups itself
            assembly = Assembly.of(resolved, assembly.layout.mesh, groups)
    assembly.check(devices, 0 if decision is None else decision.host_bytes)
    return TrainStep(assembly.parts(decision, devices))


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """A resolved plan, with the model and the optimizer from which its train step is composed.

    Args:
        resolved: the experiment, and the plan with its mesh and stages settled.
        pure_model: the model as pure functions.
        update: the optimizer.
        layout: the placements of the arrays of model and optimizer.
    """

    resolved: ResolvedPlan
    pure_model: PureModel
    update: Update
    layout: Layout

    @classmethod
    def of(cls, resolved: ResolvedPlan, mesh: Mesh | AbstractMesh, groups: tuple[int, ...] = ()) -> "Assembly":
        """The model, its optimizer, and their layout.

        Args:
            resolved: the experiment, and the plan with its mesh and stages settled.
            mesh: the mesh of the devices.
            groups: number of layers in each group of layers that the memory rule treats alike; () for one group.
        """
        experiment, plan, stages = resolved.experiment, resolved.plan, resolved.stages
        stage_rows = () if stages is None else stages.rows
        pure_model = PureModel.of(experiment.model, experiment.seed, vocab_multiple(plan), groups, stage_rows)
        update = Update.of(experiment, plan, pure_model, mesh)
        return cls(resolved, pure_model, update, Layout.of(pure_model, update.whole, plan, mesh))

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_combination(self) -> None:
        """Check the plan against every row of `recipe/combinations.py`.

        Raises:
            Incompatible: two requests of the plan do not work together; the error gives the reason and an alternative.
        """
        plan, stages, update = self.resolved.plan, self.resolved.stages, self.update
        updates_slices = plan.asynchronous or (plan.offload.any and plan.offload.optimizer_state != "host")
        mixing = first_mixing(update.plain, self.pure_model.abstract_params) if updates_slices else None
        state_leaves = jax.tree.leaves(self.layout.abstract.optimizer)
        owners = self.layout.owners(update.whole)
        has_reshaped_state = mixing is not None and any(
            leaf.ndim and not owner for leaf, owner in zip(state_leaves, owners, strict=True)
        )
        mixes_by_layer = update.layers is not None and not has_reshaped_state
        facts = Facts(
            plan,
            self.resolved.experiment,
            state=tuple(named_leaves(self.pure_model.abstract_rest)),
            has_unlike_blocks=stages is not None and stages.chain is not None,
            has_copies=stages is not None and bool(stages.copies),
            mixing=None if mixes_by_layer else mixing,
            has_reshaped_state=has_reshaped_state,
        )
        check(facts)

    def check(self, devices: Sequence[Device], host_activation_bytes: int) -> None:
        """Refuse requests that have no effect, or that need more host memory than there is.

        Args:
            devices: the devices to run on.
            host_activation_bytes: bytes of activations that each device keeps on the host for the backward pass.

        Raises:
            UserError: a request is refused; the error says why, and what to do instead.
        """
        experiment, plan, layout = self.resolved.experiment, self.resolved.plan, self.layout
        layout.check_axes_used(experiment.model)
        layout.check_zero_used(self.update.whole)
        check_effect(experiment, layout)
        if plan.offload.any:
            check_host_memory(devices, str(plan.offload))
        if host_activation_bytes:
            check_host_memory(devices, f"memory {plan.memory}")
        check_host_size(layout, host_memory(), host_activation_bytes)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def objective(self, treatment: Treatment | None = None) -> Objective:
        """The loss of the model under its plan.

        Args:
            treatment: how its blocks run; `None` before the memory rule has its decision.
        """
        plan, experiment = self.resolved.plan, self.resolved.experiment
        planned = PlannedModel(experiment, plan, self.pure_model, self.layout, treatment)
        return Whole(planned) if self.resolved.stages is None else Pipelined(planned, self.resolved.stages)

    def parts(self, decision: Decision | None, devices: Sequence[Device]) -> StepParts:
        """Compose the parts of the train step, and return them.

        Args:
            decision: what the blocks keep; `None` if the memory rule does not depend on them.
            devices: the devices to run on.
        """
        plan, update, experiment, layout = self.resolved.plan, self.update, self.resolved.experiment, self.layout
        lines = [self.resolved.line]
        if decision is not None:
            lines.append(describe_decision(decision, devices[0].platform))
        lines += describe_products(plan, devices[0])
        lines += describe_state(plan, layout.abstract.optimizer, self.pure_model.parameters)
        objective = self.objective(treatment_of(plan, decision, layout.platform))
        extras: tuple[StateExtra, ...] = ()
        stream = replicas = None
        if plan.asynchronous:
            assert isinstance(objective, Pipelined)
            stream = AsyncPipeline(objective.planned, objective.stages, update.whole)
            objective, layout, codec = stream.synchronous, stream.layout, stream.gradient_exchange
            step_function, extras = stream.step, (InFlight(stream),)
        else:
            codec = gradient_exchange_of(plan, self.pure_model, layout)
            if codec is not None:
                extras = (CodecResiduals(codec, experiment.optimizer, plan.diloco is None),)
            advance = advance_of(plan, update, layout)
            if plan.diloco is not None:
                gradient_leaves = gradient_leaves_of(plan, self.pure_model, layout)
                replicas = Replicas(plan.diloco, layout, update.whole, gradient_leaves, codec)
                extras = (*extras, replicas)
                gradients, exchange = functools.partial(replicas.gradients, objective), no_exchange
                update_function = functools.partial(replicas.update, advance)
            else:
                gradients = objective.gradients if codec is None else objective.gradients_by_replica
                exchange = (
                    exchange_by_compiler(layout) if codec is None else exchange_by_codec(codec, update.messages, layout)
                )
                update_function = functools.partial(_update_shared, advance)
            step_function = SynchronousStep(gradients, exchange, update_function, experiment.guard)
        return StepParts(
            objective,
            layout,
            update,
            step_function,
            extras=extras,
            stream=stream,
            replicas=replicas,
            codec=codec,
            stages=self.resolved.stages,
            decision=decision,
            lines=tuple(lines),
        )


def _update_shared(advance: Advance, exchanged: ExchangeResult, state: TrainState, good: Bool[Array, ""]) -> TrainState:
    """The state after an update of weights that all replicas share."""
    params, optimizer = advance(exchanged.gradients, state.optimizer, state.params, exchanged.norms, good)
    return dataclasses.replace(state, params=params, optimizer=optimizer)


def check_effect(experiment: Experiment, layout: Layout) -> None:
    """Refuse requests that the shapes show to have no effect; `traced_checks.py` refuses others.

    Args:
        experiment: the experiment, whose data may specify the shapes of a batch.
        layout: the layout of its train state, under its plan.

    Raises:
        UserError: a request would have no effect; the error says why, and what to do instead.
    """
    plan, optimizer = layout.plan, layout.abstract.optimizer
    length = _positions(experiment)
    if plan.kernels.loss_chunk is not None and plan.kernels.scores == "auto" and length is not None:
        shards = math.prod(layout.mesh.shape[axis] for axis in layout.rules.inner_seq)
        local_length = length // shards if length % shards == 0 else length
        if plan.kernels.loss_chunk >= local_length:
            positions = f"{length} target positions"
            positions += f", {local_length} on each of {shards} devices" if local_length != length else ""
            raise UserError(
                f"loss_chunk {plan.kernels.loss_chunk}: a row has {positions}, so one chunk would hold all; take less "
                f"than {local_length}, or leave loss_chunk out"
            )
    if plan.offload.optimizer_state == "streamed" and not any(leaf.ndim for leaf in jax.tree.leaves(optimizer)):
        rule = "the rule" if experiment.optimizer.custom is not None else experiment.optimizer.name
        raise UserError(
            f"optimizer_state streamed: {rule} keeps no array that could lie on the host; leave optimizer_state out, "
            "or put the weights on the host with weights=host"
        )
    pipeline = plan.pipeline
    if plan.asynchronous and pipeline is not None and pipeline.synchronous_steps >= experiment.steps:
        raise UserError(
            f"synchronous_steps {pipeline.synchronous_steps} with pipeline {pipeline}: the run has {experiment.steps} "
            "steps, so every step would be synchronous; take fewer, or a synchronous pipeline"
        )


def _positions(experiment: Experiment) -> int | None:
    """Number of target positions in a row; `None` if the data specifies no shapes, or its targets have no positions."""
    shapes_of = getattr(experiment.data, "shapes", None)
    shape: Sequence[int] = () if shapes_of is None else shapes_of(experiment.batch).get("targets", ((), ""))[0]
    return shape[1] if len(shape) == 2 else None
