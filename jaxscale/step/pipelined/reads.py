"""What an asynchronous pipeline learns from a trace of the model: who reads shared parameters, and a batch's weight.

Shared parameters are those outside of the blocks, such as embedding and head. The weight of a batch is the number of
its targets, or their summed weights, by which the loss is divided.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxscale.compat import prune
from jaxscale.errors import UserError
from jaxscale.step.pipelined.gradients import Pipelined, leaves_read
from jaxscale.step.planned_model import PlannedModel
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Batch, Float, Params, PyTree


def shared_copies(pipeline: Pipelined, batch: Batch) -> dict[str, tuple[int, ...]]:
    """For each shared parameter and each rank, 0 if the rank's stage reads the parameter, -1 if its copy stays zero.

    Args:
        pipeline: the pipeline of the model, with one stage on each rank.
        batch: shapes of a global batch.

    Raises:
        UserError: the model has tied weights, or a parameter that several blocks share.
    """
    planned, stages = pipeline.planned, pipeline.stages
    pipeline_text = f"pipeline {planned.plan.pipeline}"
    stacked, shared = pipeline.divided(named_leaves(planned.pure_model.params))
    stacked = {
        name: jax.ShapeDtypeStruct((stages.depth, *leaf.shape[1:]), leaf.dtype) for name, leaf in stacked.items()
    }
    rows = planned.experiment.batch // stages.schedule.microbatches
    microbatch = {name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
    stage, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    args = (stacked, shared, (microbatch, jax.ShapeDtypeStruct((rows,), jnp.int32)), key, stage)
    names = jax.tree.leaves(({**dict.fromkeys(stacked, "")}, {name: name for name in shared}))
    parts = pipeline.form.parts(pipeline.loss)

    def read(function: Callable[..., PyTree], *x: PyTree) -> set[str]:
        is_read = leaves_read(function, *x, *args)
        first = len(jax.tree.leaves(x))
        return {name for name, reads in zip(names, is_read[first:], strict=False) if name and reads}

    # without the memory rule's decision, which is for the rows of one device
    with planned.tracing(plainly=True):
        x = jax.eval_shape(parts.before, *args)
        read_before, read_inside, read_behind = read(parts.before), read(parts.inside, x), read(parts.behind, x)
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
    home_of_name = {name: ranks - 1 if name in read_behind else 0 for name in shared}
    return {name: tuple(0 if rank == home else -1 for rank in range(ranks)) for name, home in home_of_name.items()}


def weight_program(planned: PlannedModel, batch: Batch) -> Callable[[Batch], Float[Array, ""]]:
    """A function from a batch to the weight of its targets.

    Args:
        planned: the model under its plan.
        batch: shapes of a global batch.

    Raises:
        UserError: the weight depends on the model.
    """

    def weight(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
        loss = planned.loss(planned.pure_model.module(params, rest), batch, planned.context(None))
        return jnp.asarray(loss.weight, jnp.float32)

    with planned.tracing(plainly=True):
        program = jax.make_jaxpr(weight)(planned.pure_model.whole, planned.pure_model.rest, dict(batch))
    pruned, is_read = prune(program, [True])
    of_model = len(is_read) - len(batch)
    if any(is_read[:of_model]):
        raise UserError(
            f"pipeline {planned.plan.pipeline}: the weight of this model's loss depends on its parameters, but the "
            "first update of a batch needs the weight before the last forward pass; take a synchronous pipeline"
        )

    def run(batch: Batch) -> Float[Array, ""]:
        leaves = zip(jax.tree.leaves(dict(batch)), is_read[of_model:], strict=True)
        (sum_of_weights,) = jex.jaxpr_as_fun(pruned)(*[leaf for leaf, reads in leaves if reads])
        return jnp.asarray(sum_of_weights)  # it is a NumPy number if it depends only on shapes

    return run
