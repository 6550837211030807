"""Compute an optax rule's new state on arrays reshaped to blocks, so that XLA for TPU stores no float32 state.

The scale of a block is a maximum over part of the second-minor dim. XLA for TPU fuses the operands of a maximum over a
whole dim. XLA does not fuse through the reshape before a maximum over part of a dim, but writes 8 bytes per element of
each leaf whose shards have several blocks. A rule that treats each element separately can run on arrays of shape (..,
blocks, block, cols) instead of (.., rows, cols) from the start. This avoids the reshape.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxscale.lowbit.quantize import is_quantized
from jaxscale.programs.elementwise import first_mixing_primitive
from jaxscale.programs.walk import equations_with_runs
from jaxscale.trees import shapes_of

TreePath = tuple[Any, ...]
BELOW_ALL_SCALES = -4.0
"""A number below every scale. The compiler cannot infer that no scale is below this number."""


@dataclasses.dataclass(frozen=True)
class BlockReshaper:
    """Reshapes gradients, parameters and state to blocks, for the parameters with quantized state.

    Args:
        blocked_shape_by_path: shape (.., blocks, block, cols) of each parameter with quantized state.
        whole_shape_by_path: shape (.., rows, cols) of every parameter.
    """

    blocked_shape_by_path: dict[TreePath, tuple[int, ...]]
    whole_shape_by_path: dict[TreePath, tuple[int, ...]]

    def to_blocks(self, tree: Any) -> Any:
        """Return a tree of gradients, parameters or state, reshaped to blocks."""

        def leaf_to_blocks(path: TreePath, leaf: Any) -> Any:
            """Return a leaf reshaped to blocks if its parameter has quantized state; return other leaves unchanged."""
            owner_path = owner_path_of(path, self.whole_shape_by_path)
            if owner_path not in self.blocked_shape_by_path or leaf.shape != self.whole_shape_by_path[owner_path]:
                return leaf
            if is_quantized(leaf):
                return dataclasses.replace(
                    leaf,
                    codes=leaf.codes.reshape(self.blocked_shape_by_path[owner_path]),
                    scale=leaf.scale[..., None, :],
                )
            return leaf.reshape(self.blocked_shape_by_path[owner_path])

        return jax.tree_util.tree_map_with_path(leaf_to_blocks, tree, is_leaf=is_quantized)

    def disguise(self, tree: Any, state: Any) -> Any:
        """Return gradients or parameters unchanged, as an expression that XLA does not recognize as a reshape.

        XLA would move a reshape after the operations that use the reshaped array, and store the operations' results.

        Args:
            tree: gradients or parameters, reshaped to blocks.
            state: the rule's state, reshaped to blocks.
        """
        scale_by_path = {
            owner_path_of(path, self.whole_shape_by_path): q.scale
            for path, q in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
            if is_quantized(q)
        }

        def disguise_leaf(path: TreePath, leaf: Any) -> Any:
            if path not in scale_by_path:
                return leaf
            return jnp.where(scale_by_path[path] < BELOW_ALL_SCALES, jnp.zeros((), leaf.dtype), leaf)

        return jax.tree_util.tree_map_with_path(disguise_leaf, tree)


def find_reshaper(rule: optax.GradientTransformation, gradients: Any, state: Any) -> BlockReshaper | None:
    """Return the reshaper to blocks for a rule; `None` if the rule needs the arrays' original shapes.

    A rule needs the original shapes if it mixes the elements of an array, or if its operations depend on shapes.
    Operations depend on shapes if, for example, a mask depends on `ndim`, or a rate on the fan-in.

    Args:
        rule: an optax transformation of float32 state.
        gradients: tree like the parameters, of arrays or shapes.
        state: the rule's state, with quantized leaves.

    Example:
        >>> from jaxscale.lowbit.quantize import zeros
        >>> params = {"w": jax.ShapeDtypeStruct((512, 8), "float32")}
        >>> state = jax.eval_shape(optax.trace(0.9).init, params)._replace(trace={"w": zeros((512, 8), "soft8", 256)})
        >>> reshaper = find_reshaper(optax.trace(0.9), params, state)
        >>> jax.eval_shape(reshaper.to_blocks, params)["w"].shape
        (2, 256, 8)
    """
    whole_shape_by_path = {path: leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]}
    blocked_shape_by_path = {}
    for path, q in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]:
        if is_quantized(q):
            owner_path = owner_path_of(path, whole_shape_by_path)
            blocked_shape = (*q.shape[:-2], q.shape[-2] // q.block, q.block, q.shape[-1])
            if owner_path is None or blocked_shape_by_path.setdefault(owner_path, blocked_shape) != blocked_shape:
                return None
    reshaper = BlockReshaper(blocked_shape_by_path, whole_shape_by_path)
    abstract_gradients = shapes_of(gradients)
    abstract_blocked_gradients = jax.eval_shape(reshaper.to_blocks, abstract_gradients)
    if first_mixing_primitive(rule, abstract_gradients) is not None or _operation_signatures(
        rule, abstract_gradients
    ) != _operation_signatures(rule, abstract_blocked_gradients):
        return None
    return reshaper


def owner_path_of(path: TreePath, param_paths: Any) -> TreePath | None:
    """Return the path of the parameter that a leaf of a state belongs to; `None` if the leaf belongs to no parameter.

    The parameter's path is the longest suffix of the leaf's path that is a path of a parameter.

    Args:
        path: path of a leaf in the state.
        param_paths: paths of the parameters, or a mapping with these keys.
    """
    return next((path[i:] for i in range(len(path) + 1) if path[i:] in param_paths), None)


def _operation_signatures(rule: optax.GradientTransformation, abstract_gradients: Any) -> list[Any]:
    """Return the operations of a rule's update, in order, and then the program's constants.

    An operation is (name, settings, constant operands); shapes are not included.
    """

    def comparison_key(constant: Any) -> Any:
        """Return what represents a constant in comparisons: its value, or its identity if it is traced."""
        return id(constant) if isinstance(constant, Tracer) else np.asarray(constant).item()

    program = jax.make_jaxpr(rule.update)(
        abstract_gradients, jax.eval_shape(rule.init, abstract_gradients), abstract_gradients
    )
    signatures: list[Any] = []
    for equation, _ in equations_with_runs(program):
        settings = [setting for setting in equation.params.values() if isinstance(setting, int | float | str)]
        signatures.append(
            (
                equation.primitive.name,
                settings,
                [comparison_key(operand.val) for operand in equation.invars if hasattr(operand, "val")],
            )
        )
    return [*signatures, *map(comparison_key, program.consts)]
