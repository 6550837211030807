"""Weights, gradients and optimizer state on the host, and how a train step reaches them.

`weights host` leaves the float32 masters on the host and streams each block's when it runs; `optimizer_state streamed`
and `host` leave the optimizer's state there, and the latter the masters too, which the host's CPU then updates;
`gradients host` sends the gradients of streamed weights to the host as they are made. `offload/updates.py` and
`offload/weights.py` are the techniques; this module is where they meet.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.tree_util import KeyPath

from jaxscale.errors import UserError
from jaxscale.offload.updates import Advance, on_host, plainly, streamed
from jaxscale.offload.weights import Streamed, of_a_block
from jaxscale.programs.elementwise import first_mixing
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import COPY, rehearses
from jaxscale.state.layout import Layout, device_of, local_bytes
from jaxscale.step.update import Update
from jaxscale.trees import path_name
from jaxscale.typing import Array, Params
from jaxscale.values.byte_sizes import bytes_text


def check_host_size(layout: Layout, host_bytes: int | None, kept: int = 0) -> None:
    """Refuse to put more on this process's host than it holds, before anything is allocated.

    Of the state, what lies there counts twice: for the copy that a checkpoint takes, or XLA where it updates nothing in
    place.

    Args:
        layout: where the train state lies; devices that are only described have no host here.
        host_bytes: main memory of the host; `None` if unknown.
        kept: bytes of activations that each device keeps there for the backward pass.

    Raises:
        UserError: it is too small.
    """
    plan, each = layout.plan, COPY * local_bytes(layout.abstract, host=True) + kept
    if not each or host_bytes is None or isinstance(layout.mesh, AbstractMesh):
        return
    here = jax.local_devices()
    count = sum(device in here for device in layout.mesh.devices.flat)
    if each * count > host_bytes:
        asked = [str(plan.offload)] * plan.offload.any + [f"memory {plan.memory}"] * (kept > 0)
        twice = " (of the state twice, with the copy of a checkpoint)" if plan.offload.any else ""
        raise UserError(
            f"{', '.join(asked)}: {bytes_text(each)} for each of {count} devices lies on their host{twice}: "
            f"{bytes_text(each * count)}, and the host has {bytes_text(host_bytes)}; take more hosts, or keep more on "
            "the device"
        )


def describe(layout: Layout) -> list[str]:
    """What a user should know of a plan's offload before the first step; nothing where there is none."""
    if not layout.plan.offload.any:
        return []
    lines = [f"{layout.plan.offload}: {bytes_text(local_bytes(layout.abstract, host=True))} per device on the host"]
    if rehearses([device_of(layout.mesh)]):
        lines.append("a rehearsal: a CPU has no memory but its host's, so the values are right and nothing is moved")
    return lines


def advance_of(plan: Plan, update: Update, layout: Layout) -> Advance:
    """The optimizer's step under a plan.

    Args:
        plan: where weights and state are.
        update: the optimizer.
        layout: where its state lies.
    """
    if plan.offload.optimizer_state == "host":
        return on_host(update.rule, clip=update.clip)
    if not plan.offload.any:
        return update.fused or plainly(update.whole)

    def placed(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(layout.mesh, layout.placements[path_name(path)].state)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree_util.tree_map_with_path(placed, layout.abstract.params)
    mixes = first_mixing(update.plain, layout.abstract.params) is not None
    layers = update.layers if mixes else None
    return streamed(update.rule, params, clip=update.clip, elementwise=update.plain, layers=layers)


def streamed_weights(
    plan: Plan, params: Params, copies: Params, gradients: Params
) -> tuple[Params, Callable[[Params], Params]]:
    """The differentiated leaves of weights on the host, and a function from them to the module's parameters.

    A weight of a block is `Streamed`, and differentiated where its gradient is to be: on the host itself, on the device
    by zeros tied to it. All others are copied to the device for the step.

    Args:
        plan: types and places.
        params: the masters, on the host.
        copies: of each, as a pass on the device reads it.
        gradients: `NamedSharding` of each gradient.
    """
    by_path = jax.tree_util.tree_map_with_path
    there = plan.offload.gradients == "host"

    def moving(path: KeyPath, param: Array, copy: Array, sharding: NamedSharding) -> Array:
        if not of_a_block(path_name(path)):
            return copy
        zeros = jnp.zeros(param.shape, param.dtype)
        return param if there else jax.lax.with_sharding_constraint(zeros, sharding)

    def params_of(moving: Params) -> Params:
        def one(path: KeyPath, moved: Array, param: Array) -> Array | Streamed:
            if not of_a_block(path_name(path)):
                return moved
            return streamed_weight(plan, moved) if there else streamed_weight(plan, param, moved)

        return by_path(one, moving, params)

    return by_path(moving, params, copies, gradients), params_of


def streamed_weight(plan: Plan, weight: Array, tie: Array | None = None) -> Streamed:
    """A weight on the host as a block takes it: in the type computed in, its gradient summed in that of `reduce`.

    Args:
        plan: types.
        weight: float32, on the host.
        tie: zeros like it on the device, which its gradient goes to; `None` leaves the gradient on the host.
    """
    low = None if plan.precision == "float32" else plan.precision
    return Streamed(weight, tie, low, plan.reduce == "float32")
