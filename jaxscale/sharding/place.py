"""constrain: place an activation by the logical axes of its dims.

The train step opens a `layout`. Inside the layout, `constrain(x, "batch", "seq", "embed")` is a sharding constraint.
Outside any layout, `constrain` is the identity, so the same model file runs on one device, in a notebook and on a pod.
"""

import contextlib
import contextvars
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.scoped import scoped
from jaxscale.sharding.partition import shard_count, spec_of
from jaxscale.sharding.rules import AxisRules
from jaxscale.typing import Array

MeshAndRules: TypeAlias = tuple[Any, AxisRules]
"""A hashable tuple: a mesh, which may be abstract, and the rules that place arrays on it."""

_layout: contextvars.ContextVar[MeshAndRules | None] = contextvars.ContextVar("layout", default=None)
"""The mesh and rules of the open layout; `None` outside any layout."""


def layout(mesh: Any, rules: AxisRules) -> contextlib.AbstractContextManager[None]:
    """Return a context manager. Inside it, `constrain` places traced arrays on `mesh` by `rules`.

    Args:
        mesh: a `jax.sharding.Mesh`. To trace for devices that are not attached, an `AbstractMesh` with axes in Auto
            mode.
        rules: mesh axes of each logical axis.
    """
    return reopened_layout((mesh, rules))


def reopened_layout(mesh_and_rules: MeshAndRules | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager like that of `layout`, for a mesh and rules that `current` returned earlier.

    JAX may trace the backward function of a `custom_vjp` later than the forward call, when another layout is open. For
    example, this is the step's layout instead of the one in the manual region of a pipeline stage. So a backward
    function that places arrays takes the layout of the forward call as a static argument, and opens that layout with
    this function.
    """
    return scoped(_layout, mesh_and_rules)


def current() -> MeshAndRules | None:
    """Return the mesh and rules of the open layout, or `None` outside any layout. Kernels need them for `shard_map`."""
    return _layout.get()


def spec(shape: Sequence[int], names: Sequence[str | None], mesh: Any, rules: AxisRules) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dims have the logical axes `names`.

    Each mesh axis splits at most one dim: the first dim whose rule names the axis and that can be split evenly. A dim
    that its mesh axes cannot split evenly stays whole. (The sizes that a plan relies on are checked before tracing.)
    """
    if len(names) != len(shape):
        raise ValueError(
            f"got {len(names)} logical axes {tuple(names)} for an array of shape {tuple(shape)}: name each dim once"
        )
    used_axes: set[str] = set()
    axes_by_dim: list[tuple[str, ...]] = []
    for dim_size, name in zip(shape, names, strict=True):
        axes = tuple(axis for axis in rules.axes(name) if mesh.shape[axis] > 1 and axis not in used_axes)
        axes_by_dim.append(axes if dim_size % shard_count(mesh, axes) == 0 else ())
        used_axes.update(axes_by_dim[-1])
    return spec_of(axes_by_dim)


def constrain(x: Array, *names: str | None) -> Array:
    """Return `x`, constrained to the placement that the open layout gives its logical axes.

    Args:
        x: an activation.
        names: the logical axis of each dim, from `AxisRules`; `None` for a dim that is whole.

    Example:
        >>> import jax.numpy as jnp
        >>> constrain(jnp.ones((2, 3)), "batch", "embed").shape
        (2, 3)
    """
    mesh_and_rules = _layout.get()
    if mesh_and_rules is None or mesh_and_rules[0].size == 1:
        return x
    mesh, rules = mesh_and_rules
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x.shape, names, mesh, rules)))


def move(x: Array, source_names: tuple[str | None, ...], target_names: tuple[str | None, ...]) -> Array:
    """Return `x`, moved from one placement to another. The gradient moves back to the first placement.

    A constraint alone would place the gradient by `target_names` too: partial sums would be all-reduced and then
    sliced. With `move`, XLA can use a reduce-scatter instead.

    Args:
        x: an activation.
        source_names: the logical axis of each dim of `x`, as it is placed; `x` is moved there first if it is not.
        target_names: the logical axis of each dim of the result.
    """
    mesh_and_rules = _layout.get()
    if mesh_and_rules is None or mesh_and_rules[0].size == 1:
        return x
    if spec(x.shape, source_names, *mesh_and_rules) == spec(x.shape, target_names, *mesh_and_rules):
        return constrain(x, *target_names)
    return _move(mesh_and_rules, source_names, target_names, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _move(
    mesh_and_rules: MeshAndRules, source_names: tuple[str | None, ...], target_names: tuple[str | None, ...], x: Array
) -> Array:
    """Return `x` placed by `target_names`. The gradient of `x` is placed by `source_names`."""
    with reopened_layout(mesh_and_rules):
        # without the first constraint XLA may move what `x` is computed from: a norm in float32, or the residual stream
        return constrain(constrain(x, *source_names), *target_names)


def _move_back(
    mesh_and_rules: MeshAndRules, source_names: Any, target_names: Any, _: None, gradient: Array
) -> tuple[Array]:
    """Return the gradient of `x` in `_move`, placed by `source_names`."""
    with reopened_layout(mesh_and_rules):
        return (constrain(gradient, *source_names),)


_move.defvjp(lambda *args: (_move(*args), None), _move_back)
