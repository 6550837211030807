"""The canonical form of a train state, which a checkpoint holds. It is the same for every mesh, ZeRO stage and plan.

It is a flat dict of arrays by name. A stacked parameter becomes one array per layer (`.../layers/3/...`). The padding
of a vocabulary is cut off. A random generator is its plain key data. Optimizer state that has its parameter's shape is
treated like the parameter. A stack that keeps its layers in groups (`blocks.grouping`) has the names of a single stack:
its parameters are listed by layer, and arrays that stay stacked, such as running statistics, are joined. A quantized
array becomes two, `NAME/codes.MAP` and `NAME/scale`, whose shapes give the block size; 4-bit codes take a byte each.

To take a state apart, the devices copy all of it: with Adam up to 12 bytes a parameter in addition to the state, until
the copy has reached the host. No step runs meanwhile, so a save needs more memory than a step only if gradients and
activations take less than that. `Canonical.copy_bytes` is the size of the copy.
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
from jaxscale.sharding.partition import dim_axes, dividing, spec_of
from jaxscale.sharding.zero import split
from jaxscale.state.extra import EXTRAS, StateExtra
from jaxscale.state.layout import Layout, local_bytes
from jaxscale.state.naming import Naming, Part, plain, roles
from jaxscale.state.train_state import TrainState
from jaxscale.trees import path_name
from jaxscale.typing import Array, PyTree

PARAMS = "params"
"""Prefix of the names of parameters. Evaluation, generation and export restore these, and those under `REST`."""
REST = "rest"
"""Prefix of the names of the model's other state, such as batch statistics."""
OPTIONAL = tuple(f"{name}/" for name in EXTRAS)
"""Prefixes of the names of extras, which a checkpoint may lack; a missing extra starts from its initial value."""


class Canonical:
    """Converts a step's train state to its canonical form and back, by functions that are compiled once.

    Args:
        layout: placements of the state.
        extras: what techniques add to the state.
        naming: names of the arrays of leaves that are shaped like parameters.
        owners: for each leaf of the optimizer's state, the name of the parameter whose shape it has, or "".
    """

    def __init__(self, layout: Layout, extras: Sequence[StateExtra], naming: Naming, owners: Sequence[str]) -> None:
        self._layout = layout
        self._extras = extras
        saved_abstract = layout.abstract
        for extra in extras:
            saved_abstract = extra.to_saved_abstract(saved_abstract)
        leaves, treedef = jax.tree.flatten(saved_abstract)
        self._leaves, self._treedef = leaves, treedef
        parts = jax.tree.leaves(self._tree(naming, owners, saved_abstract), is_leaf=lambda x: isinstance(x, Part))
        # arrays without elements, which some rules keep for parameters that they do not update, can't be written
        self._parts = [
            dataclasses.replace(part, names=()) if 0 in leaf.shape else part
            for leaf, part in zip(leaves, parts, strict=True)
        ]
        self.shardings = {
            name: in_memory_of(leaf.sharding, NamedSharding(layout.mesh, _spec(leaf, part)))
            for leaf, part in zip(self._leaves, self._parts, strict=True)
            for name in part.names
        }
        self.take_apart = jax.jit(self._take_apart, out_shardings=self.shardings)

    def _tree(self, naming: Naming, owners: Sequence[str], abstract: TrainState) -> TrainState:
        """A tree like the train state with a `Part` for each leaf: the arrays that the leaf becomes."""
        by_path = jax.tree_util.tree_map_with_path
        return TrainState(
            step=by_path(lambda _, leaf: plain("step", leaf), abstract.step),
            params=by_path(lambda path, leaf: naming.of_param(PARAMS, path, path_name(path), leaf), abstract.params),
            optimizer=_in_one_stack(
                by_path(
                    lambda path, leaf, owner, role: naming.of_param("optimizer", path, owner or None, leaf, role),
                    abstract.optimizer,
                    jax.tree.unflatten(jax.tree.structure(abstract.optimizer), owners),
                    roles(abstract.optimizer),
                ),
                # optax puts an array of one number where a parameter has no state of a kind
                lambda part: len(part.shape) > 0 and part.shape != (1,),
            ),
            rest=_in_one_stack(
                by_path(lambda path, leaf: plain(f"{REST}/{path_name(path)}", leaf), abstract.rest), lambda part: True
            ),
            watch=by_path(lambda path, leaf: plain(f"watch/{path_name(path)}", leaf), abstract.watch),
            extra={extra.name: extra.checkpoint_parts(naming, abstract) for extra in self._extras},
        )

    @property
    def copy_bytes(self) -> int:
        """Bytes per device that `take_apart` needs in addition to the state, until its arrays are on the host.

        Arrays that lie on the host already are copied by way of the device, a few at a time, and do not count.
        """
        return local_bytes(self.abstract())

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and placements of the canonical form, to restore into."""
        shapes = jax.eval_shape(self._take_apart, self._layout.abstract)
        return {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.shardings[n]) for n, s in shapes.items()}

    def _take_apart(self, state: TrainState) -> dict[str, Array]:
        """The canonical form of a state, as a function to trace."""
        for extra in self._extras:
            state = extra.to_saved(state)
        arrays: dict[str, Array] = {}
        groups_of_name: dict[str, dict[int, Array]] = {}  # arrays of a stack in groups, by name and first layer
        finish_of_name: dict[str, Callable[[Array], Array]] = {}  # for the joined groups of a name
        for leaf, part in zip(jax.tree.leaves(state), self._parts, strict=True):
            if not part.names:
                continue
            finish = functools.partial(_finished, dtype=part.dtype, is_on_host=on_host(leaf))
            if part.layer_dim is not None and part.rows is None and leaf.shape == part.shape:
                for i, name in part.rows_of():
                    layer = jax.lax.index_in_dim(leaf, i, part.layer_dim, keepdims=False)
                    arrays[name] = finish(to_device(layer))
                continue
            array = jax.random.key_data(leaf) if part.key else to_device(leaf)
            if array.shape != part.shape and not part.key:
                array = jax.lax.slice(array, (0,) * array.ndim, part.shape)
            if part.rows is not None:
                groups_of_name.setdefault(part.names[0], {})[part.rows[0]] = array
                finish_of_name[part.names[0]] = finish
            elif part.layer_dim is None:
                arrays[part.names[0]] = finish(array)
            else:
                for i, name in part.rows_of():
                    arrays[name] = finish(jax.lax.index_in_dim(array, i, part.layer_dim, keepdims=False))
        for name, groups in groups_of_name.items():
            arrays[name] = finish_of_name[name](jnp.concatenate([groups[start] for start in sorted(groups)]))
        return arrays

    def put_together(self, arrays: Mapping[str, Array]) -> TrainState:
        """Put a train state together from its canonical form, whose arrays are donated, and return the state.

        An extra whose arrays are missing starts from its initial value.

        Arrays that are stacked or padded into a leaf are deleted once the leaf exists, so that memory holds little
        more than one state at a time; the others become leaves themselves. The loop waits for each leaf. So the arrays
        of the leaf before are freed, and only one program is in flight: collectives of dozens can starve one another on
        a CPU.

        Args:
            arrays: arrays of the canonical form, by name.
        """
        leaves = []
        # for each array, the number of leaves that have yet to read it: several for a stack in groups
        pending_reads = collections.Counter(name for part in self._parts for name in part.names)
        for leaf, part in zip(self._leaves, self._parts, strict=True):
            if not part.names:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding))
                continue
            if part.names[0].startswith(OPTIONAL) and part.names[0] not in arrays:
                leaves.append(None)
                continue
            leaf_arrays = [arrays[name] for name in part.names]
            pending_reads.subtract(part.names)
            is_last_read = not pending_reads[part.names[0]]
            is_whole_leaf = part.rows is None and part.key is None and part.layer_dim is None and is_last_read
            if is_whole_leaf and leaf_arrays[0].shape == leaf.shape and leaf_arrays[0].dtype == leaf.dtype:
                leaves.append(jax.device_put(leaf_arrays[0], leaf.sharding))
                continue
            join = _join_fn(part.layer_dim, part.key, leaf, part.rows, part.order)
            leaves.append(jax.block_until_ready(join(leaf_arrays)))
            for array in leaf_arrays:
                if is_last_read and isinstance(array, jax.Array):
                    array.delete()
        state = jax.tree.unflatten(self._treedef, leaves)
        for extra in self._extras:
            state = extra.from_saved(state)
        return state


def _finished(array: Array, dtype: np.dtype | None, is_on_host: bool) -> Array:
    """An array of the canonical form in its dtype (`None` keeps it), in host memory if its leaf is."""
    array = array if dtype is None else array.astype(dtype)
    return to_host(array) if is_on_host else array


@functools.lru_cache(maxsize=1024)
def _join_fn(
    dim: int | None,
    key: str | None,
    leaf: jax.ShapeDtypeStruct,
    rows: tuple[int, int] | None,
    order: tuple[int, ...],
) -> Callable[[list[Array]], Array]:
    """A compiled function from the arrays of a leaf to the leaf, shared by leaves of one shape and placement.

    Args:
        dim: the dim along which arrays are stacked; `None` if the leaf is one array.
        key: name of the generator's implementation if the leaf is a PRNG key.
        leaf: shape, dtype and sharding of the leaf.
        rows: (start, stop) of the array's rows that the leaf is; `None` for all.
        order: the row of each array, if some rows of the leaf are zeros; () if there is an array for every row.
    """

    def join(arrays: list[Array]) -> Array:
        arrays = to_device(arrays)
        if rows is not None:
            arrays = [arrays[0][slice(*rows)]]
        if key:
            return jax.random.wrap_key_data(arrays[0], impl=key)
        if order:
            assert dim is not None
            array_of_row = dict(zip(order, arrays, strict=True))
            arrays = [array_of_row.get(row, jnp.zeros_like(arrays[0])) for row in range(leaf.shape[dim])]
        whole = arrays[0] if dim is None else jnp.stack(arrays, dim)
        padding = [(0, padded - size) for size, padded in zip(whole.shape, leaf.shape, strict=True)]
        return (jnp.pad(whole, padding) if any(p for _, p in padding) else whole).astype(leaf.dtype)

    return jax.jit(join, out_shardings=leaf.sharding)


def _in_one_stack(tree: PyTree[Part], is_layered: Callable[[Part], bool]) -> PyTree[Part]:
    """A tree of parts in which the groups of one stack share an array, if their leaves are not split into layers.

    Args:
        tree: tree of parts.
        is_layered: function that returns whether the first dim of a part's leaf is layers.
    """
    parts, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Part))
    starts: dict[str, set[int]] = collections.defaultdict(set)
    for part in parts:
        if part.layer_dim is None:
            name, start = in_one_stack(part.names[0])
            starts[name].add(start)

    def in_stack(part: Part) -> Part:
        name, start = in_one_stack(part.names[0])
        if part.layer_dim is not None or len(starts[name]) == 1:
            return part
        rows = (start, start + part.shape[0]) if is_layered(part) else None
        return dataclasses.replace(part, names=(name,), rows=rows)

    return jax.tree.unflatten(treedef, [in_stack(part) for part in parts])


def _spec(leaf: jax.ShapeDtypeStruct, part: Part) -> PartitionSpec:
    """Placement of the arrays of a leaf: the leaf's own, but whole along dims that cannot be split without padding."""
    if part.key:
        return PartitionSpec()
    mesh = leaf.sharding.mesh
    spec = dividing(leaf.sharding.spec, part.shape, mesh)
    if part.layer_dim is None:
        return spec
    dims = list(dim_axes(spec, part.layer_dim + 1))
    layer_axes = dims.pop(part.layer_dim)
    spec = spec_of(dims)
    for axis in layer_axes:
        # a layer that lies on one stage's device is split over the devices of all stages, not copied to them
        spec = split([size for dim, size in enumerate(part.shape) if dim != part.layer_dim], None, spec, mesh, axis)
    return spec
