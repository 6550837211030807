"""Compute a rule's new state on arrays reshaped to blocks, so that XLA for TPU keeps none of them in float32.

The scale of a block is a maximum over part of the second-minor dim. XLA for TPU fuses the operands of a maximum over a
whole dim. It does not fuse through the reshape before a maximum over part of a dim, but writes 8 bytes for each number
of each leaf whose shards have several blocks. A rule that treats each number by itself can run on arrays of shape (..,
blocks, block, cols) instead of (.., rows, cols) from the start, which avoids that reshape.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxscale.lowbit.quantize import is_quantized
from jaxscale.programs.elementwise import first_mixing
from jaxscale.programs.walk import equations
from jaxscale.trees import shapes_of

TreePath = tuple[Any, ...]
IMPOSSIBLE = -4.0
"""A bound below every scale, which the compiler cannot infer."""


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """Reshapes the trees of an update to blocks, for the parameters with quantized state.

    Args:
        blocked_shapes: by the path of each parameter with quantized state, its shape with the second-minor dim cut
            into blocks.
        whole_shapes: shape of every parameter, by its path.
    """

    blocked_shapes: dict[TreePath, tuple[int, ...]]
    whole_shapes: dict[TreePath, tuple[int, ...]]

    def cut(self, tree: Any) -> Any:
        """Reshape a tree of gradients, parameters or state to blocks."""

        def cut_leaf(path: TreePath, x: Any) -> Any:
            owner = owner_of(path, self.whole_shapes)
            if owner not in self.blocked_shapes or x.shape != self.whole_shapes[owner]:
                return x
            if is_quantized(x):
                return dataclasses.replace(
                    x, codes=x.codes.reshape(self.blocked_shapes[owner]), scale=x.scale[..., None, :]
                )
            return x.reshape(self.blocked_shapes[owner])

        return jax.tree_util.tree_map_with_path(cut_leaf, tree, is_leaf=is_quantized)

    def disguised(self, tree: Any, state: Any) -> Any:
        """The unchanged gradients or parameters, as an expression that XLA does not recognise as a reshape.

        XLA would move a reshape below the operations that consume it, and keep their results.

        Args:
            tree: gradients or parameters, reshaped to blocks.
            state: the rule's state, reshaped to blocks.
        """
        scales = {
            owner_of(path, self.whole_shapes): q.scale
            for path, q in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
            if is_quantized(q)
        }

        def disguise(path: TreePath, x: Any) -> Any:
            return x if path not in scales else jnp.where(scales[path] < IMPOSSIBLE, jnp.zeros((), x.dtype), x)

        return jax.tree_util.tree_map_with_path(disguise, tree)


def views_of(rule: optax.GradientTransformation, gradients: Any, state: Any) -> InBlocks | None:
    """The reshapes to blocks under which a rule can run; `None` if the rule needs the arrays' original shapes.

    A rule needs them if it mixes numbers of an array, or if its operations depend on shapes, as do a mask by `ndim`, a
    rate by fan-in or a constant array.

    Args:
        rule: an optax transformation of float32 state.
        gradients: tree like the parameters, of arrays or shapes.
        state: the rule's state, with quantized leaves.

    Example:
        >>> from jaxscale.lowbit.quantize import zeros
        >>> params = {"w": jax.ShapeDtypeStruct((512, 8), "float32")}
        >>> state = jax.eval_shape(optax.trace(0.9).init, params)._replace(trace={"w": zeros((512, 8), "soft8", 256)})
        >>> views = views_of(optax.trace(0.9), params, state)
        >>> jax.eval_shape(views.cut, params)["w"].shape
        (2, 256, 8)
    """
    whole_shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]}
    blocked_shapes = {}
    for path, q in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]:
        if is_quantized(q):
            owner, shape = owner_of(path, whole_shapes), (*q.shape[:-2], q.shape[-2] // q.block, q.block, q.shape[-1])
            if owner is None or blocked_shapes.setdefault(owner, shape) != shape:
                return None
    views = InBlocks(blocked_shapes, whole_shapes)
    shapes = shapes_of(gradients)
    cut_shapes = jax.eval_shape(views.cut, shapes)
    if first_mixing(rule, shapes) is not None or _operations(rule, shapes) != _operations(rule, cut_shapes):
        return None
    return views


def owner_of(path: TreePath, owners: Any) -> TreePath | None:
    """The path of the parameter that a leaf of a state belongs to; `None` if there is none.

    It is the longest suffix of the leaf's path that is the path of a parameter.

    Args:
        path: path of a leaf in the state.
        owners: paths of the parameters.
    """
    return next((path[i:] for i in range(len(path) + 1) if path[i:] in owners), None)


def _operations(rule: optax.GradientTransformation, shapes: Any) -> list[Any]:
    """The operations of a rule's update, in order, with their settings and constants."""

    def value_of(constant: Any) -> Any:
        return id(constant) if isinstance(constant, Tracer) else np.asarray(constant).item()

    program = jax.make_jaxpr(rule.update)(shapes, jax.eval_shape(rule.init, shapes), shapes)
    operations: list[Any] = []
    for eqn, _ in equations(program):
        settings = [x for x in eqn.params.values() if isinstance(x, int | float | str)]
        operations.append((eqn.primitive.name, settings, [value_of(v.val) for v in eqn.invars if hasattr(v, "val")]))
    return [*operations, *map(value_of, program.consts)]
