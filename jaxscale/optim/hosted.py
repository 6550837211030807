"""A wrapper of any optax rule whose state lies in host memory between steps.

An update gives back the updates of all weights, so these are on the device whole, where the gradients were; the state
need not be: slices of it come, are updated and go back, as in `offloaded.streamed` (ZeRO-Infinity, Rajbhandari et al.
2021, arXiv 2104.07857). Moving it whole saves nothing while the update runs: the compiler keeps all of it at once.

A step of AdamW over 192 MiB of weights, with its gradients, compiled for one chip (JAX 0.12.0.1, 2026-11-22; wrapped,
as `tests/optim/test_offloaded.py -m slow` compiles it; as it is, the same step without the wrapper), MiB on the device,
and on the host what is left there:

    state         float32                  int8
                  as it is    wrapped      as it is    wrapped
    TPU v5e       832         384 + 384    483         393 + 98
    H100          752         384 + 384    548         368 + 98

Left out: weights and gradients on the host, which are no rule's to move: a plan does it (`weights="host"`).
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
from jaxscale.optim.elementwise import first_mixing
from jaxscale.optim.offloaded import by_host_cpu, constants_there, cuts_of, in_slices, owners_of
from jaxscale.optim.quantize import decode, is_quantized
from jaxscale.optim.slices import SLICE_BYTES, Cut
from jaxscale.sharding.memory_space import HOST_KIND, check_host_memory, on_host, rehearses, to_device, to_host
from jaxscale.trees import path_name
from jaxscale.typing import Array, Params


def offload_state(
    rule: optax.GradientTransformation,
    pattern: str = "",
    *,
    run: Literal["streamed", "host"] = "streamed",
    shardings: Params | None = None,
    slice_bytes: int = SLICE_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation whose state lies in host memory ("pinned_host") between steps.

    The state is the rule's own. On the device an update holds weights, gradients (whose place the updates take, where
    dtypes agree) and slices.

    Under `jax.jit` donate parameters and state, and give them back in this order; or say by `out_shardings` where both
    lie. On one device, and on axes that are Explicit, JAX pairs what is donated with results by shape and dtype alone:
    of a state donated without its parameters, the memory would be taken for new parameters. That is an error when the
    program runs, and on a CPU of one device it ends the process (JAX 0.10.2, 0.12.0.1), so that this is refused where
    it shows: arrays inside `jax.jit` tell their device under a mesh alone.

    Args:
        rule: any optax transformation, `quantize_state` of one too: a quarter of the bytes come and go then.
        pattern: searched in the path of each array of the state ("0/mu/blocks/up"); what it finds goes to the host,
            all by default. Numbers without dims (counts, rates) stay on the device.
        run: where updates are made: "streamed", on the device in slices, for rules that treat each number by itself;
            "host", by the host's CPU, for any: gradients and weights go there too.
        shardings: of the parameters, a tree like them, where they lie on several devices:
            `jax.tree.map(lambda p: p.sharding, params)`. Slices then cut no dim that is sharded.
        slice_bytes: of one tensor on each device, at most, where it can be cut so small.

    Raises:
        UserError: `pattern` or `run` cannot be read. In `init` and `update`, before anything is traced: a device that
            reaches no host memory, a CPU of one device, a rule that mixes elements ("streamed"), nothing to be put on
            the host, parameters over several devices without `shardings`, a state that lies on the device.

    Example:
        >>> places = jax.sharding.NamedSharding(jax.make_mesh((2,), ("fsdp",)), jax.P("fsdp"))
        >>> params = jax.device_put({"w": jnp.ones((4, 2))}, places)
        >>> rule = offload_state(optax.adamw(1e-3), shardings={"w": places})
        >>> state = rule.init(params)
        >>> state[0].mu["w"].sharding.memory_kind
        'pinned_host'
        >>> updates, state = jax.jit(rule.update)(params, state, params)
        >>> state[0].nu["w"].sharding.memory_kind, updates["w"].sharding.memory_kind
        ('pinned_host', 'device')
    """
    inner = optax.with_extra_args_support(rule)
    if run not in ("streamed", "host"):
        raise unknown("run", run, ("streamed", "host"))
    try:
        searched = re.compile(pattern)
    except re.error as error:
        raise UserError(f"offload_state: pattern {pattern!r} is no regular expression: {error}") from None

    def placed(state: Any) -> Any:
        chosen = _chosen(state, searched)
        return jax.tree.map(lambda leaf, there: to_host(leaf) if there else to_device(leaf), state, chosen)

    def sliced(params: Params, extra: Mapping[str, Any]) -> list[Cut]:
        _check_each_number(inner, params, extra)
        return cuts_of(inner, _shapes(params), _places(params, shardings), slice_bytes)

    def init(params: Any) -> Any:
        leaves = jax.tree.leaves(params)
        if not leaves:  # optax asks what a state looks like with a placeholder for the parameters
            return inner.init(params)
        if not any(_is_traced(leaf) for leaf in leaves):
            params = jax.tree.map(jnp.asarray, params)
        platform = _check_devices(jax.tree.leaves(params))
        shapes = jax.eval_shape(inner.init, params)
        _check_chosen(shapes, searched)
        if run == "streamed":
            sliced(params, {})
        elif platform == "tpu" and any(x.ndim > 1 and x.dtype.itemsize == 1 for x in jax.tree.leaves(shapes)):
            raise UserError(
                'offload_state: run="host" with a quantized state, or split weights: the compiler for TPU dies on it; '
                'take "streamed", or quantize_state(rule, "float32") without split_weights'
            )
        if any(_is_traced(leaf) for leaf in leaves):
            return placed(inner.init(params))
        return jax.jit(inner.init, out_shardings=_beside(inner, params, shapes, _chosen(shapes, searched)))(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), state)
        _check_devices(jax.tree.leaves(state))
        _check_there(state, searched)
        state = placed(state)
        if run == "host":
            by_cpu = constants_there(functools.partial(inner.update, **extra))
            made, after = by_host_cpu(by_cpu, (updates, state, params), (updates, state))
            return to_device(made), placed(after)
        cuts = sliced(updates if params is None else params, extra)
        shapes, _ = jax.eval_shape(functools.partial(inner.update, **extra), *_shapes((updates, state, params)))
        wide = jax.tree.map(lambda g, s: g.astype(jnp.promote_types(g.dtype, s.dtype)), updates, shapes)

        def step(params: Any, old: tuple[Params, Any]) -> tuple[Params, Any]:
            gradients = jax.tree.map(lambda x, g: x.astype(g.dtype), old[0], updates)
            made, after = inner.update(gradients, old[1], params, **extra)
            return jax.tree.map(lambda new, x: new.astype(x.dtype), made, old[0]), after

        made, after = in_slices(inner, cuts, step, params, (wide, state))
        return jax.tree.map(lambda x, s: x.astype(s.dtype), made, shapes), placed(after)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_devices(leaves: Sequence[Array]) -> str:
    """The platform that arrays lie on, of which something can be put on the host; traced ones know a mesh at most.

    Raises:
        UserError: its devices reach no host memory, or it is a CPU of one device.
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in leaves if _is_traced(leaf)]
    described = next((mesh for mesh in meshes if not mesh.empty), None)
    if described is not None and described.abstract_device is not None and described.abstract_device.platform != "cpu":
        return described.abstract_device.platform
    if meshes:
        devices = set(jax.devices()[: None if described is None else described.size])
    else:
        devices = set().union(*(leaf.sharding.device_set for leaf in leaves))
    check_host_memory(devices, "offload_state")
    if len(devices) == 1 and rehearses(devices):
        raise UserError(
            "offload_state: a CPU of one device, where a program that donates such a state may end the process; leave "
            "offload_state out, for a CPU's memory is its host's, rehearse it on more devices (jax_num_cpu_devices), "
            "or take --plan.offload.optimizer-state streamed"
        )
    return next(iter(devices)).platform


def _beside(rule: optax.GradientTransformation, params: Params, state: Any, chosen: Any) -> Any:
    """Where a state is made: in host memory beside its parameters what is chosen; `None` for all else.

    Args:
        rule: whose state it is.
        params: arrays.
        state: shapes.
        chosen: for each leaf of the state whether it goes to the host.
    """
    leaves, treedef = jax.tree.flatten(params)
    flat, state_def = jax.tree.flatten(state)
    owners = jax.tree.leaves(owners_of(rule, state, treedef))

    def one(leaf: Any, owner: int, there: bool) -> Any:
        if not there:
            return None
        place = leaves[max(owner, 0)].sharding
        if isinstance(place, NamedSharding) and (owner < 0 or not _fits(place, leaf, leaves[owner])):
            place = NamedSharding(place.mesh, PartitionSpec())
        return place.with_memory_kind(HOST_KIND)

    return state_def.unflatten(map(one, flat, owners, jax.tree.leaves(chosen)))


def _fits(place: NamedSharding, leaf: Any, param: Array) -> bool:
    """Whether an array divides over a mesh as its parameter does."""
    if leaf.ndim != param.ndim:
        return False
    parts = [whole // part for whole, part in zip(param.shape, place.shard_shape(param.shape), strict=True)]
    return all(size % part == 0 for size, part in zip(leaf.shape, parts, strict=True))


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _chosen(state: Any, searched: re.Pattern[str]) -> Any:
    """Which leaves of a state go to the host."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        there = leaf.ndim > 0 and searched.search(path_name(path)) is not None
        return jax.tree.map(lambda _: there, leaf)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_quantized)


def _check_chosen(state: Any, searched: re.Pattern[str]) -> None:
    """Refuse to send nothing to the host."""
    if any(jax.tree.leaves(_chosen(state, searched))):
        return
    found = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
    arrays = [path_name(path) for path, leaf in found if leaf.ndim > 0]
    if not arrays:
        raise UserError(
            "offload_state: this optimizer's state has no arrays that could lie on the host; leave offload_state out"
        )
    raise UserError(
        f"offload_state: pattern {searched.pattern!r} is found in no path of the state's arrays "
        f"({', '.join(arrays[:3])}{', ...' if len(arrays) > 3 else ''}); take one that is, or leave it out for all"
    )


def _check_each_number(rule: optax.GradientTransformationExtraArgs, params: Params, extra: Mapping[str, Any]) -> None:
    """Refuse a rule that can't be run slice by slice; on a state without quantized arrays it is what they hold."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: decode(x) if is_quantized(x) else x, rule.init(params), is_leaf=is_quantized)

    found = first_mixing(optax.GradientTransformation(init, functools.partial(rule.update, **extra)), params)
    if found is not None:
        raise UserError(
            f"offload_state: this optimizer's update mixes elements of a tensor ({found}), so it can't be run slice by "
            'slice; take run="host", or leave out of the wrapped rule what mixes, as in '
            "optax.chain(optax.clip_by_global_norm(1.0), offload_state(optax.adamw(1e-3)))"
        )


def _check_there(state: Any, searched: re.Pattern[str]) -> None:
    """Refuse a state that is not where `init` puts it: the device would hold it between steps."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    for (path, leaf), there in zip(flat, jax.tree.leaves(_chosen(state, searched)), strict=True):
        if there and not on_host(leaf):
            raise UserError(
                f"offload_state: {path_name(path)} of the state lies on the device: put it back on the host, "
                "jax.device_put(leaf, leaf.sharding.with_memory_kind('pinned_host')); under a plan, which places it, "
                "take optimizer_state streamed in place of offload_state"
            )


def _places(params: Params, shardings: Params | None) -> list[Any]:
    """Shardings of the parameters, as far as JAX does not know them as given."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    if shardings is not None:
        known = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
        missing = [path_name(path) for path, _ in flat if path not in known]
        if missing:
            raise UserError(
                f"offload_state: shardings: there is none of {missing[0]}; expected a tree like the parameters, "
                "jax.tree.map(lambda p: p.sharding, params)"
            )
        return [known[path] for path, _ in flat]
    places = [jax.typeof(leaf).sharding for _, leaf in flat]
    for (path, _), place in zip(flat, places, strict=True):
        mesh = place.mesh
        if any(
            mesh.shape[name] > 1 and kind != AxisType.Explicit
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        ):
            raise UserError(
                f"offload_state: {path_name(path)} lies on a mesh {dict(mesh.shape)}, and how is not known while JAX "
                "traces: give shardings=jax.tree.map(lambda p: p.sharding, params), so that slices cut no sharded dim"
            )
    return places
