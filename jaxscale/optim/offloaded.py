"""An optimizer's state in host memory, and the update that reaches it there.

Two ways to apply an optax rule, of one signature, that never hold more of the state on the device than a slice:

* `streamed`: slices of state and weights come to the device, are updated there, and go back (ZeRO-Infinity, Rajbhandari
  et al. 2021, arXiv 2104.07857, without its NVMe; L2L, Pudipeddi et al. 2020, arXiv 2002.05645). For rules that treat
  each number by itself.
* `on_host`: gradients go to the host, whose CPU updates state and weights (ZeRO-Offload, Ren et al. 2021, arXiv
  2101.06840, without its one step of delay). For any rule.

`plainly` is the same without offload. All three are told whether the step is good, since a `where` over old and new
state afterwards would need both whole on the device, and the norm that gradients are clipped by.

A plan takes these. For a training loop of one's own there is `hosted.offload_state`, a wrapper of a rule.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.compat import compute_on_host, rebind, scan_counts
from jaxscale.optim.elementwise import check_elementwise
from jaxscale.optim.quantize import is_quantized
from jaxscale.optim.slices import SLICE_BYTES, Cut, cut, sweep
from jaxscale.sharding.memory_space import on_host as lies_on_host
from jaxscale.sharding.memory_space import to_device, to_host
from jaxscale.typing import Array, Float, Params

Advance = Callable[[Params, Any, Params, Any, Any], tuple[Params, Any]]
"""One step of an optimizer, `(gradients, state, params, norm, good) -> (params, state)`, each leaf where it was.

Gradients, state and parameters may lie in device or host memory; `norm` is the global norm of the gradients, and where
`good` is false, state and parameters are given back as they were.
"""


def plainly(optimizer: optax.GradientTransformation) -> Advance:
    """Apply an optax transformation to whole trees on the device.

    Args:
        optimizer: clipping and all.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        updates, after = optimizer.update(gradients, state, params)
        return _where(good, (optax.apply_updates(params, updates), after), (params, state))

    return advance


def streamed(
    rule: optax.GradientTransformation,
    params: Params,
    *,
    clip: float | None = None,
    slice_bytes: int = SLICE_BYTES,
    elementwise: optax.GradientTransformation | None = None,
    layers: Params | None = None,
) -> Advance:
    """Apply a rule slice by slice, on the device, to state (and weights, and gradients) that may lie on the host.

    Args:
        rule: an optax transformation that treats each number by itself, or each layer of a stack. Its state, whose
            arrays have the parameters' shapes, may be quantized: slices cut no block.
        params: shapes of the parameters, with the sharding of the optimizer's state where there is a mesh.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.
        slice_bytes: of one tensor on each device, at most, where it can be cut so small.
        elementwise: the rule within `rule` that must treat each number by itself, where that one shares a scale in a
            block; `rule` itself by default.
        layers: of each parameter, whether its first dim is of layers, each of which the rule treats by itself: slices
            are of whole layers, and other parameters are not cut. `None`: numbers are treated by themselves.

    Raises:
        UserError: the rule mixes elements, and `layers` are not given.

    Example:
        >>> params = {"w": jnp.ones((4, 2))}
        >>> rule = optax.sgd(0.5)
        >>> advance = streamed(rule, params, slice_bytes=8)
        >>> after, _ = jax.jit(advance)(params, rule.init(params), params, jnp.ones(()), jnp.array(True))
        >>> after["w"].shape, float(after["w"][3, 1])
        ((4, 2), 0.5)
    """
    if layers is None:
        check_elementwise(rule if elementwise is None else elementwise, params)
    leaves = jax.tree.leaves(params)
    cuts = cuts_of(rule, params, [getattr(leaf, "sharding", None) for leaf in leaves], slice_bytes, layers)

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        def step(gradients: Params, old: tuple[Params, Any]) -> tuple[Params, Any]:
            clipped = jax.tree.map(lambda g: _clipped(g, norm, clip), gradients)
            updates, after = rule.update(clipped, old[1], old[0])
            return _where(good, (optax.apply_updates(old[0], updates), after), old)

        weights, after = in_slices(rule, cuts, step, gradients, (params, state if clip is None else state[1]))
        return weights, after if clip is None else (state[0], after)

    return advance


def on_host(rule: optax.GradientTransformation, *, clip: float | None = None) -> Advance:
    """Apply a rule on the host's CPU: gradients go there, state and weights are updated where they lie.

    Not for a TPU and a state in few bits: libtpu 0.0.51 gives an array of 8 or 4 bits and two dims or more two tilings
    where the host's CPU takes it, and dies of it; of 16 and 32 bits, and of one dim, it does not.

    Args:
        rule: any optax transformation.
        clip: global norm that gradients are clipped to, on the host; the state is then that of
            `chain(clip_by_global_norm, rule)`.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        inner = state if clip is None else state[1]

        def update(gradients: Params, old: tuple[Params, Any], norm: Any, good: Any) -> tuple[Params, Any]:
            clipped = jax.tree.map(lambda g: _clipped(g, norm, clip), gradients)
            updates, after = rule.update(clipped, old[1], old[0])
            return _where(good, (optax.apply_updates(old[0], updates), after), old)

        old = (params, inner)
        new = by_host_cpu(constants_there(update), (gradients, old, norm, good), old)
        weights, after = jax.tree.map(lambda new, old: new if lies_on_host(old) else to_device(new), new, old)
        return weights, after if clip is None else (state[0], after)

    return advance


def by_host_cpu(function: Callable[..., Any], args: Any, like: Any) -> Any:
    """A function run by the host's CPU on arguments that are brought there; its results, a tree like `like`, stay."""
    return compute_on_host(function, jax.tree.map(lambda _: jax.memory.Space.Host, like))(*to_host(args))


def constants_there(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays in host memory whose constants are there too, those of loops as well.

    JAX makes arrays of them on the device.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            given = [x.val if hasattr(x, "val") else known[x] for x in eqn.invars]
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit") and inner is not None:
                made = run(inner.jaxpr, inner.consts, given)
            elif eqn.primitive.name == "scan":
                made = loop(eqn.params, given)
            else:
                if any(lies_on_host(x) for x in given):
                    given = [x if jax.numpy.ndim(x) == 0 else to_host(x) for x in given]
                made = rebind(eqn, given)
            known |= dict(zip(eqn.outvars, made, strict=True))
        return [x.val if hasattr(x, "val") else known[x] for x in jaxpr.outvars]

    def loop(params: Any, given: Sequence[Any]) -> list[Any]:
        body, (consts, carried) = params["jaxpr"], scan_counts(params)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            made = run(body.jaxpr, body.consts, [*given[:consts], *carry, *xs])
            return made[:carried], made[carried:]

        start, xs = list(given[consts : consts + carried]), list(given[consts + carried :])
        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        last, ys = jax.lax.scan(step, start, xs, **settings)
        return [*last, *ys]

    def there(*args: Any) -> Any:
        shapes = jax.tree.map(shape, args)
        closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
        found = run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return there


def cuts_of(
    rule: optax.GradientTransformation,
    params: Params,
    places: Sequence[Any],
    slice_bytes: int,
    layers: Params | None = None,
) -> list[Cut]:
    """How each parameter is cut, and its state with it."""
    leaves, units = jax.tree.leaves(params), _units(rule, params)
    if layers is not None:
        stacked = jax.tree.leaves(layers)
        units = [
            (unit[0], *leaf.shape[1:]) if many else leaf.shape
            for leaf, unit, many in zip(leaves, units, stacked, strict=True)
        ]
    cuts = [
        cut(leaf.shape, leaf.dtype.itemsize, place, slice_bytes, unit)
        for leaf, place, unit in zip(leaves, places, units, strict=True)
    ]
    return [c if c.pieces > 1 else Cut() for c in cuts]


def in_slices(
    rule: optax.GradientTransformation, cuts: Sequence[Cut], step: Callable[..., Any], read: Any, old: tuple[Any, Any]
) -> tuple[Params, Any]:
    """Run `step` on slices of trees like the parameters and of a rule's state, on the device.

    Leaves cut in as many pieces go together, one such group after the other; the leaves of all others are empty then.

    Args:
        rule: whose state it is.
        cuts: of each parameter.
        step: `(read, (written, state)) -> (written, state)`.
        read: a tree like the parameters; `None` is handed on.
        old: a tree like the parameters and a state of theirs, in device or host memory.

    Returns:
        The second pair, each leaf where it was.
    """
    treedef = jax.tree.structure(old[0])
    leaves, given = treedef.flatten_up_to(old[0]), [] if read is None else treedef.flatten_up_to(read)
    states, state_def = jax.tree.flatten(old[1])
    owners = jax.tree.leaves(owners_of(rule, old[1], treedef))
    free = [i for i, owner in enumerate(owners) if owner < 0]
    after_leaves, after_states = list(leaves), list(states)
    for pieces in sorted({c.pieces for c in cuts}):
        members = [i for i, c in enumerate(cuts) if c.pieces == pieces]
        owned = [i for i, owner in enumerate(owners) if owner in members]

        def body(
            read: list[Array],
            parts: list[Array],
            carry: Any,
            members: list[int] = members,
            owned: list[int] = owned,
        ) -> tuple[list[Array], Any]:
            old_leaves = _in_place_of(leaves, members, parts[: len(members)])
            old_states = _in_place_of(states, owned, parts[len(members) :])
            for i in free:
                old_states[i] = to_device(states[i])
            slices = treedef.unflatten(_in_place_of(given, members, read)) if given else None
            new = step(slices, (treedef.unflatten(old_leaves), state_def.unflatten(old_states)))
            new_leaves, new_states = treedef.flatten_up_to(new[0]), state_def.flatten_up_to(new[1])
            results = [new_leaves[i] for i in members] + [new_states[i] for i in owned]
            return results, [new_states[i] for i in free]

        sliced = [(given[i], cuts[i].dim) for i in members] if given else []
        written = [(leaves[i], cuts[i].dim) for i in members]
        written += [(states[i], cuts[owners[i]].dim) for i in owned]
        news, last = sweep(body, pieces, sliced, written, [to_device(states[i]) for i in free])
        for i, new in zip(members, news[: len(members)], strict=True):
            after_leaves[i] = new
        for i, new in zip(owned, news[len(members) :], strict=True):
            after_states[i] = new
        for i, new in zip(free, last, strict=True):
            after_states[i] = new
    return treedef.unflatten(after_leaves), state_def.unflatten(after_states)


def global_norm(gradients: Params, shardings: Params | None = None) -> Float[Array, ""]:
    """Global norm of gradients in device or host memory; of the latter, one slice at a time is on the device.

    Args:
        gradients: any tree.
        shardings: tree of `NamedSharding` like it; `None` for one device.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    if not any(lies_on_host(g) for g in leaves):
        return optax.tree.norm(gradients)
    places = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    total = jnp.zeros((), jnp.float32)
    for leaf, sharding in zip(leaves, places, strict=True):
        c = cut(leaf.shape, leaf.dtype.itemsize, sharding)
        _, total = sweep(_add_squares, c.pieces, [(leaf, c.dim)], [], total)
    return jnp.sqrt(total)


def _add_squares(read: list[Array], written: list[Array], total: Array) -> tuple[list[Array], Array]:
    return written, total + jnp.sum(jnp.square(read[0].astype(jnp.float32)))


def _where(good: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def _clipped(gradient: Array, norm: Array, clip: float | None) -> Array:
    """As `optax.clip_by_global_norm` has it, to the bit."""
    if clip is None:
        return gradient
    return jnp.where(norm < clip, gradient, (gradient / norm.astype(gradient.dtype)) * clip)


def owners_of(rule: optax.GradientTransformation, state: Any, treedef: Any) -> Any:
    """For each leaf of a state the number of the parameter it belongs to; -1 for none."""
    return _of_params(
        rule,
        lambda leaf, number: jax.tree.map(lambda _: number, leaf),
        state,
        treedef.unflatten(range(treedef.num_leaves)),
    )


def _of_params(rule: optax.GradientTransformation, function: Callable[..., Any], state: Any, *trees: Any) -> Any:
    """A function of each part of a state that is of a parameter (an array, a quantized one, an empty node); -1 else."""
    return optax.tree.map_params(
        rule,
        function,
        state,
        *trees,
        transform_non_params=lambda _: -1,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode) or is_quantized(leaf),
    )


def _units(rule: optax.GradientTransformation, params: Params) -> list[tuple[int, ...]]:
    """Of each parameter, what of each dim a slice must keep together: the blocks of its quantized state."""
    leaves, treedef = jax.tree.flatten(params)
    units = [[1] * len(leaf.shape) for leaf in leaves]

    def note(leaf: Any, number: int) -> Any:
        if is_quantized(leaf):
            units[number][-2] = math.lcm(units[number][-2], leaf.block)
        return leaf

    _of_params(rule, note, jax.eval_shape(rule.init, params), treedef.unflatten(range(len(leaves))))
    return [tuple(unit) for unit in units]


def _in_place_of(leaves: list[Array], chosen: list[int], parts: list[Array]) -> list[Array]:
    """As many leaves, empty but for the chosen ones: no columns, but all rows, which blocks of a state must divide."""
    found: list[Any] = [jnp.zeros((*leaf.shape[:-1], 0), leaf.dtype) for leaf in leaves]
    for i, part in zip(chosen, parts, strict=True):
        found[i] = part
    return found
