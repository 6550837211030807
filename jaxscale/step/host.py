"""Weights, gradients and optimizer state on the host, and how a train step reaches them.

`weights host` leaves the float32 weights (masters) on the host, and copies the weights of each block to the device when
the block runs. `optimizer_state streamed` leaves the optimizer's state on the host. `optimizer_state host` leaves both
the masters and the state there, and the host's CPU updates them. `gradients host` sends the gradients of streamed
weights to the host as soon as they are computed. This module uses `offload/updates.py` and `offload/weights.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.tree_util import KeyPath

from jaxscale.errors import UserError
from jaxscale.offload.updates import Advance, update_in_slices, update_on_device, update_on_host
from jaxscale.offload.weights import Streamed
from jaxscale.optim.groups import group_indices, mask_other_groups
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rules import RULES
from jaxscale.optim.update_guard import GuardedAdvance, RateEstimate, UpdateGuard, guarded_advance
from jaxscale.programs.elementwise import first_mixing_primitive
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import HOST_BYTES_FACTOR, is_rehearsal
from jaxscale.state.layout import Layout, device_of, local_bytes
from jaxscale.state.train_state import RateVerdict, TrainState
from jaxscale.step.update import Update
from jaxscale.trees import path_name
from jaxscale.typing import Array, Params
from jaxscale.values.byte_sizes import bytes_text


def check_host_size(layout: Layout, host_bytes: int | None, activation_bytes: int = 0) -> None:
    """Refuse a plan that puts more bytes on this process's host than the host has, before anything is allocated.

    State on the host counts twice, because a checkpoint copies it, and XLA may not update it in place.

    Args:
        layout: layout of the train state. If its mesh is abstract, without devices, nothing is checked.
        host_bytes: bytes of main memory of the host; `None` if unknown.
        activation_bytes: bytes of activations that each device keeps on the host for the backward pass.

    Raises:
        UserError: the host has too little memory.
    """
    plan, bytes_per_device = (
        layout.plan,
        HOST_BYTES_FACTOR * local_bytes(layout.abstract, is_on_host=True) + activation_bytes,
    )
    if not bytes_per_device or host_bytes is None or isinstance(layout.mesh, AbstractMesh):
        return
    local_devices = jax.local_devices()
    device_count = sum(device in local_devices for device in layout.mesh.devices.flat)
    if bytes_per_device * device_count > host_bytes:
        request_texts = [str(plan.offload)] * plan.offload.any + [f"memory {plan.memory}"] * (activation_bytes > 0)
        copy_text = " (the state counts twice, with the copy of a checkpoint)" if plan.offload.any else ""
        raise UserError(
            f"{', '.join(request_texts)}: each of {device_count} devices needs {bytes_text(bytes_per_device)} on the "
            f"host{copy_text}, {bytes_text(bytes_per_device * device_count)} in total, but the host has "
            f"{bytes_text(host_bytes)}; take more hosts, or keep more on the device"
        )


def describe_offload(layout: Layout) -> list[str]:
    """Return lines for the user on a plan's offload, to print before the first step; [] without offload."""
    if not layout.plan.offload.any:
        return []
    lines = [
        f"{layout.plan.offload}: {bytes_text(local_bytes(layout.abstract, is_on_host=True))} per device on the host"
    ]
    if is_rehearsal([device_of(layout.mesh)]):
        lines.append("a rehearsal: a CPU has no memory but its host's, so nothing is moved; the values are right")
    return lines


def is_judged_whole(plan: Plan, update: Update) -> bool:
    """Return whether each update is judged by its size before it is applied.

    If not, the rule bounds its updates, or no device ever holds a whole update: a fused kernel applies it, or it is
    applied in slices or on the host's CPU.
    """
    return not plan.offload.any and update.fused_advance is None and not update.is_bounded


def advance_of(plan: Plan, update: Update, layout: Layout, guard: UpdateGuard) -> GuardedAdvance:
    """Return the function that applies one update of the optimizer, on the device or on the host.

    Args:
        plan: the plan, which specifies where weights and optimizer state lie.
        update: the optimizer.
        layout: placements of parameters and optimizer state.
        guard: the condition that an update must meet, if updates are judged by their size.
    """
    if is_judged_whole(plan, update):
        return guarded_advance(update.clipped_rule, guard)
    advance = _advance_by_parts(plan, update, layout)

    def advance_and_report(
        gradients: Params, state: optax.OptState, params: Params, norm: Array, is_good: Array
    ) -> tuple[Params, optax.OptState, Array]:
        """Return the new parameters and state, and `is_good` unchanged."""
        return *advance(gradients, state, params, norm, is_good), is_good

    return advance_and_report


def rate_verdict_of(plan: Plan, update: Update, experiment: Experiment) -> RateVerdict | None:
    """Return the function that judges updates by their learning rate; `None` if their size is judged instead.

    Args:
        plan: the plan, which specifies where weights and optimizer state lie.
        update: the optimizer.
        experiment: the experiment, which specifies the rule, its learning rate and the guard.
    """
    if is_judged_whole(plan, update):
        return None
    optimizer, guard = experiment.optimizer, UpdateGuard(experiment.guard.update)
    member_by_index = optimizer.members()
    index_tree = jax.tree.map(lambda _: -1, update.param_infos)
    if optimizer.groups:
        index_tree = group_indices(list(optimizer.groups), update.param_infos)
    has_device_weights = plan.offload.weights == "device" and plan.offload.optimizer_state != "host"

    def verdict(state: TrainState, norm: Array) -> Array:
        """Return whether the next update may be applied, given the gradients' norm."""
        clipped_norm = norm if update.clip is None else jnp.minimum(norm, update.clip)
        rate_estimates = [
            _rate_estimate(
                member, experiment.steps, state.watch.good, mask_other_groups(state.params, index_tree, index)
            )
            for index, member in member_by_index.items()
        ]
        return guard.allows_rates(rate_estimates, clipped_norm, are_params_read=has_device_weights)

    return verdict


def _rate_estimate(optimizer: Optimizer, step_count: int, update_count: Array, params: Params) -> RateEstimate:
    """Return the `RateEstimate` of an optimizer's next update: its learning rate, unit and weight decay.

    Args:
        optimizer: the optimizer of these parameters, which has no groups.
        step_count: number of steps of the run.
        update_count: number of updates made.
        params: the parameters that the optimizer updates.
    """
    rate = jnp.asarray(optimizer.schedule_fn(step_count)(update_count), jnp.float32)
    if optimizer.custom is not None:
        return RateEstimate(rate, None, params)
    return RateEstimate(rate, RULES[optimizer.name].update_unit, params, optimizer.options()["weight_decay"])


def _advance_by_parts(plan: Plan, update: Update, layout: Layout) -> Advance:
    """Return the function that applies an update, if updates are not judged by their size."""
    if not plan.offload.any:
        return update.fused_advance or update_on_device(update.clipped_rule)
    if plan.offload.optimizer_state == "host":
        return update_on_host(update.rule, clip=update.clip)

    def with_state_sharding(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return an abstract parameter with the sharding of its optimizer state."""
        sharding = NamedSharding(layout.mesh, layout.placements[path_name(path)].state)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract_params = jax.tree_util.tree_map_with_path(with_state_sharding, layout.abstract.params)
    is_mixing = first_mixing_primitive(update.float32_rule, layout.abstract.params) is not None
    return update_in_slices(
        update.rule,
        abstract_params,
        clip=update.clip,
        elementwise=update.float32_rule,
        layers=update.by_layer_flags if is_mixing else None,
    )


def streamed_weights(
    layout: Layout, params: Params, copies: Params, gradient_shardings: Params
) -> tuple[Params, Callable[[Params], Params]]:
    """Return (leaves to differentiate, function from them to the module's parameters) for weights on the host.

    Among the parameters that this function returns, each weight of a block is a `Streamed`. If the plan puts gradients
    on the host, the differentiated leaf of such a weight is the weight itself. Otherwise, the leaf is an array of zeros
    on the device, which receives the gradient. All other weights are copied to the device for the step.

    Args:
        layout: provides the names of the blocks' weights, and the plan, which specifies dtypes and where gradients lie.
        params: the masters, on the host.
        copies: the copy of each weight that a pass on the device reads.
        gradient_shardings: `NamedSharding` of each gradient.
    """
    map_with_path, plan = jax.tree_util.tree_map_with_path, layout.plan
    has_host_gradients = plan.offload.gradients == "host"

    def differentiated_leaf(path: KeyPath, param: Array, copy: Array, sharding: NamedSharding) -> Array:
        if path_name(path) not in layout.streamed_names:
            return copy
        zeros = jnp.zeros(param.shape, param.dtype)
        return param if has_host_gradients else jax.lax.with_sharding_constraint(zeros, sharding)

    def params_of(leaves: Params) -> Params:
        def param_of(path: KeyPath, leaf: Array, param: Array) -> Array | Streamed:
            if path_name(path) not in layout.streamed_names:
                return leaf
            return streamed_weight(plan, leaf) if has_host_gradients else streamed_weight(plan, param, leaf)

        return map_with_path(param_of, leaves, params)

    return map_with_path(differentiated_leaf, params, copies, gradient_shardings), params_of


def streamed_weight(plan: Plan, weight: Array, zeros: Array | None = None) -> Streamed:
    """Return a weight on the host as a `Streamed`, which a block copies to the device when it runs.

    The block computes in the dtype of `plan.precision`, and the gradient is summed in the dtype of `plan.reduce`.

    Args:
        plan: the plan, which specifies the dtypes.
        weight: the float32 weight, on the host.
        zeros: zeros of the weight's shape on the device, which receive the gradient; `None` for a gradient on the host.
    """
    compute_dtype = None if plan.precision == "float32" else plan.precision
    return Streamed(weight, zeros, compute_dtype, plan.reduce == "float32")
