r"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum with all singular values set to one.

    u = momentum of g;  X = u / |u|;  five times X <- a X + (b A + c A A) X with A = X X';  w <- w - rate * scale * X

Muon updates projections and kernels layer by layer. A kernel becomes a matrix whose columns are its last dim and whose
rows are all its other dims. Embeddings, the head, gains and biases get AdamW. Two scales are in use for n rows and m
columns: Jordan's sqrt(max(1, m / n)), and 0.2 sqrt(max(n, m)). The second scale gives updates as large as AdamW's, and
so suits AdamW's learning rates (Liu et al. 2025, arXiv 2502.16982).

For a sharded matrix, every product of the iteration would be reduced over the mesh. Instead, an all-to-all moves whole
layers to each device, which orthogonalizes them, and a second all-to-all returns them. So each device sends its shard
only twice, in bfloat16 if configured. A stack whose number of layers is not a multiple of the number of shards is
padded; to need less padding, uneven stacks of equal shape are first concatenated. Left out: the distribution of layers
over axes that replicate them (data), which would save products and cost a gather.

Momentum is computed as in optax (a bias-corrected average, then Nesterov's step), so updates equal those of
`optax.contrib.muon`, which does not support stacked layers and reduces every product over the mesh.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.optim.leaves import ParamInfo, param_infos_of
from jaxscale.optim.per_layer import UpdateRule, matrices_by
from jaxscale.sharding.partition import axes_of, dim_axes, shard_count
from jaxscale.typing import Array, Float, Params

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic: five steps bring singular values of at least 0.005 to between 0.7 and 1.2."""
STEPS = 5
"""Default number of iterations."""
_EPS = 1e-8
"""Number added to the norm of a matrix, so that a zero matrix stays zero."""

Scale = Literal["keller", "moonshot"]
Dtype = Literal["float32", "bfloat16"]


def muon(
    rate: float | Callable[[Any], Any],
    *,
    momentum: float = 0.95,
    scale: Scale = "moonshot",
    precision: Dtype = "bfloat16",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    leaves: Any = None,
    mask: Any = None,
) -> UpdateRule:
    """Muon for projections and kernels, AdamW for all other parameters.

    Args:
        rate: learning rate of both Muon and AdamW, or a schedule.
        momentum: decay of the average of gradients.
        scale: name of the rule in `scale_factor` that scales an orthogonal update.
        precision: dtype of the orthogonalization and of its messages between devices. For Gaussian matrices,
            updates in bfloat16 differ from updates in float32 by 4 %.
        b1, b2, eps: AdamW's constants.
        weight_decay: factor of the decoupled weight decay.
        leaves: tree of `ParamInfo` like the parameters, including shardings; `None` derives the tree from shapes and
            paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.

    Example:
        >>> params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
        >>> rule = muon(1.0, scale="keller", precision="float32")
        >>> gradients = {"w": jnp.array([[3.0, 0.0], [0.0, 0.1]]), "b": jnp.ones(2)}
        >>> update, _ = rule.update(gradients, rule.init(params), params)
        >>> [round(float(x), 1) for x in jnp.diag(update["w"])]  # singular values 3 and 0.1
        [-0.7, -1.1]
    """
    rule = scale_by_muon(momentum, scale, precision, leaves)
    return matrices_by(rule, optax.scale_by_adam(b1, b2, eps), rate, weight_decay, leaves, mask)


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Args:
        step: number of updates made.
        mu: average of gradients, a tree like the parameters.
    """

    step: Array
    mu: Params


def scale_by_muon(
    momentum: float = 0.95, scale: Scale = "moonshot", precision: Dtype = "bfloat16", param_info_tree: Any = None
) -> UpdateRule:
    """Return a rule whose update is the momentum, orthogonalized layer by layer for leaves that are matrices.

    Args:
        momentum: decay of the average of gradients.
        scale: name of the rule in `scale_factor` that scales an orthogonal update.
        precision: dtype of the orthogonalization and of its messages between devices.
        param_info_tree: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the orthogonalized momentum for the gradients `updates`, and the new state."""
        step = state.step + 1
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        next_mean = optax.tree.bias_correction(mu, momentum, step + 1)
        corrected_updates = optax.tree.bias_correction(updates, momentum, step)
        nesterov_mean = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, next_mean, corrected_updates)
        new_updates, treedef = jax.tree.flatten(nesterov_mean)
        param_infos = param_infos_of(param_info_tree, updates)
        matrix_indices = [index for index, param_info in enumerate(param_infos) if param_info.kind == "matrix"]
        orthogonal_arrays = orthogonalize(
            [new_updates[index] for index in matrix_indices],
            [param_infos[index] for index in matrix_indices],
            precision,
        )
        for index, orthogonal_array in zip(matrix_indices, orthogonal_arrays, strict=True):
            param_info, dtype = param_infos[index], new_updates[index].dtype
            new_updates[index] = scale_factor(
                param_info.rows, param_info.columns // param_info.parts, scale
            ) * orthogonal_array.astype(dtype)
        return treedef.unflatten(new_updates), MuonState(step, mu)

    return optax.GradientTransformation(init, update)


def scale_factor(row_count: int, column_count: int, scale: Scale) -> float:
    """Return the scale factor of an orthogonal update of one matrix with these numbers of rows and columns.

    Example:
        >>> scale_factor(1024, 4096, "keller"), scale_factor(1024, 4096, "moonshot")
        (2.0, 12.8)
    """
    if scale == "keller":
        return math.sqrt(max(1.0, column_count / row_count))
    return 0.2 * math.sqrt(max(row_count, column_count))


def newton_schulz(x: Float[Array, "N R C"], steps: int = STEPS) -> Float[Array, "N R C"]:
    """Return matrices with the singular vectors and the dtype of `x`, and singular values near 1.

    Args:
        x: matrices, stacked along the first dim.
        steps: number of iterations.
    """
    a, b, c = COEFFICIENTS
    norms = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    x = (x.astype(jnp.float32) / (norms + _EPS)).astype(x.dtype)
    if is_tall := x.shape[1] > x.shape[2]:
        x = x.swapaxes(1, 2)
    # by default a TPU multiplies float32 in bfloat16
    multiply_precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    for _ in range(steps):
        gram = jnp.einsum("nrc,nsc->nrs", x, x, precision=multiply_precision)
        polynomial = b * gram + c * jnp.einsum("nrs,nst->nrt", gram, gram, precision=multiply_precision)
        x = a * x + jnp.einsum("nrs,nsc->nrc", polynomial, x, precision=multiply_precision)
    return x.swapaxes(1, 2) if is_tall else x


def orthogonalize(
    arrays: Sequence[Array], param_infos: Sequence[ParamInfo], precision: Dtype = "bfloat16"
) -> list[Array]:
    """Orthogonalize every matrix of some arrays by `newton_schulz`, with each matrix whole on one device.

    Args:
        arrays: arrays shaped like parameters of kind "matrix".
        param_infos: `ParamInfo` of each array.
        precision: dtype of products and of messages between devices.

    Returns:
        Arrays of the same shapes and shardings, in the dtype `precision`.
    """
    indices_by_group: dict[Any, list[int]] = collections.defaultdict(list)
    stacks = [
        _to_matrices(array.astype(precision), param_info) for array, param_info in zip(arrays, param_infos, strict=True)
    ]
    for index, (stack, param_info) in enumerate(zip(stacks, param_infos, strict=True)):
        mesh_axes = _sharded_axes(param_info)
        is_even = not mesh_axes or stack.shape[0] % shard_count(param_info.sharding.mesh, mesh_axes) == 0
        # stacks of one shape that the mesh does not divide evenly are concatenated, to need less padding
        group_key = (
            index
            if is_even
            else (stack.shape[1:], mesh_axes, param_info.sharding.mesh, param_info.sharding.spec[param_info.stack :])
        )
        indices_by_group[group_key].append(index)
    new_arrays: list[Any] = [None] * len(arrays)
    for indices in indices_by_group.values():
        matrix_counts = [stacks[index].shape[0] for index in indices]
        stack = jnp.concatenate([stacks[index] for index in indices]) if len(indices) > 1 else stacks[indices[0]]
        param_info = param_infos[indices[0]]
        mesh_axes = _sharded_axes(param_info)
        if mesh_axes:
            padding_count = -len(stack) % shard_count(param_info.sharding.mesh, mesh_axes)
            padded_stack = jnp.pad(stack, ((0, padding_count), (0, 0), (0, 0)))
            route = _route(param_info)
            new_stack = _move_along(newton_schulz(_move_along(padded_stack, route)), route[::-1])
        else:
            new_stack = newton_schulz(stack)
        first_matrix = 0
        for index, matrix_count in zip(indices, matrix_counts, strict=True):
            matrices = (
                new_stack[first_matrix : first_matrix + matrix_count] if len(new_stack) > matrix_count else new_stack
            )
            array = _to_leaf_shape(matrices, param_infos[index])
            if mesh_axes:
                array = jax.lax.with_sharding_constraint(array, param_infos[index].sharding)
            new_arrays[index], first_matrix = array, first_matrix + matrix_count
    return new_arrays


def _move_along(stack: Array, route: Sequence[NamedSharding]) -> Array:
    """Move a stack of matrices through the shardings of a route, one after another, and return the moved stack."""
    for sharding in route:
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    return stack


def _route(param_info: ParamInfo) -> list[NamedSharding]:
    """Return the route of a leaf: the shardings through which its matrices move until each device has whole matrices.

    Each step moves the shards of one dim, because XLA turns a move of several dims at once into a gather.
    """
    if param_info.stack == 1 and len(param_info.shape) == 3 and param_info.parts == 1:
        layer_axes, row_axes, column_axes = dim_axes(param_info.sharding.spec, 3)  # mesh axes of each dim
        merged_axes = (*layer_axes, *column_axes)
        axes_by_step = [
            (layer_axes, row_axes, column_axes),
            (merged_axes, row_axes, ()),
            ((*merged_axes, *row_axes), (), ()),
        ]
        axes_by_step = [
            dim_axes_of_step
            for step_index, dim_axes_of_step in enumerate(axes_by_step)
            if dim_axes_of_step not in axes_by_step[:step_index]
        ]
    else:
        axes_by_step = [(_sharded_axes(param_info), (), ())]
    specs = (PartitionSpec(*(axes or None for axes in dim_axes_of_step)) for dim_axes_of_step in axes_by_step)
    return [NamedSharding(param_info.sharding.mesh, spec) for spec in specs]


def _to_matrices(array: Array, param_info: ParamInfo) -> Array:
    """Return a leaf as a stack of matrices along the first dim; fused projections become separate matrices."""
    stack = array.reshape(param_info.tensors, param_info.rows, param_info.columns)
    if param_info.parts == 1:
        return stack
    split_stack = stack.reshape(param_info.tensors, param_info.rows, param_info.parts, -1).swapaxes(1, 2)
    return split_stack.reshape(param_info.tensors * param_info.parts, param_info.rows, -1)


def _to_leaf_shape(stack: Array, param_info: ParamInfo) -> Array:
    """Return a stack of matrices in the shape of its leaf: the inverse of `_to_matrices`."""
    if param_info.parts > 1:
        stack = stack.reshape(param_info.tensors, param_info.parts, param_info.rows, -1).swapaxes(1, 2)
    return stack.reshape(param_info.shape)


def _sharded_axes(param_info: ParamInfo) -> tuple[str, ...]:
    """Return the mesh axes of size 2 or more over which the leaf is sharded."""
    if param_info.sharding is None:
        return ()
    return tuple(axis for axis in axes_of(param_info.sharding.spec) if param_info.sharding.mesh.shape[axis] > 1)
