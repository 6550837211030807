"""Update an optimizer's state in host memory.

Two functions return the step of an optimizer, with at most a slice of its state on the device:

* `update_in_slices`: slices of state and weights go to the device, are updated there, and go back (ZeRO-Infinity,
  Rajbhandari et al. 2021, arXiv 2104.07857, but without NVMe; L2L, Pudipeddi et al. 2020, arXiv 2002.05645). This
  function is for rules that treat each element separately.
* `update_on_host`: gradients go to the host, whose CPU updates state and weights (ZeRO-Offload, Ren et al. 2021, arXiv
  2101.06840, but without a delay of one step). This function is for any rule.

`update_on_device` returns the step without offload. All three steps also take the gradients' norm, for clipping, and
whether the step is good (its gradients are finite). If the caller selected the old or the new state after the step,
both states would have to be on the device.

Plans use these functions. For custom training loops, `wrapper.offload_state` wraps a rule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.compat import compute_on_host, rebind, scan_counts
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.lowbit.quantized import map_params
from jaxscale.offload.slices import SLICE_BYTES, SliceCut, cut, sweep
from jaxscale.programs.elementwise import check_elementwise
from jaxscale.sharding.memory_space import on_host, to_device, to_host
from jaxscale.trees import shapes_of
from jaxscale.typing import Array, Float, Params

Advance = Callable[[Params, Any, Params, Any, Any], tuple[Params, Any]]
"""One step of an optimizer, `(gradients, state, params, norm, is_good) -> (params, state)`.

Gradients, state and parameters may lie in device or host memory, and each leaf stays there. `norm` is the
global norm of the gradients. If `is_good` is false, state and parameters are returned unchanged.
"""


def update_on_device(optimizer: optax.GradientTransformation) -> Advance:
    """Return the step that applies an optax transformation to whole trees on the device.

    Args:
        optimizer: optax transformation that includes clipping.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, is_good: Any) -> tuple[Params, Any]:
        return _apply_rule(optimizer, gradients, (params, state), norm, is_good)

    return advance


def update_in_slices(
    rule: optax.GradientTransformation,
    params: Params,
    *,
    clip: float | None = None,
    slice_bytes: int = SLICE_BYTES,
    elementwise: optax.GradientTransformation | None = None,
    layers: Params | None = None,
) -> Advance:
    """Return the step that applies a rule slice by slice on the device, to trees that may lie on the host.

    Args:
        rule: an optax transformation that treats each element, or each layer of a stack, separately. The arrays of the
            rule's state have the parameters' shapes. If these arrays are quantized, each slice contains whole blocks.
        params: shapes of the parameters, with the sharding of the optimizer's state if there is a mesh.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.
        slice_bytes: largest slice of one tensor on each device in bytes, as far as its dims allow.
        elementwise: the rule that must treat each element separately; `rule` by default. If the state of `rule` is
            quantized, pass the float32 rule that `rule` wraps, because the elements of a block share a scale.
        layers: for each parameter, whether its first dim is stacked layers that the rule treats one by one. Slices are
            then whole layers, and all other parameters stay whole. `None` if the rule treats each element separately.

    Raises:
        UserError: the rule mixes elements, and `layers` is `None`.

    Example:
        >>> params = {"w": jnp.ones((4, 2))}
        >>> rule = optax.sgd(0.5)
        >>> advance = update_in_slices(rule, params, slice_bytes=8)
        >>> after, _ = jax.jit(advance)(params, rule.init(params), params, jnp.ones(()), jnp.array(True))
        >>> after["w"].shape, float(after["w"][3, 1])
        ((4, 2), 0.5)
    """
    if layers is None:
        check_elementwise(rule if elementwise is None else elementwise, params)
    abstract_leaves = jax.tree.leaves(params)
    cuts = cuts_of(rule, params, [getattr(leaf, "sharding", None) for leaf in abstract_leaves], slice_bytes, layers)

    def advance(gradients: Params, state: Any, params: Params, norm: Any, is_good: Any) -> tuple[Params, Any]:
        def step(gradient_slices: Params, param_and_state_slices: tuple[Params, Any]) -> tuple[Params, Any]:
            return _apply_rule(rule, gradient_slices, param_and_state_slices, norm, is_good, clip)

        new_params, new_state = run_in_slices(
            rule, cuts, step, gradients, (params, state if clip is None else state[1])
        )
        return new_params, new_state if clip is None else (state[0], new_state)

    return advance


def update_on_host(rule: optax.GradientTransformation, *, clip: float | None = None) -> Advance:
    """Return the step that applies a rule on the host's CPU: gradients go to the host, and weights change in place.

    Do not use this step on a TPU with a state in 8 or 4 bits. If the host's CPU reads an array of 8 or 4 bits with two
    dims or more, libtpu 0.0.51 assigns two tilings to the array and crashes. Arrays of 16 or 32 bits, or of one dim,
    work.

    Args:
        rule: any optax transformation.
        clip: global norm to which gradients are clipped on the host; the state is then that of
            `chain(clip_by_global_norm, rule)`.
    """

    def advance(gradients: Params, state: Any, params: Params, norm: Any, is_good: Any) -> tuple[Params, Any]:
        old_trees = (params, state if clip is None else state[1])
        host_step = with_host_constants(functools.partial(_apply_rule, rule, clip=clip))
        new_trees = run_on_host_cpu(host_step, (gradients, old_trees, norm, is_good), old_trees)
        new_params, new_state = jax.tree.map(
            lambda new_leaf, old_leaf: new_leaf if on_host(old_leaf) else to_device(new_leaf), new_trees, old_trees
        )
        return new_params, new_state if clip is None else (state[0], new_state)

    return advance


def run_on_host_cpu(function: Callable[..., Any], args: Any, result_like: Any) -> Any:
    """Run a function on the host's CPU, with arguments moved to host memory; return its outputs, which stay there.

    Args:
        function: function to run.
        args: tuple of arguments, in device or host memory.
        result_like: tree with the structure of the function's output.
    """
    return compute_on_host(function, jax.tree.map(lambda _: jax.memory.Space.Host, result_like))(*to_host(args))


def with_host_constants(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for arguments in host memory, with its constants in host memory too, including those in loops.

    By default, JAX places constants on the device.
    """

    def run_jaxpr(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr equation by equation, and return its outputs."""
        value_of_variable = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else value_of_variable[atom]

        for equation in jaxpr.eqns:
            operands = [value_of(atom) for atom in equation.invars]
            inner_jaxpr = equation.params.get("jaxpr")
            if equation.primitive.name in ("jit", "pjit") and inner_jaxpr is not None:
                outputs = run_jaxpr(inner_jaxpr.jaxpr, inner_jaxpr.consts, operands)
            elif equation.primitive.name == "scan":
                outputs = run_scan(equation.params, operands)
            else:
                if any(on_host(operand) for operand in operands):
                    operands = [operand if jax.numpy.ndim(operand) == 0 else to_host(operand) for operand in operands]
                outputs = rebind(equation, operands)
            value_of_variable |= dict(zip(equation.outvars, outputs, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def run_scan(params: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluate a `scan` equation with these parameters; return the last carry and then the stacked outputs."""
        body_jaxpr, (num_consts, num_carry) = params["jaxpr"], scan_counts(params)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run_jaxpr(body_jaxpr.jaxpr, body_jaxpr.consts, [*operands[:num_consts], *carry, *xs])
            return outputs[:num_carry], outputs[num_carry:]

        carry, xs = list(operands[num_consts : num_consts + num_carry]), list(operands[num_consts + num_carry :])
        scan_settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        last_carry, ys = jax.lax.scan(step, carry, xs, **scan_settings)
        return [*last_carry, *ys]

    def run_program(*args: Any) -> Any:
        """Trace `function` and evaluate its program on the arguments."""
        program, abstract_outputs = jax.make_jaxpr(function, return_shape=True)(*shapes_of(args))
        outputs = run_jaxpr(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(abstract_outputs), outputs)

    return run_program


def cuts_of(
    rule: optax.GradientTransformation,
    params: Params,
    shardings: Sequence[Any],
    slice_bytes: int,
    layers: Params | None = None,
) -> list[SliceCut]:
    """Return how to cut each parameter into slices; the parameter's state is cut in the same way.

    Args:
        rule: optax transformation that updates the parameters.
        params: shapes of the parameters.
        shardings: sharding of each parameter, in the order of its leaves; `None` for one device.
        slice_bytes: largest slice on each device in bytes.
        layers: for each parameter, whether its first dim is stacked layers that are only cut between layers; `None` if
            slices may also cut layers.
    """
    param_leaves, units_by_leaf = jax.tree.leaves(params), _slice_units(rule, params)
    if layers is not None:
        stacked_flags = jax.tree.leaves(layers)
        units_by_leaf = [
            (units[0], *param.shape[1:]) if is_stacked else param.shape
            for param, units, is_stacked in zip(param_leaves, units_by_leaf, stacked_flags, strict=True)
        ]
    cuts = [
        cut(param.shape, param.dtype.itemsize, sharding, slice_bytes, units)
        for param, sharding, units in zip(param_leaves, shardings, units_by_leaf, strict=True)
    ]
    return [slice_cut if slice_cut.pieces > 1 else SliceCut() for slice_cut in cuts]


def run_in_slices(
    rule: optax.GradientTransformation,
    cuts: Sequence[SliceCut],
    step: Callable[..., Any],
    read_tree: Any,
    old_trees: tuple[Any, Any],
) -> tuple[Params, Any]:
    """Run `step` on the device, on slices of trees like the parameters and of a rule's state.

    Leaves that are cut into the same number of slices form a group. `step` runs on one group at a time, with empty
    arrays for all other leaves.

    Args:
        rule: optax transformation to which the state belongs.
        cuts: how to cut each parameter.
        step: function of a slice of `read_tree` and a slice of `old_trees` that returns the new slice of `old_trees`.
        read_tree: tree like the parameters that is only read; if it is `None`, `step` gets `None`.
        old_trees: pair (tree like the parameters, state of the rule), in device or host memory; both are replaced.

    Returns:
        The new pair (tree, state), with each leaf in its old memory space.
    """
    treedef = jax.tree.structure(old_trees[0])
    old_leaves = treedef.flatten_up_to(old_trees[0])
    read_leaves = [] if read_tree is None else treedef.flatten_up_to(read_tree)
    state_leaves, state_def = jax.tree.flatten(old_trees[1])
    owner_indices = jax.tree.leaves(owner_indices_of(rule, old_trees[1], treedef))
    shared_indices = [index for index, owner_index in enumerate(owner_indices) if owner_index < 0]
    new_leaves, new_state_leaves = list(old_leaves), list(state_leaves)
    for slice_count in sorted({slice_cut.pieces for slice_cut in cuts}):
        param_indices = [index for index, slice_cut in enumerate(cuts) if slice_cut.pieces == slice_count]
        state_indices = [index for index, owner_index in enumerate(owner_indices) if owner_index in param_indices]

        def step_slices(
            read_slices: list[Array],
            written_slices: list[Array],
            carried_leaves: Any,
            param_indices: list[int] = param_indices,
            state_indices: list[int] = state_indices,
        ) -> tuple[list[Array], Any]:
            """Run `step` on a slice of each leaf of the group; the carry of earlier slices is ignored."""
            leaf_slices = _put_at(old_leaves, param_indices, written_slices[: len(param_indices)])
            state_slices = _put_at(state_leaves, state_indices, written_slices[len(param_indices) :])
            for index in shared_indices:
                state_slices[index] = to_device(state_leaves[index])
            read_tree_slices = (
                treedef.unflatten(_put_at(read_leaves, param_indices, read_slices)) if read_leaves else None
            )
            new_trees = step(read_tree_slices, (treedef.unflatten(leaf_slices), state_def.unflatten(state_slices)))
            new_leaf_slices = treedef.flatten_up_to(new_trees[0])
            new_state_slices = state_def.flatten_up_to(new_trees[1])
            new_slices = [new_leaf_slices[index] for index in param_indices]
            new_slices += [new_state_slices[index] for index in state_indices]
            return new_slices, [new_state_slices[index] for index in shared_indices]

        read_arrays_and_dims = [(read_leaves[index], cuts[index].dim) for index in param_indices] if read_leaves else []
        written_arrays_and_dims = [(old_leaves[index], cuts[index].dim) for index in param_indices]
        written_arrays_and_dims += [(state_leaves[index], cuts[owner_indices[index]].dim) for index in state_indices]
        new_arrays, new_shared_leaves = sweep(
            step_slices,
            slice_count,
            read_arrays_and_dims,
            written_arrays_and_dims,
            [to_device(state_leaves[index]) for index in shared_indices],
        )
        for index, new_array in zip(param_indices, new_arrays[: len(param_indices)], strict=True):
            new_leaves[index] = new_array
        for index, new_array in zip(
            state_indices + shared_indices, new_arrays[len(param_indices) :] + new_shared_leaves, strict=True
        ):
            new_state_leaves[index] = new_array
    return treedef.unflatten(new_leaves), state_def.unflatten(new_state_leaves)


def global_norm(gradients: Params, shardings: Params | None = None) -> Float[Array, ""]:
    """Return the global norm of gradients in device or host memory; gradients on the host are read slice by slice.

    Args:
        gradients: any tree of arrays.
        shardings: tree of `NamedSharding` like the gradients; `None` for one device.
    """
    gradient_leaves, treedef = jax.tree.flatten(gradients)
    if not any(on_host(g) for g in gradient_leaves):
        return optax.tree.norm(gradients)
    leaf_shardings = [None] * len(gradient_leaves) if shardings is None else treedef.flatten_up_to(shardings)
    square_sum = jnp.zeros((), jnp.float32)
    for gradient, sharding in zip(gradient_leaves, leaf_shardings, strict=True):
        slice_cut = cut(gradient.shape, gradient.dtype.itemsize, sharding)
        _, square_sum = sweep(_add_squares, slice_cut.pieces, [(gradient, slice_cut.dim)], [], square_sum)
    return jnp.sqrt(square_sum)


def _add_squares(read_slices: list[Array], written_slices: list[Array], square_sum: Array) -> tuple[list[Array], Array]:
    """Add the squares of a slice to a sum, as the `body` of a `sweep`; return no new slices, and the new sum."""
    return written_slices, square_sum + jnp.sum(jnp.square(read_slices[0].astype(jnp.float32)))


def _apply_rule(
    rule: optax.GradientTransformation,
    gradients: Params,
    params_and_state: tuple[Params, Any],
    norm: Any,
    is_good: Any,
    clip: float | None = None,
) -> tuple[Params, Any]:
    """Return the new parameters and state, or the old ones if the step is not good.

    Args:
        rule: optax transformation.
        gradients: gradients, not yet clipped.
        params_and_state: pair (parameters, state).
        norm: global norm of the gradients.
        is_good: bool scalar, whether the step is good.
        clip: global norm to which gradients are clipped; `None` if `rule` clips them or nothing does.
    """

    def clip_gradient(gradient: Array) -> Array:
        """Clip a gradient, bit for bit like `optax.clip_by_global_norm`."""
        return jnp.where(norm < clip, gradient, (gradient / norm.astype(gradient.dtype)) * clip)

    params, state = params_and_state
    clipped_gradients = gradients if clip is None else jax.tree.map(clip_gradient, gradients)
    updates, new_state = rule.update(clipped_gradients, state, params)
    return optax.tree.where(is_good, (optax.apply_updates(params, updates), new_state), params_and_state)


def owner_indices_of(rule: optax.GradientTransformation, state: Any, treedef: Any) -> Any:
    """Return for each leaf of a state the index of its parameter; -1 if the leaf belongs to no parameter."""
    return map_params(
        lambda node, index: jax.tree.map(lambda _: index, node),  # a quantized node has two leaves
        rule,
        state,
        treedef.unflatten(range(treedef.num_leaves)),
        transform_non_params=lambda _: -1,
    )


def _slice_units(rule: optax.GradientTransformation, params: Params) -> list[tuple[int, ...]]:
    """Return, for each dim of each parameter, a length that must divide a slice's length, so that no block is cut."""
    param_leaves, treedef = jax.tree.flatten(params)
    units_by_param = [[1] * len(leaf.shape) for leaf in param_leaves]
    state = jax.eval_shape(rule.init, params)
    state_and_owners = (state, owner_indices_of(rule, state, treedef))
    for node, owner_index in zip(
        *(jax.tree.leaves(tree, is_leaf=is_quantized) for tree in state_and_owners), strict=True
    ):
        if is_quantized(node):
            index = owner_index.codes  # `owner_index` is like `node`, with the parameter's index instead of each array
            units_by_param[index][-2] = math.lcm(units_by_param[index][-2], node.block)
    return [tuple(units) for units in units_by_param]


def _put_at(leaves: list[Array], indices: list[int], slices: list[Array]) -> list[Array]:
    """Return a list like `leaves`, with the slices at these indices and empty arrays at all other indices.

    The empty arrays have no columns, but all their rows, because blocks must divide the number of rows.
    """
    arrays: list[Any] = [jnp.zeros((*leaf.shape[:-1], 0), leaf.dtype) for leaf in leaves]
    for index, array in zip(indices, slices, strict=True):
        arrays[index] = array
    return arrays
