"""The canonical form of a train state, which a checkpoint holds: the same for every mesh, ZeRO stage and plan.

The canonical form is a flat dict of arrays by name. A stacked parameter becomes one array per layer
(`.../layers/3/...`). The padding of a vocabulary is cut off. A random generator becomes its plain key data. Optimizer
state that has the shape of its parameter is treated like the parameter. A stack in groups (`blocks.grouping`) has the
names of a single stack: its parameters are listed by layer, and arrays that stay stacked, such as running statistics,
are joined. A quantized array becomes two arrays, `NAME/codes.MAP` and `NAME/scale`, whose shapes imply the block size;
4-bit codes take a byte each.

To take a state apart, the devices copy all of it. With Adam, the copy takes up to 12 bytes a parameter in addition to
the state, until the copy is on the host. No step runs meanwhile, so a save needs more memory than a step only if the
gradients and activations of the step take fewer bytes than the copy. `Canonical.copy_bytes` is the size of the copy.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layers.stack import in_one_stack
from jaxscale.sharding.memory_space import in_memory_of, on_host, to_device, to_host
from jaxscale.sharding.partition import dim_axes, divisible_spec, spec_of
from jaxscale.sharding.zero import split_spec
from jaxscale.state.extra import EXTRAS, StateExtra
from jaxscale.state.layout import Layout, local_bytes
from jaxscale.state.naming import Naming, Part, part_of_whole, roles
from jaxscale.state.train_state import TrainState
from jaxscale.trees import path_name
from jaxscale.typing import Array, Params, PyTree

PARAMS = "params"
"""Prefix of the names of parameters. Evaluation, generation and export restore the arrays under `PARAMS` and `REST`."""
REST = "rest"
"""Prefix of the names of the model's other state, such as batch statistics."""
OPTIONAL = tuple(f"{name}/" for name in EXTRAS)
"""Prefixes of the names of extras, which a checkpoint may lack; a missing extra starts from its initial value."""


class Canonical:
    """Conversion of a step's train state to its canonical form and back, by functions that are compiled once.

    Args:
        layout: placements of the state.
        extras: the extras that techniques add to the state.
        naming: gives the names of the arrays that come from leaves shaped like parameters.
        owners: for each leaf of the optimizer's state, the name of the parameter whose shape the leaf has, or "".

    Attributes:
        shardings: the sharding of each array of the canonical form, by name.
        take_apart: jitted function from a train state to its canonical form.
    """

    def __init__(self, layout: Layout, extras: Sequence[StateExtra], naming: Naming, owners: Sequence[str]) -> None:
        self._layout, self._extras = layout, extras
        abstract_state = layout.abstract
        for extra in extras:
            abstract_state = extra.to_saved_abstract(abstract_state)
        abstract_leaves, self._treedef = jax.tree.flatten(abstract_state)
        self._abstract_leaves = abstract_leaves
        part_tree = self._part_tree(naming, owners, abstract_state)
        parts = jax.tree.leaves(part_tree, is_leaf=lambda node: isinstance(node, Part))
        # arrays without elements, which some rules keep for parameters that they do not update, can't be written
        self._parts = [
            dataclasses.replace(part, names=()) if 0 in leaf.shape else part
            for leaf, part in zip(abstract_leaves, parts, strict=True)
        ]
        self.shardings = {
            name: in_memory_of(leaf.sharding, NamedSharding(layout.mesh, _array_spec(leaf, part)))
            for leaf, part in zip(self._abstract_leaves, self._parts, strict=True)
            for name in part.names
        }
        self.take_apart = jax.jit(self._take_apart, out_shardings=self.shardings)

    def _part_tree(self, naming: Naming, owners: Sequence[str], abstract: TrainState) -> TrainState:
        """Return a tree like the train state, with the `Part` of each leaf, which describes the leaf's arrays."""
        map_with_path = jax.tree_util.tree_map_with_path
        return TrainState(
            step=map_with_path(lambda _, leaf: part_of_whole("step", leaf), abstract.step),
            params=map_with_path(
                lambda path, leaf: naming.part_of_param(PARAMS, path, path_name(path), leaf), abstract.params
            ),
            optimizer=_in_one_stack(
                map_with_path(
                    lambda path, leaf, owner, role: naming.part_of_param("optimizer", path, owner or None, leaf, role),
                    abstract.optimizer,
                    jax.tree.unflatten(jax.tree.structure(abstract.optimizer), owners),
                    roles(abstract.optimizer),
                ),
                # where a rule keeps no state for a parameter, optax puts an array of one number
                lambda part: len(part.shape) > 0 and part.shape != (1,),
            ),
            rest=_in_one_stack(
                map_with_path(lambda path, leaf: naming.part_of_state(REST, path, leaf), abstract.rest),
                lambda part: True,
            ),
            watch=map_with_path(lambda path, leaf: part_of_whole(f"watch/{path_name(path)}", leaf), abstract.watch),
            extra={extra.name: extra.checkpoint_parts(naming, abstract) for extra in self._extras},
        )

    @property
    def copy_bytes(self) -> int:
        """Bytes per device that `take_apart` needs in addition to the state, until its arrays are on the host.

        Arrays that lie on the host already are copied by way of the device, a few at a time, and do not count.
        """
        return local_bytes(self.abstract_arrays())

    def abstract_arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape, dtype and sharding of each array of the canonical form, by the array's name."""
        abstract_arrays = jax.eval_shape(self._take_apart, self._layout.abstract)
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.shardings[name])
            for name, array in abstract_arrays.items()
        }

    def _take_apart(self, state: TrainState) -> dict[str, Array]:
        """Return the canonical form of a state. `take_apart` is this function, jitted."""
        for extra in self._extras:
            state = extra.to_saved(state)
        arrays: dict[str, Array] = {}
        groups_by_name: dict[str, dict[int, Array]] = {}  # arrays of a stack in groups, by name and first layer
        finish_by_name: dict[str, Callable[[Array], Array]] = {}  # function that finishes the joined groups, by name
        for leaf, part in zip(jax.tree.leaves(state), self._parts, strict=True):
            if not part.names:
                continue
            finish = functools.partial(_finished_array, dtype=part.dtype, is_on_host=on_host(leaf))
            if part.layer_dim is not None and part.group_rows is None and leaf.shape == part.shape:
                for row, name in part.rows_and_names():
                    layer_array = jax.lax.index_in_dim(leaf, row, part.layer_dim, keepdims=False)
                    arrays[name] = finish(to_device(layer_array))
                continue
            array = jax.random.key_data(leaf) if part.key_impl else to_device(leaf)
            array = array[jnp.array(part.rows)] if part.rows else array
            if array.shape != part.shape and not part.key_impl:  # cut off the padding
                array = jax.lax.slice(array, (0,) * array.ndim, part.shape)
            if part.group_rows is not None:
                groups_by_name.setdefault(part.names[0], {})[part.group_rows[0]] = array
                finish_by_name[part.names[0]] = finish
            elif part.layer_dim is None:
                arrays[part.names[0]] = finish(array)
            else:
                for row, name in part.rows_and_names():
                    arrays[name] = finish(jax.lax.index_in_dim(array, row, part.layer_dim, keepdims=False))
        for name, array_by_start in groups_by_name.items():
            arrays[name] = finish_by_name[name](
                jnp.concatenate([array_by_start[start] for start in sorted(array_by_start)])
            )
        return arrays

    def with_weights(self, params: Params, model_state: Params, weights: Mapping[str, Array]) -> tuple[Params, Params]:
        """Return parameters and the model's other state in which some arrays of the canonical form are replaced.

        Args:
            params: the initial float32 parameters.
            model_state: the model's other state.
            weights: new arrays by name, with the shapes and shardings of `abstract_arrays`; a stacked leaf keeps the
                layers that have no new array.
        """
        part_tree = jax.tree.unflatten(self._treedef, self._parts)

        def replace_leaf(leaf: Array, part: Part) -> Array:
            if not any(name in weights for name in part.names):
                return leaf
            arrays = {name: weights[name] for name in part.names if name in weights}
            if len(arrays) < len(part.names):
                arrays = {**jax.jit(functools.partial(_canonical_arrays, part=part))(leaf), **arrays}
            abstract_leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            join = _join_fn(part.layer_dim, part.key_impl, abstract_leaf, part.group_rows, part.row_of_name)
            return jax.block_until_ready(join([arrays[name] for name in part.names]))

        return jax.tree.map(replace_leaf, params, part_tree.params), jax.tree.map(
            replace_leaf, model_state, part_tree.rest
        )

    def put_together(self, arrays: Mapping[str, Array]) -> TrainState:
        """Return the train state that a canonical form describes; the arrays of the form are donated.

        An extra whose arrays are missing starts from its initial value.

        Arrays that are stacked or padded into a leaf are deleted once the leaf exists, so that memory holds little
        more than one state at a time. The other arrays become leaves themselves. The loop waits for each leaf, so that
        only one program is in flight: on a CPU, the collectives of dozens of programs can starve one another.

        Args:
            arrays: arrays of the canonical form, by name.
        """
        leaves: list[Array | None] = []
        # for each array, the number of leaves that have yet to read it: several for a stack in groups
        pending_reads = collections.Counter(name for part in self._parts for name in part.names)
        for leaf, part in zip(self._abstract_leaves, self._parts, strict=True):
            if not part.names:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding))
                continue
            if part.names[0].startswith(OPTIONAL) and part.names[0] not in arrays:
                leaves.append(None)
                continue
            leaf_arrays = [arrays[name] for name in part.names]
            pending_reads.subtract(part.names)
            is_last_read = not pending_reads[part.names[0]]
            is_one_array = (
                part.group_rows is None and part.key_impl is None and part.layer_dim is None and not part.rows
            )
            if (
                is_one_array
                and is_last_read
                and leaf_arrays[0].shape == leaf.shape
                and leaf_arrays[0].dtype == leaf.dtype
            ):
                leaves.append(jax.device_put(leaf_arrays[0], leaf.sharding))
                continue
            join = _join_fn(part.layer_dim, part.key_impl, leaf, part.group_rows, part.row_of_name or part.rows)
            leaves.append(jax.block_until_ready(join(leaf_arrays)))
            for array in leaf_arrays:
                if is_last_read and isinstance(array, jax.Array):
                    array.delete()
        state = jax.tree.unflatten(self._treedef, leaves)
        for extra in self._extras:
            state = extra.from_saved(state)
        return state


def _canonical_arrays(leaf: Array, part: Part) -> dict[str, Array]:
    """Return the canonical form of a parameter: its arrays by name, in device memory."""
    array = to_device(leaf)
    if array.shape != part.shape:  # cut off the padding
        array = jax.lax.slice(array, (0,) * array.ndim, part.shape)
    layer_dim = part.layer_dim
    if layer_dim is None:
        return {part.names[0]: array}
    return {name: jax.lax.index_in_dim(array, row, layer_dim, keepdims=False) for row, name in part.rows_and_names()}


def _finished_array(array: Array, dtype: np.dtype | None, is_on_host: bool) -> Array:
    """Return an array cast to `dtype` (unless it is `None`), and moved to host memory if `is_on_host`."""
    cast_array = array if dtype is None else array.astype(dtype)
    return to_host(cast_array) if is_on_host else cast_array


@functools.lru_cache(maxsize=1024)
def _join_fn(
    layer_dim: int | None,
    key_impl: str | None,
    leaf: jax.ShapeDtypeStruct,
    group_rows: tuple[int, int] | None,
    row_of_array: tuple[int, ...],
) -> Callable[[list[Array]], Array]:
    """Return a jitted function from the canonical arrays of a leaf to the leaf.

    Leaves of one shape and placement share one function.

    Args:
        layer_dim: the dim along which arrays are stacked; `None` if the leaf is one array.
        key_impl: name of the generator's implementation if the leaf is a PRNG key, otherwise `None`.
        leaf: shape, dtype and sharding of the leaf.
        group_rows: (start, stop) of those rows of the single array that the leaf contains; `None` for all rows.
        row_of_array: index of the leaf's row that each array fills; if `layer_dim` is `None`, index of the leaf's row
            that each row of the single array fills. All other rows of the leaf are zeros. () if all rows are filled in
            order.
    """

    def join(arrays: list[Array]) -> Array:
        device_arrays = to_device(arrays)
        if group_rows is not None:
            device_arrays = [device_arrays[0][slice(*group_rows)]]
        if key_impl:
            return jax.random.wrap_key_data(device_arrays[0], impl=key_impl)
        leaf_rows = device_arrays
        if row_of_array and layer_dim is None:
            (array,) = device_arrays
            leaf_rows = [jnp.zeros(leaf.shape, array.dtype).at[jnp.array(row_of_array)].set(array)]
        elif row_of_array:
            assert layer_dim is not None
            array_by_row = dict(zip(row_of_array, device_arrays, strict=True))
            leaf_rows = [
                array_by_row.get(row, jnp.zeros_like(device_arrays[0])) for row in range(leaf.shape[layer_dim])
            ]
        unpadded_leaf = leaf_rows[0] if layer_dim is None else jnp.stack(leaf_rows, layer_dim)
        padding = [(0, padded_size - size) for size, padded_size in zip(unpadded_leaf.shape, leaf.shape, strict=True)]
        return (jnp.pad(unpadded_leaf, padding) if any(p for _, p in padding) else unpadded_leaf).astype(leaf.dtype)

    return jax.jit(join, out_shardings=leaf.sharding)


def _in_one_stack(tree: PyTree[Part], is_layered: Callable[[Part], bool]) -> PyTree[Part]:
    """Return a tree of `Part`s in which all groups of a stack share one array.

    The `Part` of a leaf that is split into layers stays unchanged.

    Args:
        tree: tree with the `Part` of each leaf.
        is_layered: function from the `Part` of a leaf to whether the leaf's first dim is for layers.
    """
    parts, treedef = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Part))
    first_layers_by_name: dict[str, set[int]] = collections.defaultdict(set)
    for part in parts:
        if part.layer_dim is None:
            ungrouped_name, first_layer = in_one_stack(part.names[0])
            first_layers_by_name[ungrouped_name].add(first_layer)

    def shared_part(part: Part) -> Part:
        ungrouped_name, first_layer = in_one_stack(part.names[0])
        if part.layer_dim is not None or len(first_layers_by_name[ungrouped_name]) == 1:
            return part
        group_rows = (first_layer, first_layer + part.shape[0]) if is_layered(part) else None
        return dataclasses.replace(part, names=(ungrouped_name,), group_rows=group_rows)

    return jax.tree.unflatten(treedef, [shared_part(part) for part in parts])


def _array_spec(leaf: jax.ShapeDtypeStruct, part: Part) -> PartitionSpec:
    """Return the placement of the arrays of a leaf: the leaf's placement, without splits that would need padding."""
    if part.key_impl:
        return PartitionSpec()
    mesh = leaf.sharding.mesh
    leaf_spec = divisible_spec(leaf.sharding.spec, part.shape, mesh)
    if part.layer_dim is None:
        return leaf_spec
    axes_of_dims = list(dim_axes(leaf_spec, part.layer_dim + 1))
    layer_axes = axes_of_dims.pop(part.layer_dim)
    array_shape = [dim_size for dim, dim_size in enumerate(part.shape) if dim != part.layer_dim]
    spec = spec_of(axes_of_dims)
    for axis in layer_axes:
        # a layer that lies on one stage's device is split over the devices of all stages, not copied to them
        spec = split_spec(array_shape, None, spec, mesh, axis)
    return spec
