"""Requests that nothing in an experiment takes up, which its shapes tell before anything is traced.

Plans that are wrong by themselves are refused where they are made (`recipe/plan.py`); requests without effect that only
a trace or a compiled program shows, in `program_checks.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.layout import Layout


def check_effect(experiment: Experiment, layout: Layout) -> None:
    """Refuse what would do nothing.

    Args:
        experiment: with the shapes of its batches.
        layout: of its train state, under its plan.

    Raises:
        UserError: as it says, with the way round.
    """
    plan, optimizer = layout.plan, layout.abstract.optimizer
    length = _positions(experiment)
    if plan.kernels.loss_chunk is not None and plan.kernels.scores == "auto" and length is not None:
        _check_loss_chunk(plan, layout, length)
    if plan.offload.optimizer_state == "streamed" and not any(leaf.ndim for leaf in jax.tree.leaves(optimizer)):
        raise UserError(
            f"optimizer_state streamed: {_rule(experiment)} keeps no array that could lie on the host; leave it out, "
            "or take weights host for the weights"
        )
    pipeline = plan.pipeline
    if plan.asynchronous and pipeline is not None and pipeline.synchronous_steps >= experiment.steps:
        raise UserError(
            f"synchronous_steps {pipeline.synchronous_steps} with pipeline {pipeline}: the run has {experiment.steps} "
            "steps, so the pipe would never fill; take fewer, or a synchronous pipeline"
        )


def _check_loss_chunk(plan: Plan, layout: Layout, length: int) -> None:
    shards = math.prod(layout.mesh.shape[axis] for axis in layout.rules.inner_seq)
    here = length // shards if length % shards == 0 else length
    assert plan.kernels.loss_chunk is not None
    if plan.kernels.loss_chunk >= here:
        where = f"{length} target positions" + (f", {here} on each of {shards} devices" if here != length else "")
        raise UserError(
            f"loss_chunk {plan.kernels.loss_chunk}: a row has {where}, so one chunk would hold all; take less than "
            f"{here}, or leave loss_chunk out"
        )


def _positions(experiment: Experiment) -> int | None:
    """Target positions of a row; `None` where the data does not tell, or scores no positions."""
    shapes: Any = getattr(experiment.data, "shapes", None)
    shape: Sequence[int] = () if shapes is None else shapes(experiment.batch).get("targets", ((), ""))[0]
    return shape[1] if len(shape) == 2 else None


def _rule(experiment: Experiment) -> str:
    return "the rule" if experiment.optimizer.custom is not None else experiment.optimizer.name
