"""A function in two halves: the first computes its first results, the second the others.

Zero-bubble schedules run the backward of a stage as two actions: I, the gradient of its input, which the previous
stage waits for, and W, the gradients of its weights, which no stage waits for. This module divides the equations of the
backward: those that the first results need run in the first half, the others in the second. The first half hands over
values that the second needs, mainly the gradient of each product's output. So no product runs twice, and the results
are the same. A scan is divided like its body, with crossing values stacked over the iterations, so a stage may
scan its layers; a `cond` is divided like its branches; a checkpointed block like its program, with the recomputation in
the first half.

Equations that only move or compare numbers run again in the second half if that hands over no more bytes.

Left out: other calls that hold programs (`while`, `shard_map`, kernels). Each runs whole, in the first half if one of
its results is needed there. Effects (`jax.debug.print`) on which no result depends are dropped.

References:
    Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", 2023 (https://arxiv.org/abs/2401.10241).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxscale.pipeline.run.halves import Halves, program_halves
from jaxscale.trees import tree_bytes


@dataclasses.dataclass(frozen=True)
class Division:
    """Both halves of a function of arrays; made by `divide`.

    Args:
        cut: shape and type of each array that crosses.
        reads_first: for each leaf of the arguments, whether the first half reads it; other leaves may be anything.
        reads_second: for each leaf of the arguments, whether the second half reads it.
        halves: the programs of the halves.
        trees: structures of the arguments, the first results and the second results.
    """

    cut: tuple[jax.ShapeDtypeStruct, ...]
    reads_first: tuple[bool, ...]
    reads_second: tuple[bool, ...]
    halves: Halves = dataclasses.field(repr=False)
    trees: tuple[Any, Any, Any] = dataclasses.field(repr=False)

    @property
    def cut_bytes(self) -> int:
        """Bytes of the crossing values."""
        return tree_bytes(self.cut)

    def first(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run the first half, and return the first results and the crossing values."""
        outputs, cut = self.halves.first(self._leaves(args))
        return jax.tree.unflatten(self.trees[1], outputs[: self.trees[1].num_leaves]), tuple(cut)

    def second(self, cut: Sequence[Any], *args: Any) -> Any:
        """Run the second half from the crossing values and the arguments, and return the second results."""
        outputs = self.halves.second(self._leaves(args), cut)
        return jax.tree.unflatten(self.trees[2], outputs[self.trees[1].num_leaves :])

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of arguments like those that the function was divided for."""
        leaves, tree = jax.tree.flatten(args)
        assert tree == self.trees[0], "the arguments are not those that the function was divided for"
        return leaves


def divide(function: Callable[..., tuple[Any, Any]], *args: Any, kept: Any = True) -> Division:
    """Divide `function(*args) -> (first, second)` into halves: one half makes `first`, the other `second`.

    Args:
        function: function of arrays that JAX can trace. For the backward of a stage, `first` is the gradient of its
            input and `second` that of its weights.
        args: trees of arrays, tracers or `jax.ShapeDtypeStruct`s, as in the program that will call the halves.
        kept: whether the second half may read an argument: one boolean for all, or a tuple like `args` of
            booleans or trees of booleans. Arguments that it may not read cross if it needs them.

    Example:
        >>> import jax.numpy as jnp
        >>> def backward(weight, x, g):
        ...     return g @ weight.T, x.T @ g
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 4), (2, 8), (2, 4)]]
        >>> halves = divide(backward, *shapes, kept=(True, True, False))
        >>> halves.cut_bytes  # g is handed over: 2 x 4 float32
        32
        >>> halves.reads_first, halves.reads_second
        ((True, False, True), (False, True, False))
    """
    arguments_tree = jax.tree.structure(args)
    closed_jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    first_tree, second_tree = (jax.tree.structure(result_shapes) for result_shapes in shapes)
    is_first = [True] * first_tree.num_leaves + [False] * second_tree.num_leaves
    is_hidden = [not flag for flag in jax.tree.leaves(jax.tree.broadcast(kept, args))]
    halves = program_halves(closed_jaxpr, is_first, [not flag for flag in is_first], is_hidden)
    cut = tuple(jax.ShapeDtypeStruct(crossing.shape, crossing.dtype) for crossing in halves.cut)
    return Division(cut, halves.reads_first, halves.reads_second, halves, (arguments_tree, first_tree, second_tree))
