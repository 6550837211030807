"""A rule's state after a step, on arrays reshaped to blocks, so that XLA for TPU keeps none of them in float32.

Scales of blocks are maxima over part of the second-minor dim. XLA for TPU fuses the operands of a maximum over a whole
dim, but not through the reshape before a maximum over part of one: it writes 8 bytes for each number of each leaf whose
shards have several blocks. A rule that treats each number by itself can take (.., rows, cols) as (.., blocks, block,
cols) from the start, which avoids that reshape.
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
"""No scale is smaller, but the compiler cannot infer that."""


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """Reshapes an update's trees so that each block is a dim, for the parameters with quantized state.

    Args:
        blocked_shapes: by the parameter's path, its shape with the second-minor dim cut into blocks.
        whole_shapes: by the parameter's path, its shape.
    """

    blocked_shapes: dict[TreePath, tuple[int, ...]]
    whole_shapes: dict[TreePath, tuple[int, ...]]

    def cut(self, tree: Any) -> Any:
        """A tree of gradients, parameters or state in blocks."""

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
        """Gradients or parameters by an expression that XLA does not recognise as a reshape.

        It would move a reshape below its consumers, and keep their results.

        Args:
            tree: in blocks.
            state: in blocks.
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
    """The views that run a rule in blocks; `None` if the rule needs the arrays' original shapes.

    It does if it mixes numbers of an array, or if its operations depend on shapes: a mask by `ndim`, a rate by fan-in,
    a constant array.

    Args:
        rule: of float32 state.
        gradients: a tree like the parameters, of arrays or shapes.
        state: the rule's, with quantized leaves.

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
    """The path of the parameter of a state's leaf: the longest suffix of its path that is a parameter's.

    Args:
        path: of a leaf of a state.
        owners: paths of parameters.
    """
    return next((path[i:] for i in range(len(path) + 1) if path[i:] in owners), None)


def _operations(rule: optax.GradientTransformation, shapes: Any) -> list[Any]:
    """A rule's operations in order, with their constants."""

    def number(value: Any) -> Any:
        return id(value) if isinstance(value, Tracer) else np.asarray(value).item()

    program = jax.make_jaxpr(rule.update)(shapes, jax.eval_shape(rule.init, shapes), shapes)
    operations: list[Any] = []
    for eqn, _ in equations(program):
        settings = [x for x in eqn.params.values() if isinstance(x, int | float | str)]
        operations.append((eqn.primitive.name, settings, [number(v.val) for v in eqn.invars if hasattr(v, "val")]))
    return [*operations, *map(number, program.consts)]
