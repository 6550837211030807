"""What of a train step lies on the host: which leaves, how the step reaches them, what the compiled program must show.

`weights host` leaves the float32 masters on the host and streams each block's when it runs; `optimizer_state streamed`
and `host` leave the optimizer's state there, and the latter the masters too, which the host's CPU then updates;
`gradients host` sends the gradients of streamed weights to the host as they are made. `offload/updates.py` and
`offload/weights.py` are the techniques; this module is where they meet.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jaxscale.errors import UserError
from jaxscale.offload.slices import cut
from jaxscale.offload.updates import Advance, on_host, plainly, streamed
from jaxscale.offload.weights import Streamed, of_a_block
from jaxscale.programs.elementwise import first_mixing
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.memory_space import COPY, HOST_KIND, rehearses
from jaxscale.state.layout import Layout, local_bytes
from jaxscale.step.update import Update
from jaxscale.step.wire_checks import NoEffect
from jaxscale.trees import named_leaves, path_name
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
    if rehearses(layout.mesh.devices.flat):
        lines.append("a rehearsal: a CPU has no memory but its host's, so the values are right and nothing is moved")
    return lines


def check_host_bytes(layout: Layout, memory: Any, as_text: Callable[[], str | None]) -> None:
    """Compare what a compiled step has on the host with its plan.

    Args:
        layout: of the train state.
        memory: `memory_analysis()` of the compiled step.
        as_text: gives the text of the compiled step.

    Raises:
        NoEffect: less lies on the host than the plan puts there, or the step brings a whole stack of it to the device
            at once, which saves nothing.
    """
    if not layout.plan.offload.any or rehearses(layout.mesh.devices.flat):
        return
    planned, actual = local_bytes(layout.abstract, host=True), memory.host_argument_size_in_bytes
    if actual < planned:
        raise NoEffect(
            f"{layout.plan.offload}: {actual} bytes of the compiled step lie on the host, and {planned} should"
        )
    if layout.plan.offload.weights == "device" and layout.plan.offload.optimizer_state == "host":
        return  # the passes read a whole copy of the weights
    text = as_text() or ""
    # weights outside of blocks are copied to the device for the step
    copied = {
        leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in named_leaves(layout.abstract.params).items()
        if layout.plan.offload.masters and not of_a_block(name)
    }
    for leaf in jax.tree.leaves(layout.abstract):
        local = leaf.sharding.shard_shape(leaf.shape)
        if leaf.sharding.memory_kind != HOST_KIND or local in copied:
            continue
        pieces = cut(leaf.shape, leaf.dtype.itemsize, leaf.sharding).pieces
        if pieces > 1 and brought_whole(text, local):
            raise NoEffect(
                f"{layout.plan.offload}: the compiled step brings a whole array of shape {local} to the device "
                f"at once, where {pieces} slices should come one by one: it saves nothing"
            )


def brought_whole(text: str, shape: Sequence[int]) -> bool:
    """Whether a compiled program copies an array of this shape from host memory to the device.

    Example:
        >>> start = "%c = (f32[4,8]{1,0:T(8,128)}, f32[4,8]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)"
        >>> brought_whole(start, (4, 8)), brought_whole(start, (4, 4))
        (True, False)
    """
    dims = re.escape(f"[{','.join(map(str, shape))}]")
    array = rf"\w+{dims}\{{(?![^}}]*S\(5\))[^}}]*\}}"
    there = rf"\w+{dims}\{{[^}}]*S\(5\)[^}}]*\}}"
    return re.search(rf"= \({array}, {there}, [^=]*\) copy-start\(", text) is not None


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

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
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

    def moving(path: Any, param: Array, copy: Array, sharding: NamedSharding) -> Array:
        if not of_a_block(path_name(path)):
            return copy
        zeros = jnp.zeros(param.shape, param.dtype)
        return param if there else jax.lax.with_sharding_constraint(zeros, sharding)

    def params_of(moving: Params) -> Params:
        def one(path: Any, moved: Array, param: Array) -> Any:
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
