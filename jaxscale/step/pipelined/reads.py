"""Traces of the model for an asynchronous pipeline: the stages that read shared parameters, and the weight of a batch.

Shared parameters are those outside of the blocks, such as the embedding and the head. The weight of a batch, by which
its loss is divided, is the number of its targets, or the sum of the weights of its targets.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.errors import UserError
from jaxscale.step.pipelined.gradients import Pipelined, leaf_read_flags
from jaxscale.step.planned_model import PlannedModel
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Batch, Float, Params, PyTree


def copy_numbers(pipeline: Pipelined, batch: Batch) -> dict[str, tuple[int, ...]]:
    """Return `PureModel.copy_numbers`: for each shared parameter, by name, a number for the copy of every rank.

    The number is 0 if the stage of the rank reads the parameter, and -1 if not; a copy with number -1 stays zero.

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
    abstract_rows = {
        name: jax.ShapeDtypeStruct((row_count, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()
    }
    abstract_microbatch = (abstract_rows, jax.ShapeDtypeStruct((row_count,), jnp.int32))
    abstract_key_and_stage = jax.eval_shape(lambda: (jax.random.key(0), jnp.int32(0)))
    abstract_args = (stage_params, shared_params, abstract_microbatch, *abstract_key_and_stage)
    # the shared parameter of each leaf of `abstract_args`, "" for parameters of stages; later arguments have no entry
    leaf_names = jax.tree.leaves(({**dict.fromkeys(stage_params, "")}, {name: name for name in shared_params}))
    model_parts = pipeline.form.model_parts(pipeline.loss)

    def names_read_by(function: Callable[..., PyTree], *message: PyTree) -> set[str]:
        """Return the names of the shared parameters that one part of the model reads."""
        read_flags = leaf_read_flags(function, *message, *abstract_args)
        message_leaf_count = len(jax.tree.leaves(message))
        return {
            name for name, is_read in zip(leaf_names, read_flags[message_leaf_count:], strict=False) if name and is_read
        }

    # blocks run without their treatment, which the memory rule chose for the rows of one device
    with planned.tracing(is_forward_only=True):
        abstract_message = jax.eval_shape(model_parts.before, *abstract_args)
        names_before, names_inside = (
            names_read_by(model_parts.before),
            names_read_by(model_parts.inside, abstract_message),
        )
        names_after = names_read_by(model_parts.after, abstract_message)
    if names_inside:
        raise UserError(
            f"{pipeline_text}: all blocks of this model read {', '.join(sorted(names_inside))}, and each stage would "
            "update a copy of its own; give each block its own parameters, or take a synchronous pipeline"
        )
    if names_before & names_after:
        raise UserError(
            f"{pipeline_text}: {', '.join(sorted(names_before & names_after))} is read both before and after the "
            "blocks (tied weights), so the first stage and the last stage would each update a copy of their own; untie "
            "the weights (tied=False), or take a synchronous pipeline"
        )
    rank_count = stages.schedule.ranks
    rank_of_name = {name: rank_count - 1 if name in names_after else 0 for name in shared_params}
    return {
        name: tuple(0 if rank == reading_rank else -1 for rank in range(rank_count))
        for name, reading_rank in rank_of_name.items()
    }


def batch_weight_fn(planned: PlannedModel, batch: Batch) -> Callable[[Batch], Float[Array, ""]]:
    """Return a function from a batch to its weight.

    Args:
        planned: the model under its plan.
        batch: shapes of a global batch.

    Raises:
        UserError: the weight depends on parameters of the model.
    """

    def weight_of_loss(params: Params, model_state: Params, batch: Batch) -> Float[Array, ""]:
        loss = planned.loss(planned.pure_model.module(params, model_state), batch, planned.context(None))
        return jnp.asarray(loss.weight, jnp.float32)

    with planned.tracing(is_forward_only=True):
        program = jax.make_jaxpr(weight_of_loss)(
            planned.pure_model.abstract_module_params, planned.pure_model.abstract_model_state, dict(batch)
        )
    pruned_program, read_flags = prune(program, [True])  # read_flags: whether the weight depends on each leaf
    model_leaf_count = len(read_flags) - len(batch)
    if any(read_flags[:model_leaf_count]):
        raise UserError(
            f"pipeline {planned.plan.pipeline}: the weight of this model's loss depends on its parameters, but the "
            "first update of a batch needs the weight before the last forward pass; take a synchronous pipeline"
        )

    def compute_weight(batch: Batch) -> Float[Array, ""]:
        """Return the weight of a batch."""
        leaves_and_flags = zip(jax.tree.leaves(dict(batch)), read_flags[model_leaf_count:], strict=True)
        (weight,) = jex.jaxpr_as_fun(pruned_program)(*[leaf for leaf, is_read in leaves_and_flags if is_read])
        return jnp.asarray(weight)  # a weight that depends only on shapes is a NumPy number

    return compute_weight
