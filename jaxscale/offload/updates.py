"""Updates of an optimizer's state in host memory.

Two ways to apply an optax rule, of one signature, that hold at most a slice of the state on the device:

* `streamed`: slices of state and weights come to the device, are updated there, and go back (ZeRO-Infinity, Rajbhandari
  et al. 2021, arXiv 2104.07857, without its NVMe; L2L, Pudipeddi et al. 2020, arXiv 2002.05645). For rules that treat
  each number by itself.
* `on_host`: gradients go to the host, whose CPU updates state and weights (ZeRO-Offload, Ren et al. 2021, arXiv
  2101.06840, without its one step of delay). For any rule.

`plainly` applies it without offload. All three take the norm for clipping, and whether the step is good, since a later
`where` over old and new state would need both whole on the device.

Plans use these functions. For custom training loops there is `hosted.offload_state`, a wrapper of a rule.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.compat import compute_on_host, rebind, scan_counts
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.offload.slices import SLICE_BYTES, SliceCut, cut, sweep
from jaxscale.programs.elementwise import check_elementwise
from jaxscale.sharding.memory_space import on_host as lies_on_host
from jaxscale.sharding.memory_space import to_device, to_host
from jaxscale.typing import Array, Float, Params

Advance = Callable[[Params, Any, Params, Any, Any], tuple[Params, Any]]
"""One step of an optimizer, `(gradients, state, params, norm, good) -> (params, state)`, each leaf in its old memory.

Gradients, state and parameters may lie in device or host memory; `norm` is the global norm of the gradients, and if
`good` is false, state and parameters are returned unchanged.
"""


def plainly(optimizer: optax.GradientTransformation) -> Advance:
    """Apply an optax transformation to whole trees on the device.

    Args:
        optimizer: with clipping.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        updates, new_state = optimizer.update(gradients, state, params)
        return _where(good, (optax.apply_updates(params, updates), new_state), (params, state))

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
    """Apply a rule slice by slice, on the device, to state, weights and gradients that may lie on the host.

    Args:
        rule: an optax transformation that treats each number by itself, or each layer of a stack. Its state, whose
            arrays have the parameters' shapes, may be quantized: slices cut no block.
        params: shapes of the parameters, with the sharding of the optimizer's state if there is a mesh.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.
        slice_bytes: largest slice of one tensor on each device, as far as its dims allow.
        elementwise: the rule within `rule` that must treat each number by itself, if `rule` shares scales in blocks;
            `rule` by default.
        layers: for each parameter, whether its first dim is of layers that the rule treats one by one: slices are then
            whole layers, and other parameters are not cut. `None`: the rule treats each number by itself.

    Raises:
        UserError: the rule mixes elements, and `layers` is `None`.

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
            updates, new_state = rule.update(clipped, old[1], old[0])
            return _where(good, (optax.apply_updates(old[0], updates), new_state), old)

        weights, new_state = in_slices(rule, cuts, step, gradients, (params, state if clip is None else state[1]))
        return weights, new_state if clip is None else (state[0], new_state)

    return advance


def on_host(rule: optax.GradientTransformation, *, clip: float | None = None) -> Advance:
    """Apply a rule on the host's CPU: gradients are sent there; state and weights are updated in place.

    Not for a TPU and a state in few bits: libtpu 0.0.51 assigns two tilings to an array of 8 or 4 bits and two dims or
    more that the host's CPU reads, and crashes; arrays of 16 and 32 bits, or of one dim, work.

    Args:
        rule: any optax transformation.
        clip: global norm that gradients are clipped to, on the host; the state is then that of
            `chain(clip_by_global_norm, rule)`.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        inner = state if clip is None else state[1]

        def update(gradients: Params, old: tuple[Params, Any], norm: Any, good: Any) -> tuple[Params, Any]:
            clipped = jax.tree.map(lambda g: _clipped(g, norm, clip), gradients)
            updates, new_state = rule.update(clipped, old[1], old[0])
            return _where(good, (optax.apply_updates(old[0], updates), new_state), old)

        old = (params, inner)
        new = by_host_cpu(constants_there(update), (gradients, old, norm, good), old)
        weights, new_state = jax.tree.map(lambda new, old: new if lies_on_host(old) else to_device(new), new, old)
        return weights, new_state if clip is None else (state[0], new_state)

    return advance


def by_host_cpu(function: Callable[..., Any], args: Any, like: Any) -> Any:
    """Run a function on the host's CPU on arguments moved there; its results, a tree like `like`, stay there."""
    return compute_on_host(function, jax.tree.map(lambda _: jax.memory.Space.Host, like))(*to_host(args))


def constants_there(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays in host memory whose constants lie there too, also within loops.

    JAX would place them on the device.
    """

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            operands = [x.val if hasattr(x, "val") else values[x] for x in eqn.invars]
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit") and inner is not None:
                outputs = run(inner.jaxpr, inner.consts, operands)
            elif eqn.primitive.name == "scan":
                outputs = loop(eqn.params, operands)
            else:
                if any(lies_on_host(x) for x in operands):
                    operands = [x if jax.numpy.ndim(x) == 0 else to_host(x) for x in operands]
                outputs = rebind(eqn, operands)
            values |= dict(zip(eqn.outvars, outputs, strict=True))
        return [x.val if hasattr(x, "val") else values[x] for x in jaxpr.outvars]

    def loop(params: Any, operands: Sequence[Any]) -> list[Any]:
        body, (num_consts, num_carry) = params["jaxpr"], scan_counts(params)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run(body.jaxpr, body.consts, [*operands[:num_consts], *carry, *xs])
            return outputs[:num_carry], outputs[num_carry:]

        carry, xs = list(operands[num_consts : num_consts + num_carry]), list(operands[num_consts + num_carry :])
        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        last_carry, ys = jax.lax.scan(step, carry, xs, **settings)
        return [*last_carry, *ys]

    def with_host_constants(*args: Any) -> Any:
        shapes = jax.tree.map(struct, args)
        program, out_shapes = jax.make_jaxpr(function, return_shape=True)(*shapes)
        outputs = run(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out_shapes), outputs)

    return with_host_constants


def cuts_of(
    rule: optax.GradientTransformation,
    params: Params,
    shardings: Sequence[Any],
    slice_bytes: int,
    layers: Params | None = None,
) -> list[SliceCut]:
    """The cut of each parameter and of its state."""
    leaves, units = jax.tree.leaves(params), _units(rule, params)
    if layers is not None:
        stacked = jax.tree.leaves(layers)
        units = [
            (unit[0], *leaf.shape[1:]) if is_stacked else leaf.shape
            for leaf, unit, is_stacked in zip(leaves, units, stacked, strict=True)
        ]
    cuts = [
        cut(leaf.shape, leaf.dtype.itemsize, sharding, slice_bytes, unit)
        for leaf, sharding, unit in zip(leaves, shardings, units, strict=True)
    ]
    return [c if c.pieces > 1 else SliceCut() for c in cuts]


def in_slices(
    rule: optax.GradientTransformation,
    cuts: Sequence[SliceCut],
    step: Callable[..., Any],
    read: Any,
    old: tuple[Any, Any],
) -> tuple[Params, Any]:
    """Run `step` on slices of trees like the parameters and of a rule's state, on the device.

    Leaves cut into equally many pieces form a group; `step` runs on one group at a time, with empty leaves in place of
    all others.

    Args:
        rule: the rule of the state.
        cuts: of each parameter.
        step: `(read, (written, state)) -> (written, state)`.
        read: a tree like the parameters; `None` is passed on.
        old: a tree like the parameters and their state, in device or host memory.

    Returns:
        The new pair of written tree and state, each leaf in its old memory.
    """
    treedef = jax.tree.structure(old[0])
    leaves, read_leaves = treedef.flatten_up_to(old[0]), [] if read is None else treedef.flatten_up_to(read)
    states, state_def = jax.tree.flatten(old[1])
    owners = jax.tree.leaves(owners_of(rule, old[1], treedef))
    shared_ids = [i for i, owner in enumerate(owners) if owner < 0]
    result_leaves, result_states = list(leaves), list(states)
    for pieces in sorted({c.pieces for c in cuts}):
        param_ids = [i for i, c in enumerate(cuts) if c.pieces == pieces]
        state_ids = [i for i, owner in enumerate(owners) if owner in param_ids]

        def step_slices(
            read_slices: list[Array],
            written_slices: list[Array],
            carry: Any,
            param_ids: list[int] = param_ids,
            state_ids: list[int] = state_ids,
        ) -> tuple[list[Array], Any]:
            old_leaves = _only_at(leaves, param_ids, written_slices[: len(param_ids)])
            old_states = _only_at(states, state_ids, written_slices[len(param_ids) :])
            for i in shared_ids:
                old_states[i] = to_device(states[i])
            slices = treedef.unflatten(_only_at(read_leaves, param_ids, read_slices)) if read_leaves else None
            output = step(slices, (treedef.unflatten(old_leaves), state_def.unflatten(old_states)))
            new_leaves, new_states = treedef.flatten_up_to(output[0]), state_def.flatten_up_to(output[1])
            new_slices = [new_leaves[i] for i in param_ids] + [new_states[i] for i in state_ids]
            return new_slices, [new_states[i] for i in shared_ids]

        reads = [(read_leaves[i], cuts[i].dim) for i in param_ids] if read_leaves else []
        writes = [(leaves[i], cuts[i].dim) for i in param_ids]
        writes += [(states[i], cuts[owners[i]].dim) for i in state_ids]
        outputs, last_carry = sweep(step_slices, pieces, reads, writes, [to_device(states[i]) for i in shared_ids])
        for i, output in zip(param_ids, outputs[: len(param_ids)], strict=True):
            result_leaves[i] = output
        for i, output in zip(state_ids, outputs[len(param_ids) :], strict=True):
            result_states[i] = output
        for i, output in zip(shared_ids, last_carry, strict=True):
            result_states[i] = output
    return treedef.unflatten(result_leaves), state_def.unflatten(result_states)


def global_norm(gradients: Params, shardings: Params | None = None) -> Float[Array, ""]:
    """Global norm of gradients in device or host memory; those on the host are read slice by slice.

    Args:
        gradients: any tree.
        shardings: tree of `NamedSharding` like the gradients; `None` for one device.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    if not any(lies_on_host(g) for g in leaves):
        return optax.tree.norm(gradients)
    leaf_shardings = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    total = jnp.zeros((), jnp.float32)
    for leaf, sharding in zip(leaves, leaf_shardings, strict=True):
        slicing = cut(leaf.shape, leaf.dtype.itemsize, sharding)
        _, total = sweep(_add_squares, slicing.pieces, [(leaf, slicing.dim)], [], total)
    return jnp.sqrt(total)


def _add_squares(read: list[Array], written: list[Array], total: Array) -> tuple[list[Array], Array]:
    return written, total + jnp.sum(jnp.square(read[0].astype(jnp.float32)))


def _where(good: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def _clipped(gradient: Array, norm: Array, clip: float | None) -> Array:
    """A gradient clipped as by `optax.clip_by_global_norm`, to the bit."""
    if clip is None:
        return gradient
    return jnp.where(norm < clip, gradient, (gradient / norm.astype(gradient.dtype)) * clip)


def owners_of(rule: optax.GradientTransformation, state: Any, treedef: Any) -> Any:
    """For each leaf of a state, the number of its parameter; -1 for none."""
    return _of_params(
        rule,
        lambda leaf, number: jax.tree.map(lambda _: number, leaf),
        state,
        treedef.unflatten(range(treedef.num_leaves)),
    )


def _of_params(rule: optax.GradientTransformation, function: Callable[..., Any], state: Any, *trees: Any) -> Any:
    """Map a function over a state's entries of parameters (arrays, quantized, empty nodes); other leaves give -1."""
    return optax.tree.map_params(
        rule,
        function,
        state,
        *trees,
        transform_non_params=lambda _: -1,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode) or is_quantized(leaf),
    )


def _units(rule: optax.GradientTransformation, params: Params) -> list[tuple[int, ...]]:
    """For each dim of each parameter, a divisor of slice lengths: the blocks of its quantized state."""
    leaves, treedef = jax.tree.flatten(params)
    units = [[1] * len(leaf.shape) for leaf in leaves]

    def note(leaf: Any, number: int) -> Any:
        if is_quantized(leaf):
            units[number][-2] = math.lcm(units[number][-2], leaf.block)
        return leaf

    _of_params(rule, note, jax.eval_shape(rule.init, params), treedef.unflatten(range(len(leaves))))
    return [tuple(unit) for unit in units]


def _only_at(leaves: list[Array], indices: list[int], slices: list[Array]) -> list[Array]:
    """`slices` at `indices`; empty leaves elsewhere, without columns but with all rows, which blocks must divide."""
    arrays: list[Any] = [jnp.zeros((*leaf.shape[:-1], 0), leaf.dtype) for leaf in leaves]
    for i, array in zip(indices, slices, strict=True):
        arrays[i] = array
    return arrays
