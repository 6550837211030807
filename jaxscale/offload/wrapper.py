"""A wrapper of any optax rule that keeps the rule's state in host memory between steps.

An optax update returns the updates of all weights; these lie on the device, in the memory of the gradients. The
state is moved in slices to the device and back, as in `updates.update_in_slices` (ZeRO-Infinity, Rajbhandari et al.
2021, arXiv 2104.07857). Moving the whole state at once would save nothing: the compiler keeps it on the device while
the update runs.

The table gives the memory of a step of AdamW over 192 MiB of weights, gradients included, compiled for one chip (JAX
0.12.0.1, 2026-11-22), as MiB on the device + MiB on the host. The wrapped step is compiled by
`tests/offload/test_updates.py -m slow`; the plain step is the same without the wrapper.

    state         float32                  int8
                  plain       wrapped      plain       wrapped
    TPU v5e       832         384 + 384    483         393 + 98
    H100          752         384 + 384    548         368 + 98

Left out: weights and gradients on the host, because a rule cannot move these; a plan can (`weights="host"`).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import UserError, unknown
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.lowbit.quantized import dequantize
from jaxscale.offload.slices import SLICE_BYTES, SliceCut
from jaxscale.offload.updates import cuts_of, owner_indices_of, run_in_slices, run_on_host_cpu, with_host_constants
from jaxscale.programs.elementwise import first_mixing_primitive
from jaxscale.sharding.memory_space import HOST_KIND, check_host_memory, is_rehearsal, on_host, to_device, to_host
from jaxscale.sharding.partition import divisible_spec
from jaxscale.trees import path_name, shapes_of
from jaxscale.typing import Array, Params


def offload_state(
    rule: optax.GradientTransformation,
    pattern: str = "",
    *,
    run: Literal["streamed", "host"] = "streamed",
    shardings: Params | None = None,
    slice_bytes: int = SLICE_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation whose state lies in host memory ("pinned_host") between steps.

    The state has the structure of the rule's state. During an update, the device holds weights, gradients and slices of
    the state. The updates reuse the memory of the gradients if their dtypes agree.

    Under `jax.jit`, either donate parameters and state and return them in this order, or specify the memory of both by
    `out_shardings`. On one device, and on a mesh with Explicit axes, JAX pairs donated arrays with results only by
    shape and dtype. If a state is donated without its parameters, its memory is reused for new parameters. The program
    then raises an error, or ends the process on a CPU of one device (JAX 0.10.2, 0.12.0.1). For such a CPU the wrapper
    raises an error if it can detect the CPU: inside `jax.jit`, only arrays under a mesh have a known device.

    Args:
        rule: any optax transformation, including one that `quantize_state` returned, whose state is a quarter as large.
        pattern: regular expression searched in the path of each array of the state ("0/mu/blocks/up"). Matching arrays
            go to the host; by default all arrays do. Scalars (counts, rates) stay on the device.
        run: place of the updates: "streamed" runs them on the device in slices, for rules that treat each element
            separately; "host" runs them on the host's CPU, for any rule, and sends gradients and weights there.
        shardings: tree like the parameters with their shardings, so that slices cut no sharded dim. If the parameters
            lie on several devices, pass `jax.tree.map(lambda p: p.sharding, params)`.
        slice_bytes: largest slice of one tensor on each device in bytes, as far as its dims allow.

    Raises:
        UserError: `pattern` or `run` is invalid. `init` and `update` raise the error before tracing in five cases: a
            device has no host memory, or is the only device of a CPU; the rule mixes elements ("streamed"); no array
            goes to the host; parameters lie on several devices without `shardings`; or the state lies on the device.

    Example:
        >>> sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("fsdp",)), jax.P("fsdp"))
        >>> params = jax.device_put({"w": jnp.ones((4, 2))}, sharding)
        >>> rule = offload_state(optax.adamw(1e-3), shardings={"w": sharding})
        >>> state = rule.init(params)
        >>> state[0].mu["w"].sharding.memory_kind
        'pinned_host'
        >>> updates, state = jax.jit(rule.update)(params, state, params)
        >>> state[0].nu["w"].sharding.memory_kind, updates["w"].sharding.memory_kind
        ('pinned_host', 'device')
    """
    base_rule = optax.with_extra_args_support(rule)
    if run not in ("streamed", "host"):
        raise unknown("run", run, ("streamed", "host"))
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UserError(f"offload_state: pattern {pattern!r} is not a regular expression: {error}") from None

    def place_state(state: Any) -> Any:
        """Return the state with matching arrays on the host and all others on the device."""
        host_flags = _host_flags(state, regex)
        return jax.tree.map(lambda leaf, is_hosted: to_host(leaf) if is_hosted else to_device(leaf), state, host_flags)

    def check_and_cut(params: Params, extra_args: Mapping[str, Any]) -> list[SliceCut]:
        """Return how to cut each parameter, after a check that the rule can run slice by slice."""
        _check_sliceable(base_rule, params, extra_args)
        return cuts_of(base_rule, shapes_of(params), _param_shardings(params, shardings), slice_bytes)

    def init(params: Any) -> Any:
        param_leaves = jax.tree.leaves(params)
        if not param_leaves:  # `optax.tree.map_params` passes placeholders
            return base_rule.init(params)
        if not any(isinstance(leaf, Tracer) for leaf in param_leaves):
            params = jax.tree.map(jnp.asarray, params)
        platform = _checked_platform(jax.tree.leaves(params))
        abstract_state = jax.eval_shape(base_rule.init, params)
        _check_any_on_host(abstract_state, regex)
        if run == "streamed":
            check_and_cut(params, {})
        elif platform == "tpu" and any(
            leaf.ndim > 1 and leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(abstract_state)
        ):
            raise UserError(
                'offload_state: the TPU compiler crashes on run="host" with a quantized state or split weights: use '
                'run="streamed", or quantize_state(rule, "float32") without split_weights'
            )
        if any(isinstance(leaf, Tracer) for leaf in param_leaves):
            return place_state(base_rule.init(params))
        out_shardings = _host_shardings(base_rule, params, abstract_state, _host_flags(abstract_state, regex))
        return jax.jit(base_rule.init, out_shardings=out_shardings)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        """Return the updates for the gradients `updates`, and the new state."""
        state = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), state)
        _checked_platform(jax.tree.leaves(state))
        _check_on_host(state, regex)
        state = place_state(state)
        if run == "host":
            update_on_cpu = with_host_constants(functools.partial(base_rule.update, **extra_args))
            new_updates, new_state = run_on_host_cpu(update_on_cpu, (updates, state, params), (updates, state))
            return to_device(new_updates), place_state(new_state)
        cuts = check_and_cut(updates if params is None else params, extra_args)
        abstract_updates, _ = jax.eval_shape(
            functools.partial(base_rule.update, **extra_args), *shapes_of((updates, state, params))
        )
        promoted_gradients = jax.tree.map(
            lambda gradient, abstract_update: gradient.astype(jnp.promote_types(gradient.dtype, abstract_update.dtype)),
            updates,
            abstract_updates,
        )

        def update_slices(param_slices: Any, gradients_and_state: tuple[Params, Any]) -> tuple[Any, Any]:
            """Return the updates of one slice, in the gradients' memory and dtype, and the slice's new state."""
            promoted_slices, state_slices = gradients_and_state
            gradient_slices = optax.tree.cast_like(promoted_slices, updates)
            new_updates, new_state = base_rule.update(gradient_slices, state_slices, param_slices, **extra_args)
            return optax.tree.cast_like(new_updates, promoted_slices), new_state

        new_updates, new_state = run_in_slices(base_rule, cuts, update_slices, params, (promoted_gradients, state))
        return optax.tree.cast_like(new_updates, abstract_updates), place_state(new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_platform(leaves: Sequence[Array]) -> str:
    """Return the platform of some arrays' devices, after a check that the devices have host memory.

    A traced array has no devices, and may have no mesh; without a mesh, all devices are checked.

    Raises:
        UserError: the devices have no host memory, or the only device is a CPU.
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves if isinstance(leaf, Tracer)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is not None and mesh.abstract_device is not None and mesh.abstract_device.platform != "cpu":
        return mesh.abstract_device.platform
    if meshes:
        devices = set(jax.devices()[: None if mesh is None else mesh.size])
    else:
        devices = set().union(*(leaf.sharding.device_set for leaf in leaves))
    check_host_memory(devices, "offload_state")
    if len(devices) == 1 and is_rehearsal(devices):
        raise UserError(
            "offload_state: got a CPU of one device, on which a program that donates an offloaded state may end the "
            "process. Leave offload_state out (a CPU's memory is host memory anyway), rehearse it on more devices "
            "(jax_num_cpu_devices), or use --plan.offload.optimizer-state streamed"
        )
    return next(iter(devices)).platform


def _host_shardings(rule: optax.GradientTransformation, params: Params, abstract_state: Any, host_flags: Any) -> Any:
    """Return a tree with the sharding of each array of a new state that goes to the host; `None` for all other leaves.

    An array is sharded like its parameter, or replicated if its shape does not allow that sharding.

    Args:
        rule: optax transformation to which the state belongs.
        params: the parameters, as arrays.
        abstract_state: shapes and dtypes of the state.
        host_flags: for each leaf of the state, whether it goes to the host.
    """
    param_leaves, treedef = jax.tree.flatten(params)
    state_leaves, state_def = jax.tree.flatten(abstract_state)
    owner_indices = jax.tree.leaves(owner_indices_of(rule, abstract_state, treedef))

    def sharding_of(leaf: Any, owner_index: int, is_hosted: bool) -> Any:
        """Return the sharding of a leaf of the state; `owner_index` is the index of its parameter, or -1."""
        if not is_hosted:
            return None
        sharding = param_leaves[max(owner_index, 0)].sharding
        if isinstance(sharding, NamedSharding) and (
            owner_index < 0 or not _is_divided_alike(sharding, leaf, param_leaves[owner_index])
        ):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return sharding.with_memory_kind(HOST_KIND)

    return state_def.unflatten(map(sharding_of, state_leaves, owner_indices, jax.tree.leaves(host_flags)))


def _is_divided_alike(sharding: NamedSharding, leaf: Any, param: Array) -> bool:
    """Return whether a sharding splits the dims of a state array in the same way as the dims of its parameter."""
    leaf_spec, param_spec = (divisible_spec(sharding.spec, shape, sharding.mesh) for shape in (leaf.shape, param.shape))
    return leaf.ndim == param.ndim and leaf_spec == param_spec


def _host_flags(state: Any, regex: re.Pattern[str]) -> Any:
    """Return a tree of bools like the state: true for arrays whose path matches `regex`, which go to the host."""

    def flags_of(path: tuple[Any, ...], node: Any) -> Any:
        """Return whether an array goes to the host; for a quantized array, the codes and the scales get this flag."""
        is_hosted = node.ndim > 0 and regex.search(path_name(path)) is not None
        return jax.tree.map(lambda _: is_hosted, node)

    return jax.tree_util.tree_map_with_path(flags_of, state, is_leaf=is_quantized)


def _check_any_on_host(state: Any, regex: re.Pattern[str]) -> None:
    """Raise UserError unless the pattern matches at least one array of the state."""
    if any(jax.tree.leaves(_host_flags(state, regex))):
        return
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
    array_names = [path_name(path) for path, leaf in paths_and_leaves if leaf.ndim > 0]
    if not array_names:
        raise UserError(
            "offload_state: this optimizer's state has no arrays that could lie on the host: leave offload_state out"
        )
    raise UserError(
        f"offload_state: pattern {regex.pattern!r} matches no path of the state's arrays "
        f"({', '.join(array_names[:3])}{', ...' if len(array_names) > 3 else ''}); change it, or leave it out"
    )


def _check_sliceable(
    rule: optax.GradientTransformationExtraArgs, params: Params, extra_args: Mapping[str, Any]
) -> None:
    """Raise UserError unless a rule can run slice by slice; quantized arrays are decoded for the check."""
    float32_rule = optax.GradientTransformation(
        lambda params: dequantize(rule.init(params)), functools.partial(rule.update, **extra_args)
    )
    operation = first_mixing_primitive(float32_rule, params)
    if operation is not None:
        raise UserError(
            f"offload_state: this optimizer's update mixes elements of a tensor ({operation}), so it can't be run "
            'slice by slice. Use run="host", or keep the mixing part out of the wrapped rule, as in '
            "optax.chain(optax.clip_by_global_norm(1.0), offload_state(optax.adamw(1e-3)))"
        )


def _check_on_host(state: Any, regex: re.Pattern[str]) -> None:
    """Raise UserError if an array of the state that belongs on the host lies on the device."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    for (path, leaf), is_hosted in zip(paths_and_leaves, jax.tree.leaves(_host_flags(state, regex)), strict=True):
        if is_hosted and not on_host(leaf):
            raise UserError(
                f"offload_state: {path_name(path)} of the state lies on the device. Put it back on the host by "
                "jax.device_put(leaf, leaf.sharding.with_memory_kind('pinned_host')). Under a plan, which places the "
                "state itself, use --plan.offload.optimizer-state streamed instead of offload_state"
            )


def _param_shardings(params: Params, shardings: Params | None) -> list[Any]:
    """Return the sharding of each parameter, from `shardings` or by default from the array."""
    paths_and_params = jax.tree_util.tree_flatten_with_path(params)[0]
    if shardings is not None:
        sharding_by_path = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
        missing_names = [path_name(path) for path, _ in paths_and_params if path not in sharding_by_path]
        if missing_names:
            raise UserError(
                f"offload_state: shardings lacks {missing_names[0]}; expected a tree like the parameters, "
                "such as jax.tree.map(lambda p: p.sharding, params)"
            )
        return [sharding_by_path[path] for path, _ in paths_and_params]
    param_shardings = [jax.typeof(param).sharding for _, param in paths_and_params]
    for (path, _), sharding in zip(paths_and_params, param_shardings, strict=True):
        mesh = sharding.mesh
        if any(
            mesh.shape[axis] > 1 and axis_type != AxisType.Explicit
            for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        ):
            raise UserError(
                f"offload_state: {path_name(path)} lies on a mesh {dict(mesh.shape)}, and tracing hides its sharding. "
                "Pass shardings=jax.tree.map(lambda p: p.sharding, params), so that slices cut no sharded dim"
            )
    return param_shardings
