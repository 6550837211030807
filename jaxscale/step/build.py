"""build: from an Experiment and a Plan to the train step, with every check that needs no tracing of the step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.compiler.kept_programs import keep_ordered_programs
from jaxscale.memory.decision import Decision
from jaxscale.offload.updates import Advance
from jaxscale.platforms.cpu_threads import provide_threads
from jaxscale.platforms.detect import host_memory
from jaxscale.programs.elementwise import first_mixing
from jaxscale.recipe.combinations import check
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.recipe.products import describe_products
from jaxscale.recipe.requests import Facts
from jaxscale.sharding.memory_space import check_host_memory
from jaxscale.state.layout import Layout, vocab_multiple
from jaxscale.state.pure_model import PureModel
from jaxscale.state.train_state import TrainState
from jaxscale.step.exchange import CodecResiduals, Exchanged, by_codec, by_compiler, none_yet, stage_of
from jaxscale.step.gradients import Objective, Whole
from jaxscale.step.host import advance_of, check_host_size
from jaxscale.step.memory_resolve import decide_memory, describe_decision, layers_of_groups, treatment_of
from jaxscale.step.pipelined.asynchronous import AsyncPipeline, InFlight
from jaxscale.step.pipelined.gradients import Pipelined
from jaxscale.step.planned_model import PlannedModel
from jaxscale.step.replicas import Replicas
from jaxscale.step.resolve import ResolvedPlan, needs_decision, resolve
from jaxscale.step.synchronous import SynchronousStep, UpdateFn
from jaxscale.step.train_step import StepParts, TrainStep
from jaxscale.step.update import Update, describe_state
from jaxscale.step.without_effect import check_effect
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Bool


def build(experiment: Experiment, plan: Plan | None = None, *, devices: Sequence[Any] | None = None) -> TrainStep:
    """The train step of an experiment under a plan. Everything is checked; nothing is compiled or allocated yet.

    Args:
        experiment: what to train.
        plan: how; the experiment's own by default.
        devices: to run on; all by default.

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
        if groups and resolved.stages is None:  # a stage's layers are few: a group's are cut from the rest in the step
            assembly = Assembly.of(resolved, assembly.layout.mesh, groups)
    assembly.check(devices, 0 if decision is None else decision.host_bytes)
    return TrainStep(assembly.parts(decision, devices))


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """A resolved plan on its way to a train step.

    Args:
        resolved: the plan, settled.
        pure_model: the model as pure functions.
        update: the optimizer.
        layout: where their arrays lie.
    """

    resolved: ResolvedPlan
    pure_model: PureModel
    update: Update
    layout: Layout

    @classmethod
    def of(cls, resolved: ResolvedPlan, mesh: Any, groups: tuple[int, ...] = ()) -> "Assembly":
        """The model, its optimizer, and their layout.

        Args:
            resolved: the plan, settled.
            mesh: of devices.
            groups: layers that a memory rule treats alike.
        """
        experiment, plan, stages = resolved.experiment, resolved.plan, resolved.stages
        rows = () if stages is None else stages.rows
        pure_model = PureModel.of(experiment.model, experiment.seed, vocab_multiple(plan), groups, rows)
        update = Update.of(experiment, plan, pure_model, mesh)
        return cls(resolved, pure_model, update, Layout.of(pure_model, update.whole, plan, mesh))

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_combination(self) -> None:
        """Check every row of the combinations.

        Raises:
            Incompatible: with the reason of a row, and the way round.
        """
        plan, stages, update = self.resolved.plan, self.resolved.stages, self.update
        in_parts = plan.asynchronous or (plan.offload.any and plan.offload.optimizer_state != "host")
        mixing = first_mixing(update.plain, self.pure_model.params) if in_parts else None
        leaves = jax.tree.leaves(self.layout.abstract.optimizer)
        owners = self.layout.owners(update.whole)
        reshaped = mixing is not None and any(
            leaf.ndim and not owner for leaf, owner in zip(leaves, owners, strict=True)
        )
        by_layer = update.layers is not None and not reshaped
        facts = Facts(
            plan,
            self.resolved.experiment,
            state=tuple(named_leaves(self.pure_model.rest)),
            unlike=stages is not None and stages.chain is not None,
            copied=stages is not None and bool(stages.copies),
            mixing=None if by_layer else mixing,
            reshaped=reshaped,
        )
        check(facts)

    def check(self, devices: Sequence[Any], kept: int) -> None:
        """Refuse requests without effect, and host memory that is not there.

        Args:
            devices: to run on.
            kept: bytes of activations that the backward pass finds on the host.

        Raises:
            UserError: with the reason and the way round.
        """
        experiment, plan, layout = self.resolved.experiment, self.resolved.plan, self.layout
        layout.check_axes_used(experiment.model)
        layout.check_zero_used(self.update.whole)
        check_effect(experiment, layout)
        if plan.offload.any:
            check_host_memory(devices, str(plan.offload))
        if kept:
            check_host_memory(devices, f"memory {plan.memory}")
        check_host_size(layout, host_memory(), kept)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def planned(self, decision: Decision | None = None) -> PlannedModel:
        """The model under its plan, with its blocks treated by a decision."""
        plan, experiment = self.resolved.plan, self.resolved.experiment
        treatment = treatment_of(plan, decision, self.layout.platform)
        return PlannedModel(experiment, plan, self.pure_model, self.layout, treatment)

    def objective(self) -> Objective:
        """The loss of the model under a plan whose memory rule is undecided."""
        plan, experiment = self.resolved.plan, self.resolved.experiment
        return _objective(PlannedModel(experiment, plan, self.pure_model, self.layout), self.resolved)

    def parts(self, decision: Decision | None, devices: Sequence[Any]) -> StepParts:
        """The parts of the train step.

        Args:
            decision: of the memory rule, where it looks at the blocks.
            devices: to run on.
        """
        plan, update, experiment = self.resolved.plan, self.update, self.resolved.experiment
        planned = self.planned(decision)
        lines = [self.resolved.line]
        if decision is not None:
            lines.append(describe_decision(decision, devices[0].platform))
        lines += describe_products(plan, devices)
        lines += describe_state(plan, self.layout.abstract.optimizer, self.pure_model.parameters)
        common: dict[str, Any] = {
            "optimizer": update,
            "stages": self.resolved.stages,
            "decision": decision,
            "lines": tuple(lines),
        }
        if plan.asynchronous:
            assert self.resolved.stages is not None
            stream = AsyncPipeline(planned, self.resolved.stages, update.whole)
            objective = stream.synchronous
            return StepParts(
                objective,
                stream.layout,
                function=stream.step,
                extras=(InFlight(stream),),
                stream=stream,
                codec=stream.codec,
                **common,
            )
        objective, layout, guard = _objective(planned, self.resolved), self.layout, experiment.guard
        stage = stage_of(plan, self.pure_model, layout)
        residuals = () if stage is None else (CodecResiduals(stage, experiment.optimizer, plan.diloco is None),)
        if plan.diloco is not None:
            replicas = Replicas.of(plan, self.pure_model, layout, update.whole, stage)
            advance = advance_of(plan, update, layout)
            return StepParts(
                objective,
                layout,
                function=SynchronousStep(
                    functools.partial(replicas.gradients, objective),
                    none_yet,
                    functools.partial(replicas.update, advance),
                    guard,
                ),
                extras=(*residuals, replicas),
                replicas=replicas,
                codec=stage,
                **common,
            )
        gradients = objective.gradients if stage is None else objective.gradients_apart
        exchange = by_compiler(layout) if stage is None else by_codec(stage, update.messages, layout)
        return StepParts(
            objective,
            layout,
            function=SynchronousStep(gradients, exchange, _shared(advance_of(plan, update, layout)), guard),
            extras=residuals,
            codec=stage,
            **common,
        )


def _objective(planned: PlannedModel, resolved: ResolvedPlan) -> Objective:
    return Whole(planned) if resolved.stages is None else Pipelined(planned, resolved.stages)


def _shared(advance: Advance) -> UpdateFn:
    """The update of weights that all replicas share."""

    def update(exchanged: Exchanged, state: TrainState, good: Bool[Array, ""]) -> TrainState:
        params, optimizer = advance(exchanged.gradients, state.optimizer, state.params, exchanged.norms, good)
        return dataclasses.replace(state, params=params, optimizer=optimizer)

    return update
