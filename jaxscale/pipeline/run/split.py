"""A function in two halves: the first half computes some of the results, and the second half computes the rest.

Zero-bubble schedules run the backward of a stage as two actions: I, the gradient of its input, which the previous stage
waits for, and W, the gradients of its weights, which no stage waits for. This module divides the equations of the
backward. Equations that the gradient of the input needs run in the first half, and all others run in the second. Some
values of the first half cross to the second, mainly the gradient of each matrix product's output. So no matrix product
runs twice, and the results are the same. A scan is divided like its body, and its crossing values are stacked over the
iterations, so a stage may scan its layers. A `cond` is divided like its branches. A checkpointed block is divided like
its program, with the recomputation in the first half.

Cheap equations (moves, comparisons, elementwise steps) also run in the second half if this does not increase the bytes
that cross or are read.

Left out: other calls that contain programs (`while`, `shard_map`, kernels). Such a call is not divided; it runs in the
first half if that half needs one of its results. Effects (`jax.debug.print`) on which no result depends are dropped.

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
    """The two halves of a function of arrays, as `divide` returns them.

    Args:
        crossing_shapes: shape and type of each value that crosses from the first half to the second.
        is_read_by_first: for each leaf of the arguments, whether the first half reads it.
        is_read_by_second: for each leaf of the arguments, whether the second half reads it.
        halves: the programs of the halves.
        arguments_structure: tree structure of the arguments.
        first_structure: tree structure of the results of the first half.
        second_structure: tree structure of the results of the second half.
    """

    crossing_shapes: tuple[jax.ShapeDtypeStruct, ...]
    is_read_by_first: tuple[bool, ...]
    is_read_by_second: tuple[bool, ...]
    halves: Halves = dataclasses.field(repr=False)
    arguments_structure: Any = dataclasses.field(repr=False)
    first_structure: Any = dataclasses.field(repr=False)
    second_structure: Any = dataclasses.field(repr=False)

    @property
    def crossing_bytes(self) -> int:
        """Bytes of the crossing values."""
        return tree_bytes(self.crossing_shapes)

    def run_first(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run the first half on the function's arguments, and return its results and the crossing values.

        Leaves that the first half does not read may have any value.
        """
        outputs, crossing_values = self.halves.run_first(self._leaves(args))
        return jax.tree.unflatten(self.first_structure, outputs[: self.first_structure.num_leaves]), tuple(
            crossing_values
        )

    def run_second(self, crossing_values: Sequence[Any], *args: Any) -> Any:
        """Run the second half on the crossing values and the function's arguments, and return its results."""
        outputs = self.halves.run_second(self._leaves(args), crossing_values)
        return jax.tree.unflatten(self.second_structure, outputs[self.first_structure.num_leaves :])

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of the arguments. Their tree structure must be that of the arguments of `divide`."""
        leaves, structure = jax.tree.flatten(args)
        assert structure == self.arguments_structure, "the arguments are not those that the function was divided for"
        return leaves


def divide(function: Callable[..., tuple[Any, Any]], *args: Any, is_kept: Any = True) -> Division:
    """Divide `function(*args) -> (first, second)` into two halves that compute `first` and `second`.

    Args:
        function: function of arrays that JAX can trace. For the backward of a stage, `first` is the gradient of its
            input and `second` are the gradients of its weights.
        args: trees of arrays, tracers or `jax.ShapeDtypeStruct`s, with the shapes of the halves' later arguments.
        is_kept: whether the second half can read an argument: one boolean for all arguments, or a tuple with a boolean
            or a tree of booleans for each argument. An argument that the second half needs but cannot read crosses.

    Example:
        >>> import jax.numpy as jnp
        >>> def backward(weight, x, g):
        ...     return g @ weight.T, x.T @ g
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 4), (2, 8), (2, 4)]]
        >>> division = divide(backward, *shapes, is_kept=(True, True, False))
        >>> division.crossing_bytes  # g crosses: 2 x 4 float32
        32
        >>> division.is_read_by_first, division.is_read_by_second
        ((True, False, True), (False, True, False))
    """
    arguments_structure = jax.tree.structure(args)
    closed_jaxpr, abstract_results = jax.make_jaxpr(function, return_shape=True)(*args)
    first_structure, second_structure = (jax.tree.structure(half_results) for half_results in abstract_results)
    first_flags = [True] * first_structure.num_leaves + [False] * second_structure.num_leaves
    hidden_flags = [not flag for flag in jax.tree.leaves(jax.tree.broadcast(is_kept, args))]
    halves = program_halves(closed_jaxpr, first_flags, [not flag for flag in first_flags], hidden_flags)
    return Division(
        crossing_shapes=tuple(jax.ShapeDtypeStruct(crossing.shape, crossing.dtype) for crossing in halves.crossings),
        is_read_by_first=halves.is_read_by_first,
        is_read_by_second=halves.is_read_by_second,
        halves=halves,
        arguments_structure=arguments_structure,
        first_structure=first_structure,
        second_structure=second_structure,
    )
