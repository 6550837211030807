"""per_layer: an optax rule applied to each layer of stacked parameters, and to each kernel as a matrix.

For an array of stacked layers, `optax.lamb` takes one norm over all layers, `optax.contrib.muon` uses Adam, and
`optax.contrib.galore` makes no projection. A wrapped rule gets every layer as a separate array. The state stays one
array for all layers, and has the parameter's shape if the rule's state for a layer has the layer's shape. So sharding,
quantization and checkpoints treat this state like Adam's. `by_kind` applies a different rule to each kind of parameter.

Here, a *tensor* is one layer of a stacked parameter, or a whole parameter that is not stacked.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.optim.leaves import ParamInfo, param_infos_of
from jaxscale.typing import Array

UpdateRule = optax.GradientTransformation


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Placeholder for the tree of parameters in the state of a rule."""


_PLACEHOLDER: Any = _Placeholder()


def per_layer(
    rule: UpdateRule, param_info_tree: Any = None, *, as_matrices: bool = False, on_whole_tensors: bool = False
) -> UpdateRule:
    """Return a rule that applies `rule` separately to each tensor of stacked parameters.

    Args:
        rule: an optax transformation that treats each parameter separately. State that is not like the parameters, such
            as a count, must not depend on gradients.
        param_info_tree: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths, without
            stacked dims.
        as_matrices: whether to pass tensors of kind "matrix" to the rule as matrices, whose columns are the last dim
            and whose rows are all other dims.
        on_whole_tensors: whether to gather each tensor first. This is for a rule that decomposes tensors: XLA would
            otherwise distribute the products over axes that replicate the tensor, including slow axes.

    Returns:
        A transformation whose state has the structure of the rule's state; its arrays have the stacked dims in front.

    Example:
        >>> from jaxscale.optim.leaves import leaf_of
        >>> params = {"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])}
        >>> param_info_tree = {"w": leaf_of("w", ("layers", "norm"), (2, 2))}
        >>> rule = per_layer(optax.scale_by_trust_ratio(), param_info_tree)
        >>> rule.update({"w": jnp.eye(2)}, rule.init(params), params)[0]["w"].tolist()  # norms 5 and 1
        [[5.0, 0.0], [0.0, 1.0]]
    """

    def init(params: Any) -> Any:
        """Return the state of the rule, computed tensor by tensor."""
        if not jax.tree.leaves(params):  # the placeholder of `optax.tree.map_params`
            return rule.init(params)
        state_form, treedef = _state_form(rule), jax.tree.structure(params)

        def init_tensor(param: Any) -> list[Any]:
            """Return the state of one tensor, without the state that all parameters share."""
            return state_form.split(rule.init(param))[0]

        leaf_states: list[list[Any]] = []
        for param, param_info in zip(jax.tree.leaves(params), param_infos_of(param_info_tree, params), strict=True):
            init_tensors = jax.vmap(init_tensor) if param_info.stack else init_tensor
            tensor_states = init_tensors(_to_tensors(param, param_info, as_matrices))
            leaf_states.append(
                jax.tree.map(lambda s, param_info=param_info: _to_leaf(s, param_info, as_matrices), tensor_states)
            )
        _, shared_state = state_form.split(rule.init(_PLACEHOLDER))
        state_trees = [treedef.unflatten(arrays) for arrays in zip(*leaf_states, strict=True)]
        return state_form.join(state_trees, shared_state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the new updates, computed tensor by tensor from the gradients `updates`, and the new state."""
        state_form, treedef = _state_form(rule), jax.tree.structure(updates)
        param_infos = param_infos_of(param_info_tree, updates)
        state_trees, shared_state = state_form.split(state)
        leaf_states = list(zip(*map(treedef.flatten_up_to, state_trees), strict=True)) or [()] * len(param_infos)
        param_leaves = [None] * len(param_infos) if params is None else treedef.flatten_up_to(params)
        new_updates: list[Any] = []
        new_leaf_states: list[list[Any]] = []
        new_shared_state: list[Any] = shared_state

        def update_tensor(gradient: Array, param_states: list[Any], param: Any) -> tuple[Any, list[Any], list[Any]]:
            """Return the new update of one tensor, its new state, and the new state that all parameters share."""
            new_update, new_state = rule.update(gradient, state_form.join(param_states, shared_state), param)
            return new_update, *state_form.split(new_state)

        for param_info, gradient, param_states, param in zip(
            param_infos, jax.tree.leaves(updates), leaf_states, param_leaves, strict=True
        ):
            leaf_inputs = gradient, list(param_states), param
            if on_whole_tensors:
                leaf_inputs = _constrain(leaf_inputs, param_info, is_whole=True)
            tensor_inputs = jax.tree.map(
                lambda x, param_info=param_info: _to_tensors(x, param_info, as_matrices), leaf_inputs
            )
            update_tensors = jax.vmap(update_tensor, out_axes=(0, 0, None)) if param_info.stack else update_tensor
            new_update, tensor_states, new_shared_state = update_tensors(*tensor_inputs)
            new_update = new_update.reshape(gradient.shape)
            new_states = jax.tree.map(
                lambda s, param_info=param_info: _to_leaf(s, param_info, as_matrices), tensor_states
            )
            if on_whole_tensors:
                whole_outputs = _constrain((new_update, new_states), param_info, is_whole=True)
                new_update, new_states = _constrain(whole_outputs, param_info, is_whole=False)
            new_updates.append(new_update)
            new_leaf_states.append(new_states)
        new_state_trees = [treedef.unflatten(arrays) for arrays in zip(*new_leaf_states, strict=True)]
        return treedef.unflatten(new_updates), state_form.join(new_state_trees, new_shared_state)

    return optax.GradientTransformation(init, update)


class ByKindState(NamedTuple):
    """States of the rules of `by_kind`, by the name of the rule.

    The state of a rule has an array of one element in place of each parameter that another rule updates.
    """

    states: dict[str, Any]


def by_kind(
    rules: Mapping[str, UpdateRule], rule_name_of: Callable[[ParamInfo], str], param_info_tree: Any = None
) -> UpdateRule:
    """Return a rule that updates each parameter by the rule that `rule_name_of` selects.

    Unlike the states of `optax.partition`, the states of this rule are trees like the parameters: a state also has an
    array for each parameter of another rule.

    Args:
        rules: rules by name. Each rule must treat each parameter separately.
        rule_name_of: function from the `ParamInfo` of a parameter to the name of its rule.
        param_info_tree: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.

    Example:
        >>> rule = by_kind({"m": optax.sgd(1.0), "v": optax.sgd(0.1)}, lambda leaf: leaf.kind[0])
        >>> grads = {"w": jnp.ones((1, 2)), "b": jnp.ones(1)}
        >>> jax.tree.map(lambda x: x.tolist(), rule.update(grads, rule.init(grads))[0])
        {'b': [-0.10000000149011612], 'w': [[-1.0, -1.0]]}
    """

    def mask_others(tree: Any, name: str) -> Any:
        """Return the tree, with an array of one element in place of each parameter that another rule updates."""
        arrays, treedef = jax.tree.flatten(tree)
        arrays_and_infos = zip(arrays, param_infos_of(param_info_tree, tree), strict=True)
        return treedef.unflatten(
            [
                array if rule_name_of(param_info) == name else jnp.zeros((1,), array.dtype)
                for array, param_info in arrays_and_infos
            ]
        )

    def init(params: Any) -> ByKindState:
        return ByKindState({name: rule.init(mask_others(params, name)) for name, rule in rules.items()})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the new updates of all rules for the gradients `updates`, and the states of the rules."""
        treedef, param_infos = jax.tree.structure(updates), param_infos_of(param_info_tree, updates)
        updates_by_rule, new_states = {}, {}
        for name, rule in rules.items():
            masked_params = None if params is None else mask_others(params, name)
            new_updates, new_states[name] = rule.update(mask_others(updates, name), state.states[name], masked_params)
            updates_by_rule[name] = treedef.flatten_up_to(new_updates)
        leaf_updates = [
            updates_by_rule[rule_name_of(param_info)][index] for index, param_info in enumerate(param_infos)
        ]
        return treedef.unflatten(leaf_updates), ByKindState(new_states)

    return optax.GradientTransformation(init, update)


def matrices_by(
    rule: UpdateRule,
    adam: UpdateRule,
    rate: float | Callable[[Any], Any],
    weight_decay: float,
    param_info_tree: Any,
    mask: Any,
) -> UpdateRule:
    """Return a rule that updates matrices by `rule` and all other parameters by Adam, with weight decay.

    Matrices and other parameters have the same learning rate.

    Args:
        rule: rule for matrices.
        adam: rule for all other parameters.
        rate: learning rate, or a schedule.
        weight_decay: factor of the decoupled weight decay.
        param_info_tree: tree of `ParamInfo` like the parameters; `None` derives the tree from shapes and paths.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.
    """
    return optax.chain(
        by_kind(
            {"matrix": rule, "rest": adam},
            lambda param_info: "matrix" if param_info.kind == "matrix" else "rest",
            param_info_tree,
        ),
        optax.add_decayed_weights(weight_decay, mask=mask),
        optax.scale_by_learning_rate(rate),
    )


@dataclasses.dataclass(frozen=True)
class _StateForm:
    """The positions of parameter-like trees (trees with the structure of the parameters) in a rule's state.

    Args:
        treedef: structure of the state, in which each tree like the parameters is one leaf.
        param_tree_flags: for each leaf of `treedef`, whether it is a tree like the parameters.
    """

    treedef: Any
    param_tree_flags: tuple[bool, ...]

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        """Return (parameter-like trees of a state, all other leaves of the state, which the parameters share)."""
        nodes_and_flags = list(zip(self.treedef.flatten_up_to(state), self.param_tree_flags, strict=True))
        return [node for node, is_tree in nodes_and_flags if is_tree], [
            node for node, is_tree in nodes_and_flags if not is_tree
        ]

    def join(self, param_trees: list[Any], shared_leaves: list[Any]) -> Any:
        """Return the state that consists of these trees and these shared leaves: the inverse of `split`."""
        param_tree_iter, shared_iter = iter(param_trees), iter(shared_leaves)
        return self.treedef.unflatten(
            [next(param_tree_iter if is_tree else shared_iter) for is_tree in self.param_tree_flags]
        )


def _state_form(rule: UpdateRule) -> _StateForm:
    """Return the `_StateForm` of a rule, found by initializing the rule with a placeholder for the parameters."""
    state_leaves, treedef = jax.tree.flatten(rule.init(_PLACEHOLDER), is_leaf=lambda x: isinstance(x, _Placeholder))
    return _StateForm(treedef, tuple(isinstance(leaf, _Placeholder) for leaf in state_leaves))


def _constrain(arrays: Any, param_info: ParamInfo, *, is_whole: bool) -> Any:
    """Constrain the sharding of a leaf's arrays, and return them.

    If `is_whole`, each device gets whole tensors. Otherwise, arrays with the leaf's shape get the leaf's sharding, and
    all other arrays are returned without a constraint.
    """
    if param_info.sharding is None:
        return arrays
    spec = (
        param_info.sharding.spec[: param_info.stack] if is_whole else param_info.sharding.spec
    )  # layers keep their sharding
    region_mesh = jax.sharding.get_abstract_mesh()  # the mesh of one replica, inside a manual region
    sharding = NamedSharding(param_info.sharding.mesh if region_mesh.empty else region_mesh, PartitionSpec(*spec))

    def constrain(x: Any) -> Any:
        """Constrain an array to `sharding` if this sharding applies to the array's shape."""
        return jax.lax.with_sharding_constraint(x, sharding) if is_whole or x.shape == param_info.shape else x

    return jax.tree.map(constrain, arrays)


def _to_tensors(x: Any, param_info: ParamInfo, as_matrices: bool) -> Any:
    """Return an array of a leaf with its tensors stacked along the first dim; an unstacked leaf is one tensor."""
    is_matrix = as_matrices and param_info.kind == "matrix" and x.shape == param_info.shape
    if param_info.stack == 0 and not is_matrix:
        return x
    tensor_shape = (param_info.rows, param_info.columns) if is_matrix else x.shape[param_info.stack :]
    return x.reshape((param_info.tensors, *tensor_shape) if param_info.stack else tensor_shape)


def _to_leaf(x: Any, param_info: ParamInfo, as_matrices: bool) -> Any:
    """Return an array of stacked tensors, reshaped to the leaf's shape: the inverse of `_to_tensors`."""
    tensor_shape = x.shape[1:] if param_info.stack else x.shape
    if as_matrices and param_info.kind == "matrix" and tensor_shape == (param_info.rows, param_info.columns):
        tensor_shape = param_info.shape[param_info.stack :]
    return x.reshape((*param_info.shape[: param_info.stack], *tensor_shape))
