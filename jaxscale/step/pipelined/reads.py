"""For an asynchronous pipeline: which stages read shared parameters, and the weight of a batch, by traces of the model.

Shared parameters are those outside of the blocks, such as embedding and head. The weight of a batch is the number of
its targets, or their summed weights, by which the loss is divided.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.errors import UserError
from jaxscale.step.pipelined.gradients import Pipelined, find_leaves_read
from jaxscale.step.planned_model import PlannedModel
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Batch, Float, Params, PyTree


def shared_copies(pipeline: Pipelined, batch: Batch) -> dict[str, tuple[int, ...]]:
    """Return, by the name of each shared parameter, a number for each rank: 0 if the rank's stage reads it, else -1.

    The copy of a rank with -1 stays zero.

    Args:
        pipeline: the pipeline of the model, with one stage on each rank.
        batch: shapes of a global batch.

    Raises:
        UserError: the model has tied weights, or a parameter that several blocks share.
    """
    planned, stages = pipeline.planned, pipeline.stages
    pipeline_text = f"pipeline {planned.plan.pipeline}"
    stage_params, shared_params = pipeline.divide(named_leaves(planned.pure_model.abstract_params))
    stage_params = {
        name: jax.ShapeDtypeStruct((stages.depth, *leaf.shape[1:]), leaf.dtype) for name, leaf in stage_params.items()
    }
    row_count = planned.experiment.batch // stages.schedule.microbatches
    microbatch = {name: jax.ShapeDtypeStruct((row_count, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
    stage, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    args = (stage_params, shared_params, (microbatch, jax.ShapeDtypeStruct((row_count,), jnp.int32)), key, stage)
    # "" for a parameter of the stages; the leaves of the other arguments follow and have no entry
    name_of_leaf = jax.tree.leaves(({**dict.fromkeys(stage_params, "")}, {name: name for name in shared_params}))
    parts = pipeline.form.parts(pipeline.loss)

    def names_read_by(function: Callable[..., PyTree], *message: PyTree) -> set[str]:
        """Return the names of the shared parameters that one part of the model reads."""
        is_read = find_leaves_read(function, *message, *args)
        start = len(jax.tree.leaves(message))
        return {name for name, reads in zip(name_of_leaf, is_read[start:], strict=False) if name and reads}

    # without the treatment of blocks, because the memory rule decided on it for the rows of one device
    with planned.tracing(is_forward_only=True):
        message = jax.eval_shape(parts.before, *args)
        read_before, read_inside = names_read_by(parts.before), names_read_by(parts.inside, message)
        read_behind = names_read_by(parts.behind, message)
    if read_inside:
        raise UserError(
            f"{pipeline_text}: all blocks of this model read {', '.join(sorted(read_inside))}, and each stage would "
            "update a copy of its own; give each block its own parameters, or take a synchronous pipeline"
        )
    if read_before & read_behind:
        raise UserError(
            f"{pipeline_text}: {', '.join(sorted(read_before & read_behind))} is read both before and "
            "behind the blocks (tied weights), and the first and the last stage would each update a copy of their own; "
            "untie the weights (tied=False), or take a synchronous pipeline"
        )
    ranks = stages.schedule.ranks
    rank_of_name = {name: ranks - 1 if name in read_behind else 0 for name in shared_params}
    return {name: tuple(0 if rank == home else -1 for rank in range(ranks)) for name, home in rank_of_name.items()}


def weight_program(planned: PlannedModel, batch: Batch) -> Callable[[Batch], Float[Array, ""]]:
    """Return a function from a batch to the weight of its targets.

    Args:
        planned: the model under its plan.
        batch: shapes of a global batch.

    Raises:
        UserError: the weight depends on the model.
    """

    def weight(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
        loss = planned.loss(planned.pure_model.module(params, rest), batch, planned.context(None))
        return jnp.asarray(loss.weight, jnp.float32)

    with planned.tracing(is_forward_only=True):
        program = jax.make_jaxpr(weight)(
            planned.pure_model.abstract_module_params, planned.pure_model.abstract_rest, dict(batch)
        )
    pruned, is_read = prune(program, [True])
    model_leaf_count = len(is_read) - len(batch)
    if any(is_read[:model_leaf_count]):
        raise UserError(
            f"pipeline {planned.plan.pipeline}: the weight of this model's loss depends on its parameters, but the "
            "first update of a batch needs the weight before the last forward pass; take a synchronous pipeline"
        )

    def compute_weight(batch: Batch) -> Float[Array, ""]:
        """Return the weight of a batch, computed from those of its arrays that the weight depends on."""
        leaves_and_reads = zip(jax.tree.leaves(dict(batch)), is_read[model_leaf_count:], strict=True)
        (sum_of_weights,) = jex.jaxpr_as_fun(pruned)(*[leaf for leaf, reads in leaves_and_reads if reads])
        return jnp.asarray(sum_of_weights)  # it is a NumPy number if it depends only on shapes

    return compute_weight
