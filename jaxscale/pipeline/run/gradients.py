"""Loss and gradients of a sequence of stages under any synchronous schedule, for custom training loops."""

from collections.abc import Callable
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.plan import schedule_of
from jaxscale.pipeline.run.execute import At, execute
from jaxscale.pipeline.run.lifetimes import Stash
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Int, PyTree

OneStage: TypeAlias = Callable[[Any, Any, Any, Any, Int[Array, ""]], tuple[Any, Any]]
"""`stage(weights, shared, x, microbatch, stage_index) -> (y, loss)`."""


def value_and_grad(
    stage: OneStage, schedule: Schedule | str, mesh: Mesh, *, axis: str = "pipe", stash: Stash = "residuals"
) -> Callable[..., tuple[Any, tuple[Any, Any]]]:
    """Return a function that computes the loss and gradients of a sequence of stages on the devices of a mesh axis.

    With stages f_0, ..., f_{S-1}, x_{i+1} = f_i(w_i, s, x_i, b) and their losses l_i, the function computes

        L = sum over microbatches b and stages i of l_i(w_i, s, x_i, b),   dL/dw_i,   dL/ds.

    Args:
        stage: `stage(weights, shared, x, microbatch, stage_index) -> (y, loss)`, the same function for every stage.
            `stage_index` is int32 and traced. `y` has the shapes and dtypes of `x`. `loss` is a scalar; it may be 0 on
            all stages except the last.
        schedule: a synchronous schedule, such as `schedule("zb-h1", 4, 8)`, or its text "zb-h1:4x8".
        mesh: mesh of the devices; its axis `axis` has one device for each rank of the schedule.
        axis: name of the mesh axis along which the stages lie.
        stash: what a stage keeps from its forward to its backward: "residuals", or only its "input".

    Returns:
        `f(weights, shared, x, batch) -> (loss, (weight_gradients, shared_gradients))`, to be called inside `jax.jit`.
        Leaves of `weights` are (stages, ...); `shared` is any tree, `{}` for none; leaves of `x`, the input of the
        first stage, and of `batch` are (microbatches, ...). Loss and gradients are float32 and the same as on one
        device, up to rounding.

    Raises:
        UserError: the schedule is asynchronous, the number of devices on the axis is not the schedule's, or an
            argument's first dim does not fit the schedule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def stage(w, shared, x, target, stage_index):
        ...     y = jnp.tanh(x @ w)
        ...     return y, jnp.where(stage_index == 0, jnp.square(y - target).sum(), 0.0)
        >>> mesh = jax.make_mesh((1,), ("pipe",))
        >>> f = jax.jit(value_and_grad(stage, "gpipe:1x2", mesh))
        >>> w, x, target = jnp.eye(2)[None], jnp.ones((2, 1, 2)), jnp.zeros((2, 1, 2))
        >>> loss, (gradients, _) = f(w, {}, x, target)
        >>> round(float(loss), 3), gradients.shape
        (2.32, (1, 2, 2))

    References:
        Huang et al., "GPipe", 2019 (https://arxiv.org/abs/1811.06965); Qi et al., "Zero Bubble Pipeline Parallelism",
        2023 (https://arxiv.org/abs/2401.10241).
    """
    parsed_schedule = schedule_of(schedule)
    if stash not in get_args(Stash):
        raise unknown("stash", stash, get_args(Stash))
    if mesh.shape.get(axis) != parsed_schedule.ranks:
        axes_text = ", ".join(f"{name}:{device_count}" for name, device_count in mesh.shape.items())
        raise UserError(
            f"schedule {parsed_schedule.name} has {parsed_schedule.ranks} ranks: expected a mesh axis "
            f"{axis}:{parsed_schedule.ranks}, got {axes_text}"
        )
    auto_mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    tables = tabulate(parsed_schedule, stash)
    stages_by_rank = [parsed_schedule.stages_of(rank) for rank in range(parsed_schedule.ranks)]
    # int (ranks, chunks); a rank with fewer stages than others is padded with its first stage, which no action reads
    stage_of_chunk = np.array(
        [[*stages, *stages[:1] * (parsed_schedule.chunks - len(stages))] for stages in stages_by_rank]
    )
    # the rank, chunk and stage of every chunk that is not padding
    rank_chunk_stage_triples = [
        (rank, chunk, stage_index)
        for rank, stages in enumerate(stages_by_rank)
        for chunk, stage_index in enumerate(stages)
    ]
    rank_indices, chunk_indices, stage_indices = map(np.array, zip(*rank_chunk_stage_triples, strict=True))

    def sum_by_stage(chunk_gradients: Array) -> Array:
        """Return the gradient of each stage, (stages, ...), from those of the ranks' chunks, (ranks, chunks, ...)."""
        zero_gradients = jnp.zeros((parsed_schedule.stages, *chunk_gradients.shape[2:]), chunk_gradients.dtype)
        return zero_gradients.at[stage_indices].add(chunk_gradients[rank_indices, chunk_indices])

    def loss_and_gradients(weights: PyTree, shared: PyTree, x: PyTree, batch: PyTree) -> tuple[Any, tuple[Any, Any]]:
        """Return (loss, (weight gradients, shared gradients))."""
        for name, leaf in named_leaves(weights).items():
            if leaf.ndim < 1 or leaf.shape[0] != parsed_schedule.stages:
                raise UserError(
                    f"weights {name} is {leaf.shape}, expected a first dim of {parsed_schedule.stages}, the stages of "
                    f"{parsed_schedule.name}"
                )
        message_shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)

        def run_stage(
            stage_weights: Any, shared_weights: Any, message: Any, microbatch: Any, at: At, key: Any
        ) -> tuple[Any, Any, Any]:
            """Return (output, objective, sums) of a stage; the loss is both the objective and the sums.

            The input of the first stage is part of the microbatch; the input of other stages is the message.
            """
            first_input, stage_batch = microbatch
            stage_input = jax.tree.map(
                lambda first, other: jnp.where(at.stage == 0, first, other), first_input, message
            )
            stage_results = stage(stage_weights, shared_weights, stage_input, stage_batch, at.stage)
            if not isinstance(stage_results, tuple) or len(stage_results) != 2:
                raise UserError(
                    "the stage does not return a pair: expected (y, loss), where y is the next x and loss a scalar"
                )
            y, raw_loss = stage_results
            loss = jnp.asarray(raw_loss, jnp.float32)
            return y, loss, loss

        def run_on_rank(rank_weights: Any, shared_weights: Any, microbatches: Any) -> tuple[Any, Any, Any]:
            """Run the actions of one rank. Return the loss and the gradients of its weights and of `shared_weights`.

            The weights and their gradients have a leading dim of 1 for the rank.
            """
            chunk_weights = jax.tree.map(lambda leaf: leaf[0], rank_weights)
            device_sums = execute(
                tables,
                run_stage,
                chunk_weights,
                shared_weights,
                microbatches,
                None,
                message_shapes,
                axis=axis,
                manual_axes=(axis,),
            )
            loss = lax.psum(device_sums.sums, axis)
            shared_gradients = jax.tree.map(lambda leaf: lax.psum(leaf, axis), device_sums.shared_gradients)
            return loss, jax.tree.map(lambda leaf: leaf[None], device_sums.weight_gradients), shared_gradients

        rank_spec, whole_spec = PartitionSpec(axis), PartitionSpec()
        run_on_all_ranks = jax.shard_map(
            run_on_rank,
            mesh=auto_mesh,
            in_specs=(rank_spec, whole_spec, whole_spec),
            out_specs=(whole_spec, rank_spec, whole_spec),
            axis_names={axis},
        )
        chunk_weights = jax.tree.map(lambda leaf: leaf[stage_of_chunk], weights)
        loss, weight_gradients, shared_gradients = run_on_all_ranks(chunk_weights, shared, (x, batch))
        return loss, (jax.tree.map(sum_by_stage, weight_gradients), shared_gradients)

    return loss_and_gradients
