"""build: from an Experiment and a Plan to the train step, with every check that needs no tracing of the step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.optim.elementwise import first_mixing
from jaxscale.optim.offloaded import plainly
from jaxscale.platforms.cpu_threads import provide_threads
from jaxscale.platforms.detect import host_memory
from jaxscale.platforms.kept_programs import keep_ordered_programs
from jaxscale.sharding.memory_space import check_host_memory
from jaxscale.step.combinations import check
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.host import advance_of, asked_of_host, check_host_size, uses_host
from jaxscale.step.layout import Layout, check_model, resolve_mesh, vocab_multiple
from jaxscale.step.outer import Outer
from jaxscale.step.plan import Plan
from jaxscale.step.products import check_products, said_of_products
from jaxscale.step.reducing import describe_reduce, stage_of, with_messages, with_states
from jaxscale.step.remember import (
    check_memory,
    decide_memory,
    layers_of_groups,
    needs_decision,
    said_of,
    settled_unroll,
    treatment_of,
)
from jaxscale.step.requests import Facts
from jaxscale.step.stages import Stages, stages_of
from jaxscale.step.streamed import Streamed
from jaxscale.step.train_step import TrainStep, objective_of
from jaxscale.step.update import Update, said_of_state
from jaxscale.step.without_effect import check_effect
from jaxscale.trees import named_leaves


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
    plan = experiment.plan if plan is None else plan
    devices = list(jax.devices() if devices is None else devices)
    plan, said = resolve_mesh(plan, experiment.batch, devices)
    check(Facts(plan, experiment))
    plan = with_messages(experiment, plan)
    stages = None
    if plan.pipeline is not None:
        stages = stages_of(experiment, plan)
        said += f"; {stages}"
    layers = getattr(experiment.model, "layers", None) if stages is None else stages.depth
    if isinstance(layers, int) and plan.unroll > layers:
        whose = "the model" if stages is None else "a stage"
        said += f"; unroll {plan.unroll}: {whose} has {layers} layers, all run in one iteration"
        plan = dataclasses.replace(plan, unroll=layers)
    plan, note = settled_unroll(plan, devices[0].platform)
    said += note
    assert plan.mesh is not None
    said += remark * (plan.mesh.devices > 1)
    check_model(plan, experiment.model)
    check_products(plan, experiment.model)
    check_memory(plan)
    mesh, decision, streamed = plan.mesh.build(devices), None, None
    functional, update, layout = _placed(experiment, plan, mesh, stages=stages)
    check(_facts(experiment, plan, functional, update, layout, stages))
    if needs_decision(plan.memory):
        objective = objective_of(stages, experiment, plan, functional, layout)
        decision = decide_memory(objective, devices)
        groups = layers_of_groups(decision)
        if groups and stages is None:  # a stage's layers are few: those of a group are cut from the rest in the step
            functional, update, layout = _placed(experiment, plan, mesh, groups)
    layout.check_axes_used(experiment.model)
    layout.check_zero_used(update.whole)
    check_effect(experiment, layout)
    if uses_host(plan):
        check_host_memory(devices, asked_of_host(plan))
    kept = 0 if decision is None else decision.host_bytes
    if kept:
        check_host_memory(devices, f"memory {plan.memory}")
    check_host_size(layout, host_memory(), kept)
    lines = [said] if decision is None else [said, said_of(decision, devices[0].platform)]
    lines += said_of_products(plan, devices)
    lines += said_of_state(plan, layout.abstract.optimizer, functional.parameters)
    if plan.asynchronous:
        assert stages is not None
        parts = (experiment, plan, functional, layout, treatment_of(plan, decision, layout.platform))
        streamed = Streamed(stages, update.whole, *parts)
        functional, layout = streamed.held, streamed.places
        lines += [str(streamed), *describe_reduce(streamed.codes, experiment.optimizer)]
    whole = plan.diloco is not None and plan.optimizer_state == "device"
    advance = plainly(update.whole) if whole else advance_of(plan, update, layout)
    # stages of an asynchronous pipeline reduce by themselves
    stage = None if streamed is not None else stage_of(plan, functional, layout)
    layout = with_states(layout, stage)
    given: Any = (experiment, plan, functional, layout, update, advance, lines, decision, stages, streamed, stage)
    if plan.diloco is None:
        return TrainStep(*given)
    from jaxscale.step.diloco import DilocoStep

    return DilocoStep(Outer.of(plan, functional, layout, update.whole, stage), *given)


def _facts(
    experiment: Experiment, plan: Plan, functional: Functional, update: Update, layout: Layout, stages: Stages | None
) -> Facts:
    """All that rows may ask of a combination."""
    in_parts = plan.asynchronous or (uses_host(plan) and plan.optimizer_state != "host")
    mixing = first_mixing(update.plain, functional.params) if in_parts else None
    state = zip(jax.tree.leaves(layout.abstract.optimizer), layout.owners(update.whole), strict=True)
    reshaped = mixing is not None and any(leaf.ndim and not owner for leaf, owner in state)
    by_layer = update.layers is not None and not reshaped
    return Facts(
        plan,
        experiment,
        state=tuple(named_leaves(functional.rest)),
        unlike=stages is not None and stages.chain is not None,
        copied=stages is not None and bool(stages.copies),
        mixing=None if by_layer else mixing,
        reshaped=reshaped,
    )


def _placed(
    experiment: Experiment, plan: Plan, mesh: Any, groups: tuple[int, ...] = (), stages: Stages | None = None
) -> tuple[Functional, Update, Layout]:
    """The model as functions, its optimizer, and where their arrays lie."""
    layers = () if stages is None else stages.rows
    functional = Functional.of(experiment.model, experiment.seed, vocab_multiple(plan), groups, layers)
    update = Update.of(experiment, plan, functional, mesh)
    return functional, update, Layout.of(functional, update.whole, plan, mesh)
