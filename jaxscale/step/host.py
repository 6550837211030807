"""What of a train step lies on the host: which leaves, how the step reaches them, what the compiled program must show.

`weights host` leaves the float32 masters on the host and streams each block's when it runs; `optimizer_state streamed`
and `host` leave the optimizer's state there, and the latter the masters too, which the host's CPU then updates;
`gradients host` sends the gradients of streamed weights to the host as they are made. `optim/offloaded.py` and
`memory/offload.py` are the techniques; this module is where they meet.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxscale.errors import UserError
from jaxscale.memory.offload import Streamed, of_a_block
from jaxscale.optim.elementwise import check_elementwise
from jaxscale.optim.offloaded import Advance, on_host, plainly, streamed
from jaxscale.sharding.memory_space import check_host_memory
from jaxscale.step.layout import Layout, masters_on_host
from jaxscale.step.plan import Plan
from jaxscale.trees import path_name
from jaxscale.typing import Array, Params


def uses_host(plan: Plan) -> bool:
    """Whether a plan leaves weights or optimizer state on the host."""
    return masters_on_host(plan) or plan.optimizer_state != "device"


def check_offload(plan: Plan, model: Any, rule: optax.GradientTransformation, params: Params, devices: Any) -> None:
    """Refuse an offload that this model, optimizer or machine does not take, before anything is traced.

    Args:
        plan: with its mesh settled.
        model: of the experiment.
        rule: the optimizer without clipping.
        params: shapes of the parameters.
        devices: of the mesh.

    Raises:
        UserError: as it says.
    """
    if not uses_host(plan):
        return
    asked = f"weights {plan.weights}" if plan.weights == "host" else f"optimizer_state {plan.optimizer_state}"
    check_host_memory(devices, asked)
    if plan.weights == "host" and getattr(model, "foreign", False):
        raise UserError(
            "weights host: weights are streamed to the blocks of layers.Stack and layers.Chain; this model "
            "brings its own layers: take optimizer_state streamed or host"
        )
    if plan.optimizer_state != "host":
        check_elementwise(rule, params, asked)


def advance_of(
    plan: Plan,
    rule: optax.GradientTransformation,
    clip: float | None,
    whole: optax.GradientTransformation,
    layout: Layout,
) -> Advance:
    """How the optimizer's step is made under a plan.

    Args:
        plan: where weights and state are.
        rule: the optimizer without clipping.
        clip: global norm that gradients are clipped to.
        whole: the optimizer, clipping and all.
        layout: where the optimizer's state lies.
    """
    if plan.optimizer_state == "host":
        return on_host(rule, clip=clip)
    if not uses_host(plan):
        return plainly(whole)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(layout.mesh, layout.placements[path_name(path)].state)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return streamed(rule, jax.tree_util.tree_map_with_path(placed, layout.abstract.params), clip=clip)


def streamed_weights(
    plan: Plan, params: Params, copies: Params, gradients: Params
) -> tuple[Params, Callable[[Params], Params]]:
    """What of weights on the host is differentiated, and the map from it to what the module is given.

    A weight of a block is `Streamed`, and differentiated where its gradient is to be: on the host itself, on the device
    by zeros tied to it. All others are copied to the device for the step.

    Args:
        plan: types and places.
        params: the masters, on the host.
        copies: of each, as a pass on the device reads it.
        gradients: `NamedSharding` of each gradient.
    """
    by_path = jax.tree_util.tree_map_with_path
    there = plan.gradients == "host"
    low = None if plan.precision == "float32" else plan.precision

    def moving(path: Any, param: Array, copy: Array, sharding: NamedSharding) -> Array:
        if not of_a_block(path_name(path)):
            return copy
        zeros = jnp.zeros(param.shape, param.dtype)
        return param if there else jax.lax.with_sharding_constraint(zeros, sharding)

    def given(moving: Params) -> Params:
        def one(path: Any, moved: Array, param: Array) -> Any:
            if not of_a_block(path_name(path)):
                return moved
            weight, tie = (moved, None) if there else (param, moved)
            return Streamed(weight, tie, low, plan.reduce == "float32")

        return by_path(one, moving, params)

    return by_path(moving, params, copies, gradients), given
