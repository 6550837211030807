"""The canonical form of a train state: what a checkpoint holds, whatever the mesh, ZeRO stage or memory plan.

A flat dict of arrays by name. Stacked parameters are one array per layer (`.../layers/3/...`), the padding of a
vocabulary is cut off, generators are their plain key data. Optimizer state that has its parameter's shape is treated as
the parameter is. A stack that keeps its layers in groups (`blocks.grouping`) has the names of one stack: parameters by
layer, and what is left stacked, such as running statistics, joined. A quantized array is two, `NAME/codes.MAP` and
`NAME/scale`, from whose shapes the block is read; 4-bit codes take a byte each there.

Taking a state apart copies it on the devices, whole: with Adam up to 12 bytes a parameter beside the state, until the
copy has reached the host. No step runs meanwhile, so a save needs more memory than a step only where gradients and
activations take less than that; `Canonical.copy_bytes` is the bytes of that copy.
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
"""Prefix of the parameters' names: what evaluation, generation and export restore, beside `REST`."""
REST = "rest"
OPTIONAL = tuple(f"{name}/" for name in EXTRAS)
"""Prefixes of names that a checkpoint may lack: what they name begins anew."""


class Canonical:
    """The maps between a step's train state and its canonical form, compiled once.

    Args:
        layout: placements of the state.
        extras: what techniques add to it.
        naming: of its parameters.
        owners: for each leaf of the optimizer's state, the path of its parameter, or "".
    """

    def __init__(self, layout: Layout, extras: Sequence[StateExtra], naming: Naming, owners: Sequence[str]) -> None:
        self._layout = layout
        self._extras = extras
        saved = layout.abstract
        for extra in extras:
            saved = extra.saved_abstract(saved)
        abstract, treedef = jax.tree.flatten(saved)
        self._leaves, self._treedef = abstract, treedef
        parts = jax.tree.leaves(self._tree(naming, owners, saved), is_leaf=lambda x: isinstance(x, Part))
        # an array without elements, as some rules keep for parameters that are none of theirs, can't be written
        self._parts = [
            dataclasses.replace(part, names=()) if 0 in leaf.shape else part
            for leaf, part in zip(abstract, parts, strict=True)
        ]
        self.shardings = {
            name: in_memory_of(leaf.sharding, NamedSharding(layout.mesh, _spec(leaf, part)))
            for leaf, part in zip(self._leaves, self._parts, strict=True)
            for name in part.names
        }
        self.take_apart = jax.jit(self._take_apart, out_shardings=self.shardings)

    def _tree(self, naming: Naming, owners: Sequence[str], abstract: TrainState) -> TrainState:
        """A tree like the train state whose leaves are `Part`s."""
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
            extra={extra.name: extra.parts(naming, abstract) for extra in self._extras},
        )

    @property
    def copy_bytes(self) -> int:
        """Bytes per device that `take_apart` takes beside the state, until its arrays are on the host.

        What lies on the host already is copied there by way of the device, a few arrays at a time.
        """
        return local_bytes(self.abstract())

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and placements of the canonical form, to restore into."""
        shapes = jax.eval_shape(self._take_apart, self._layout.abstract)
        return {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.shardings[n]) for n, s in shapes.items()}

    def _take_apart(self, state: TrainState) -> dict[str, Array]:
        for extra in self._extras:
            state = extra.saved(state)
        arrays: dict[str, Array] = {}
        groups: dict[str, dict[int, Array]] = {}
        writers: dict[str, Callable[[Array], Array]] = {}
        for leaf, part in zip(jax.tree.leaves(state), self._parts, strict=True):
            if not part.names:
                continue
            returned = functools.partial(_returned, dtype=part.dtype, host=on_host(leaf))
            if part.stacked is not None and part.rows is None and leaf.shape == part.shape:
                for i, name in part.rows_of():
                    layer = jax.lax.index_in_dim(leaf, i, part.stacked, keepdims=False)
                    arrays[name] = returned(to_device(layer))
                continue
            whole = jax.random.key_data(leaf) if part.key else to_device(leaf)
            if whole.shape != part.shape and not part.key:
                whole = jax.lax.slice(whole, (0,) * whole.ndim, part.shape)
            if part.rows is not None:
                groups.setdefault(part.names[0], {})[part.rows[0]] = whole
                writers[part.names[0]] = returned
            elif part.stacked is None:
                arrays[part.names[0]] = returned(whole)
            else:
                for i, name in part.rows_of():
                    arrays[name] = returned(jax.lax.index_in_dim(whole, i, part.stacked, keepdims=False))
        for name, parts in groups.items():
            arrays[name] = writers[name](jnp.concatenate([parts[start] for start in sorted(parts)]))
        return arrays

    def put_together(self, arrays: Mapping[str, Array]) -> TrainState:
        """The train state of a canonical form, which is donated; an extra that it lacks begins anew.

        Arrays that are stacked or padded are deleted leaf by leaf, so that little more than one state lives at a time;
        the others become part of the state. Each leaf is waited for: the memory of the last is free by then, and
        collectives of dozens of programs in flight can starve one another on a CPU.
        """
        leaves = []
        # an array of a stack in groups is read by several leaves, and freed by the last
        waiting = collections.Counter(name for part in self._parts for name in part.names)
        for leaf, part in zip(self._leaves, self._parts, strict=True):
            if not part.names:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding))
                continue
            if part.names[0].startswith(OPTIONAL) and part.names[0] not in arrays:
                leaves.append(None)
                continue
            pieces = [arrays[name] for name in part.names]
            waiting.subtract(part.names)
            last_read = not waiting[part.names[0]]
            whole = part.rows is None and part.key is None and part.stacked is None and last_read
            if whole and pieces[0].shape == leaf.shape and pieces[0].dtype == leaf.dtype:
                leaves.append(jax.device_put(pieces[0], leaf.sharding))
                continue
            join = _joined(part.stacked, part.key, leaf, part.rows, part.order)
            leaves.append(jax.block_until_ready(join(pieces)))
            for array in pieces:
                if last_read and isinstance(array, jax.Array):
                    array.delete()
        state = jax.tree.unflatten(self._treedef, leaves)
        for extra in self._extras:
            state = extra.loaded(state)
        return state


def _returned(array: Array, dtype: np.dtype | None, host: bool) -> Array:
    array = array if dtype is None else array.astype(dtype)
    return to_host(array) if host else array


@functools.lru_cache(maxsize=1024)
def _joined(
    dim: int | None,
    key: str | None,
    leaf: jax.ShapeDtypeStruct,
    rows: tuple[int, int] | None,
    order: tuple[int, ...],
) -> Callable[[list[Array]], Array]:
    """A compiled function from a leaf's arrays to the leaf; leaves of one shape and placement share it."""

    def join(arrays: list[Array]) -> Array:
        arrays = to_device(arrays)
        if rows is not None:
            arrays = [arrays[0][slice(*rows)]]
        if key:
            return jax.random.wrap_key_data(arrays[0], impl=key)
        if order:
            assert dim is not None
            where = dict(zip(order, arrays, strict=True))
            arrays = [where.get(row, jnp.zeros_like(arrays[0])) for row in range(leaf.shape[dim])]
        whole = arrays[0] if dim is None else jnp.stack(arrays, dim)
        padding = [(0, want - have) for have, want in zip(whole.shape, leaf.shape, strict=True)]
        return (jnp.pad(whole, padding) if any(p for _, p in padding) else whole).astype(leaf.dtype)

    return jax.jit(join, out_shardings=leaf.sharding)


def _in_one_stack(tree: PyTree[Part], stacked: Callable[[Part], bool]) -> PyTree[Part]:
    """Parts of leaves that are not taken apart, of stacks in groups: one array for all groups.

    Args:
        tree: of parts.
        stacked: whether the first dim of a part is layers.
    """
    parts, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Part))
    starts: dict[str, set[int]] = collections.defaultdict(set)
    for part in parts:
        if part.stacked is None:
            name, start = in_one_stack(part.names[0])
            starts[name].add(start)

    def joined(part: Part) -> Part:
        name, start = in_one_stack(part.names[0])
        if part.stacked is not None or len(starts[name]) == 1:
            return part
        rows = (start, start + part.shape[0]) if stacked(part) else None
        return dataclasses.replace(part, names=(name,), rows=rows)

    return jax.tree.unflatten(treedef, [joined(part) for part in parts])


def _spec(leaf: jax.ShapeDtypeStruct, part: Part) -> PartitionSpec:
    """Placement of a leaf's arrays: the leaf's own where it still divides without padding and layers."""
    if part.key:
        return PartitionSpec()
    mesh = leaf.sharding.mesh
    spec = dividing(leaf.sharding.spec, part.shape, mesh)
    if part.stacked is None:
        return spec
    dims = list(dim_axes(spec, part.stacked + 1))
    layer_axes = dims.pop(part.stacked)
    spec = spec_of(dims)
    for axis in layer_axes:
        # a layer that lay on one stage's device is split over all of them, not copied to them
        spec = split([size for dim, size in enumerate(part.shape) if dim != part.stacked], None, spec, mesh, axis)
    return spec
