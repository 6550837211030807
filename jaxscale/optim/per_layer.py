"""per_layer: an optax rule applied to each layer of stacked parameters, and each kernel as a matrix.

`optax.lamb` takes one norm over all layers of a stacked array, `optax.contrib.muon` hands it to Adam, and
`optax.contrib.galore` leaves it whole. Wrapped, a rule sees what it would see if every layer were an array of its own;
its state stays one array for all layers, of the parameter's shape where it had it, so that sharding, quantization and
checkpoints treat it as they treat Adam's. `by_kind` gives matrices to one rule and the rest to another.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.optim.leaves import Leaf, facts_of
from jaxscale.typing import Array

Rule = optax.GradientTransformation


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Here:
    """Stands for the tree of parameters in the state of a rule."""


_HERE: Any = _Here()


def per_layer(rule: Rule, leaves: Any = None, *, matrices: bool = False, whole: bool = False) -> Rule:
    """`rule` applied to each tensor of stacked parameters by itself.

    Args:
        rule: an optax transformation that treats each parameter by itself. What its state holds beside trees like the
            parameters, such as a count, may not depend on gradients.
        leaves: tree of `Leaf` like the parameters; `None` judges by shapes, and finds nothing stacked.
        matrices: hand tensors of kind "matrix" to the rule as matrices (everything else, last dim).
        whole: gather each tensor first, for a rule that decomposes it; XLA would spread the products over axes that
            replicate it, slow ones too.

    Returns:
        A transformation whose state is the rule's own, with the stacked dims in front.

    Example:
        >>> from jaxscale.optim.leaves import leaf_of
        >>> params = {"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])}
        >>> leaves = {"w": leaf_of("w", ("layers", "norm"), (2, 2))}
        >>> rule = per_layer(optax.scale_by_trust_ratio(), leaves)
        >>> rule.update({"w": jnp.eye(2)}, rule.init(params), params)[0]["w"].tolist()  # norms 5 and 1
        [[5.0, 0.0], [0.0, 1.0]]
    """

    def init(params: Any) -> Any:
        if not jax.tree.leaves(params):  # a placeholder, of `optax.tree.map_params`
            return rule.init(params)
        form, facts = _form(rule), facts_of(leaves, params)
        columns: list[list[Any]] = []
        for param, leaf in zip(jax.tree.leaves(params), facts, strict=True):
            one = _as_tensors(param, leaf, matrices)
            stacked = leaf.stack > 0
            found = jax.vmap(lambda p: form.own(rule.init(p)))(one) if stacked else form.own(rule.init(one))
            columns.append([jax.tree.map(lambda s, leaf=leaf: _as_leaf(s, leaf, matrices), own) for own in found])
        shared, treedef = form.shared(rule.init(_HERE)), jax.tree.structure(params)
        return form.joined([treedef.unflatten(row) for row in zip(*columns, strict=True)], shared)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        form, treedef = _form(rule), jax.tree.structure(updates)
        facts = facts_of(leaves, updates)
        shared = form.shared(state)
        owned = [treedef.flatten_up_to(tree) for tree in form.own(state)]
        given = [None] * len(facts) if params is None else treedef.flatten_up_to(params)
        after: list[Any] = []
        columns: list[list[Any]] = []
        last: list[Any] = shared
        for number, (leaf, update, param) in enumerate(zip(facts, jax.tree.leaves(updates), given, strict=True)):

            def one(update: Array, own: list[Any], param: Any) -> tuple[Any, list[Any], list[Any]]:
                new, state = rule.update(update, form.joined(own, shared), param)
                return new, form.own(state), form.shared(state)

            arrays = update, [own[number] for own in owned], param
            if whole:
                arrays = _whole(arrays, leaf)
            tensors = jax.tree.map(lambda x, leaf=leaf: _as_tensors(x, leaf, matrices), arrays)
            mapped = jax.vmap(one, out_axes=(0, 0, None)) if leaf.stack else one
            new, own, last = mapped(*tensors)
            results = (
                new.reshape(update.shape),
                [jax.tree.map(lambda s, leaf=leaf: _as_leaf(s, leaf, matrices), part) for part in own],
            )
            if whole:
                results = _split(_whole(results, leaf), leaf)
            after.append(results[0])
            columns.append(results[1])
        trees = [treedef.unflatten(row) for row in zip(*columns, strict=True)]
        return treedef.unflatten(after), form.joined(trees, last)

    return optax.GradientTransformation(init, update)


class ByKindState(NamedTuple):
    """The states of `by_kind`: of each rule, with an array of one number for a parameter that is another's."""

    states: dict[str, Any]


def by_kind(rules: Mapping[str, Rule], kind: Callable[[Leaf], str], leaves: Any = None) -> Rule:
    """Each parameter updated by the rule of its kind.

    `optax.partition` keeps no array at all for a parameter that is another rule's, so its states are no trees like the
    parameters; these are.

    Args:
        rules: by name. Each may treat parameters only one by one.
        kind: name of the rule of a leaf.
        leaves: tree of `Leaf` like the parameters; `None` judges by shapes and paths.

    Example:
        >>> rule = by_kind({"m": optax.sgd(1.0), "v": optax.sgd(0.1)}, lambda leaf: leaf.kind[0])
        >>> grads = {"w": jnp.ones((1, 2)), "b": jnp.ones(1)}
        >>> jax.tree.map(lambda x: x.tolist(), rule.update(grads, rule.init(grads))[0])
        {'b': [-0.10000000149011612], 'w': [[-1.0, -1.0]]}
    """

    def own(tree: Any, name: str) -> Any:
        parts, treedef = jax.tree.flatten(tree)
        chosen = [kind(leaf) == name for leaf in facts_of(leaves, tree)]
        return treedef.unflatten(
            [part if here else jnp.zeros((1,), part.dtype) for part, here in zip(parts, chosen, strict=True)]
        )

    def init(params: Any) -> ByKindState:
        if not jax.tree.leaves(params):
            return ByKindState({name: rule.init(params) for name, rule in rules.items()})
        return ByKindState({name: rule.init(own(params, name)) for name, rule in rules.items()})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        treedef, facts = jax.tree.structure(updates), facts_of(leaves, updates)
        found, states = {}, {}
        for name, rule in rules.items():
            given = None if params is None else own(params, name)
            new, states[name] = rule.update(own(updates, name), state.states[name], given)
            found[name] = treedef.flatten_up_to(new)
        after = [found[kind(leaf)][number] for number, leaf in enumerate(facts)]
        return treedef.unflatten(after), ByKindState(states)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class _Form:
    """Where trees like the parameters lie in the state of a rule.

    Args:
        treedef: of the state, such trees being leaves.
        of_params: of each of its leaves, whether it is one.
    """

    treedef: Any
    of_params: tuple[bool, ...]

    def own(self, state: Any) -> list[Any]:
        """The trees like the parameters."""
        return [part for part, own in zip(self.treedef.flatten_up_to(state), self.of_params, strict=True) if own]

    def shared(self, state: Any) -> list[Any]:
        """What all parameters share."""
        return [part for part, own in zip(self.treedef.flatten_up_to(state), self.of_params, strict=True) if not own]

    def joined(self, own: list[Any], shared: list[Any]) -> Any:
        """The inverse of both."""
        owned, common = iter(own), iter(shared)
        return self.treedef.unflatten([next(owned if is_own else common) for is_own in self.of_params])


def _form(rule: Rule) -> _Form:
    found, treedef = jax.tree.flatten(rule.init(_HERE), is_leaf=lambda x: isinstance(x, _Here))
    return _Form(treedef, tuple(isinstance(part, _Here) for part in found))


def _whole(arrays: Any, leaf: Leaf) -> Any:
    """Arrays of a leaf's tensors, each of which is whole on a device; layers lie where they are."""
    if leaf.sharding is None:
        return arrays
    place = _place(leaf, PartitionSpec(*leaf.sharding.spec[: leaf.stack]))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), arrays)


def _split(arrays: Any, leaf: Leaf) -> Any:
    """Those of the leaf's shape where it lies."""
    if leaf.sharding is None:
        return arrays
    place = _place(leaf, leaf.sharding.spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place) if x.shape == leaf.shape else x, arrays)


def _place(leaf: Leaf, spec: PartitionSpec) -> NamedSharding:
    """On the leaf's devices, of which a region of one replica has a part."""
    mesh = jax.sharding.get_abstract_mesh()
    return NamedSharding(leaf.sharding.mesh if mesh.empty else mesh, spec)


def _is_matrix(leaf: Leaf, matrices: bool) -> bool:
    return matrices and leaf.kind == "matrix"


def _as_tensors(x: Any, leaf: Leaf, matrices: bool) -> Any:
    """An array of a leaf, its tensors along one dim, or without any where it is one."""
    if leaf.stack == 0 and not (_is_matrix(leaf, matrices) and x.shape == leaf.shape):
        return x
    inner = x.shape[leaf.stack :]
    if _is_matrix(leaf, matrices) and x.shape == leaf.shape:
        inner = (leaf.rows, leaf.columns)
    return x.reshape((leaf.tensors, *inner) if leaf.stack else inner)


def _as_leaf(x: Any, leaf: Leaf, matrices: bool) -> Any:
    """The inverse of `_as_tensors`."""
    inner = x.shape[1:] if leaf.stack else x.shape
    if _is_matrix(leaf, matrices) and inner == (leaf.rows, leaf.columns):
        inner = leaf.shape[leaf.stack :]
    return x.reshape((*leaf.shape[: leaf.stack], *inner))
