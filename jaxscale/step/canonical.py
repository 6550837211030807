"""The canonical form of a train state: what a checkpoint holds, whatever the mesh, ZeRO stage or memory plan.

A flat dict of arrays by name. Stacked parameters are one array per layer (`.../layers/3/...`), the padding of a
vocabulary is cut off, generators are their plain key data. Optimizer state that has its parameter's shape is treated as
the parameter is. A stack that keeps its layers in groups (`blocks.grouping`) has the names of one stack: parameters by
layer, and what is left stacked, such as running statistics, joined. A quantized array is two, `NAME/codes.MAP` and
`NAME/scale`, from whose shapes the block is read; 4-bit codes take a byte each there.

Taking a state apart copies it on the devices, whole: with Adam up to 12 bytes a parameter beside the state, until the
copy has reached the host. No step runs meanwhile, so a save needs more memory than a step only where gradients and
activations take less than that; `Canonical.copy_bytes` tells it before.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layers.stack import in_one_stack
from jaxscale.optim.quantize import is_quantized
from jaxscale.sharding.memory_space import in_memory_of, on_host, to_device, to_host
from jaxscale.sharding.zero import split
from jaxscale.step.functional import Functional
from jaxscale.step.layout import local_bytes
from jaxscale.step.outer import ALL, OPTIMIZER, OUTER
from jaxscale.step.reducing import REDUCE, kept, kept_abstract, kept_prefix, restored
from jaxscale.step.state import TrainState
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array

if TYPE_CHECKING:
    from jaxscale.step.train_step import TrainStep

PARAMS = "params"
"""Prefix of the parameters' names: what evaluation, generation and export restore, beside `REST`."""
REST = "rest"
IN_FLIGHT = "in_flight"
"""Prefix of what an asynchronous pipeline has in it, which another plan, or another version, leaves behind."""
OPTIONAL = (f"{IN_FLIGHT}/", f"{REDUCE}/", f"{OUTER}/")
"""Of names that a checkpoint may lack: what they name begins anew."""

CODES, SCALE = "codes.", "scale"
"""The last part of the names of a quantized array's two: the map follows the first."""
WIDE = {"uint4": jnp.dtype(jnp.uint8), "int4": jnp.dtype(jnp.int8)}
"""Types of codes that checkpoints hold a byte each of."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one leaf of a train state becomes arrays of the canonical form.

    Args:
        names: of its arrays: one per layer for a stacked leaf, else one; none for a leaf without elements.
        stacked: the dim that is taken apart; `None` if none is.
        shape: of the leaf without padding.
        key: name of the generator's implementation if the leaf is a PRNG key.
        rows: of the array, along its first dim, which the leaf is: one group's layers of a stack in groups.
        order: rows of a stacked leaf that have the names, in their order; empty: all. The others are zeros, which pad
            a pipeline's shorter stages.
        dtype: of the arrays, where it is not the leaf's.
    """

    names: tuple[str, ...]
    stacked: int | None
    shape: tuple[int, ...]
    key: str | None = None
    rows: tuple[int, int] | None = None
    order: tuple[int, ...] = ()
    dtype: Any = None

    def rows_of(self) -> list[tuple[int, str]]:
        """Row and name of each array of a stacked leaf."""
        return list(zip(self.order or range(len(self.names)), self.names, strict=True))


class Canonical:
    """The maps between a step's train state and its canonical form, compiled once.

    Args:
        step: whose state, with its placements.
    """

    def __init__(self, step: "TrainStep") -> None:
        self._layout = step.layout
        self._stage, self._outer = step.stage, step.outer
        whole = _held(step)
        abstract, treedef = jax.tree.flatten(whole)
        self._leaves, self._treedef = abstract, treedef
        parts = jax.tree.leaves(_parts(step), is_leaf=lambda x: isinstance(x, Part))
        # an array without elements, as some rules keep for parameters that are none of theirs, can't be written
        self._parts = [
            dataclasses.replace(part, names=()) if 0 in leaf.shape else part
            for leaf, part in zip(abstract, parts, strict=True)
        ]
        self.shardings = {
            name: in_memory_of(leaf.sharding, NamedSharding(step.mesh, _spec(leaf, part)))
            for leaf, part in zip(self._leaves, self._parts, strict=True)
            for name in part.names
        }
        self.take_apart = jax.jit(self._take_apart, out_shardings=self.shardings)

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
        if self._stage is not None:
            state = dataclasses.replace(state, reduce=kept(self._stage, state.reduce))
        if self._outer is not None:
            state = self._outer.kept(state)
        arrays: dict[str, Array] = {}
        groups: dict[str, dict[int, Array]] = {}
        ways: dict[str, Any] = {}
        for leaf, part in zip(jax.tree.leaves(state), self._parts, strict=True):
            if not part.names:
                continue
            back = functools.partial(_given_back, dtype=part.dtype, host=on_host(leaf))
            if part.stacked is not None and part.rows is None and leaf.shape == part.shape:
                for i, name in part.rows_of():
                    one = jax.lax.index_in_dim(leaf, i, part.stacked, keepdims=False)
                    arrays[name] = back(to_device(one))
                continue
            whole = jax.random.key_data(leaf) if part.key else to_device(leaf)
            if whole.shape != part.shape and not part.key:
                whole = jax.lax.slice(whole, (0,) * whole.ndim, part.shape)
            if part.rows is not None:
                groups.setdefault(part.names[0], {})[part.rows[0]] = whole
                ways[part.names[0]] = back
            elif part.stacked is None:
                arrays[part.names[0]] = back(whole)
            else:
                for i, name in part.rows_of():
                    arrays[name] = back(jax.lax.index_in_dim(whole, i, part.stacked, keepdims=False))
        for name, parts in groups.items():
            arrays[name] = ways[name](jnp.concatenate([parts[start] for start in sorted(parts)]))
        return arrays

    def put_together(self, arrays: Mapping[str, Array]) -> TrainState:
        """The train state of a canonical form, which is given away; leaves in flight are `None` where it has none.

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
            given = [arrays[name] for name in part.names]
            waiting.subtract(part.names)
            if waiting[part.names[0]] or part.rows is not None:
                join = _joined(None, part.key, leaf.shape, leaf.dtype, leaf.sharding, part.rows)
                leaves.append(jax.block_until_ready(join(given)))
                if not waiting[part.names[0]] and isinstance(given[0], jax.Array):
                    given[0].delete()
                continue
            alike = given[0].shape == leaf.shape and given[0].dtype == leaf.dtype
            if alike and part.key is None and part.stacked is None:
                leaves.append(jax.device_put(given[0], leaf.sharding))
                continue
            join = _joined(part.stacked, part.key, leaf.shape, leaf.dtype, leaf.sharding, order=part.order)
            leaves.append(jax.block_until_ready(join(given)))
            for array in given:
                if isinstance(array, jax.Array):
                    array.delete()
        state = jax.tree.unflatten(self._treedef, leaves)
        if self._stage is not None:
            state = dataclasses.replace(state, reduce=restored(self._stage, state.reduce))
        return state if self._outer is None else self._outer.restored(state)


def _given_back(array: Array, dtype: Any, host: bool) -> Array:
    array = array if dtype is None else array.astype(dtype)
    return to_host(array) if host else array


@functools.lru_cache(maxsize=1024)
def _joined(
    dim: int | None,
    key: str | None,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    rows: tuple[int, int] | None = None,
    order: tuple[int, ...] = (),
) -> Any:
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
            arrays = [where.get(row, jnp.zeros_like(arrays[0])) for row in range(shape[dim])]
        whole = arrays[0] if dim is None else jnp.stack(arrays, dim)
        padding = [(0, want - have) for have, want in zip(whole.shape, shape, strict=True)]
        return (jnp.pad(whole, padding) if any(p for _, p in padding) else whole).astype(dtype)

    return jax.jit(join, out_shardings=sharding)


def _held(step: "TrainStep") -> TrainState:
    """The train state as a checkpoint holds it, before it is taken apart: shapes, dtypes and placements."""
    whole = step.layout.abstract
    if step.stage is not None:
        whole = dataclasses.replace(whole, reduce=kept_abstract(step.stage))
    return whole if step.outer is None else step.outer.kept_abstract(whole)


def _parts(step: "TrainStep") -> TrainState:
    """A tree like the train state whose leaves are `Part`s."""
    functional = step.functional
    plain = functional
    if functional.vocab_multiple > 1:
        plain = Functional.of(functional.model, functional.seed, 1, functional.groups, functional.rows)
        plain = plain.copied(functional.copies)
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(plain.params).items()}
    abstract, layout = _held(step), step.layout if step.outer is None else step.outer.plain

    def of_param(prefix: str, path: Any, name: str | None, leaf: Any, role: str = "") -> Part:
        """The part of a leaf that is treated as parameter `name` is; `role` tells an array of a quantized one."""
        if role:
            path = path[:-1]
        if step.update.split:  # a rule's state has the names that it has without
            path = tuple(key for key in path if getattr(key, "name", None) != "inner")
        full = f"{prefix}/{path_name(path)}" if path else prefix
        if name is None or len(leaf.shape) != len(shapes[name]):
            return _plain(full, leaf)
        shape, end = shapes[name], f"/{role}" if role else ""
        if role == SCALE:  # blocks along the last dim but one, which is never padded
            shape = (*shape[:-2], leaf.shape[-2], shape[-1])
        dtype = WIDE.get(str(leaf.dtype)) if role else None
        if name in functional.copies:  # the others are zeros
            return Part((full + end,), 0, shape, order=(functional.copies[name].index(0),), dtype=dtype)
        axes = functional.names.get(name) or ()
        if "layers" not in axes:
            return Part((full + end,), None, shape, dtype=dtype)
        dim, order = axes.index("layers"), functional.rows
        if order:
            alive = tuple(row for row, layer in enumerate(order) if layer >= 0)
            names = tuple(layer_name(full, order[row]) + end for row in alive)
            return Part(names, dim, shape, order=alive, dtype=dtype)
        return Part(tuple(layer_name(full, i) + end for i in range(leaf.shape[dim])), dim, shape, dtype=dtype)

    def of_codec(path: Any, leaf: Any) -> Part:
        """A residual is taken apart as its parameter is, behind the dim of replicas where it has that."""
        assert step.stage is not None
        prefix, name, residual, every = kept_prefix(step.stage, path)
        full = f"{prefix}/{name}"
        if not residual:
            return _plain(full, leaf)
        return behind_replicas(every, leaf, lambda one: of_param(full, (), name, one))

    def behind_replicas(every: bool, leaf: Any, of_one: Callable[[Any], Part]) -> Part:
        """The part of a leaf that has a dim of replicas before those of one's."""
        part = of_one(jax.ShapeDtypeStruct(leaf.shape[every:], leaf.dtype))
        stacked = None if part.stacked is None else part.stacked + every
        return dataclasses.replace(part, stacked=stacked, shape=(*leaf.shape[:every], *part.shape))

    def of_outer(path: Any, leaf: Any, owner: str, role: str) -> Part:
        assert step.outer is not None
        prefix, every, path = step.outer.prefix(path)
        name = owner if prefix.endswith(OPTIMIZER) else path_name(path)
        return behind_replicas(every, leaf, lambda one: of_param(prefix, path, name or None, one, role))

    def one_stack(tree: Any, stacked: Callable[[Any], bool]) -> Any:
        """Leaves that are not taken apart, of stacks in groups: one array for all groups."""
        parts, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Part))
        starts: dict[str, set[int]] = collections.defaultdict(set)
        for part in parts:
            if part.stacked is None:
                starts[in_one_stack(part.names[0])[0]].add(in_one_stack(part.names[0])[1])

        def joined(part: Part) -> Part:
            name, start = in_one_stack(part.names[0])
            if part.stacked is not None or len(starts[name]) == 1:
                return part
            rows = (start, start + part.shape[0]) if stacked(part) else None
            return dataclasses.replace(part, names=(name,), rows=rows)

        return jax.tree.unflatten(treedef, [joined(part) for part in parts])

    owners = jax.tree.unflatten(jax.tree.structure(abstract.optimizer), layout.owners(step.optimizer))
    roles = jax.tree.map(_roles, abstract.optimizer, is_leaf=is_quantized)
    of_outer_optimizer = [jax.tree.map(lambda _: "", abstract.outer) for _ in range(2)]
    if step.outer is not None:
        for tree, found in zip(of_outer_optimizer, (owners, roles), strict=True):
            tree[ALL][OPTIMIZER] = found
    by_path = jax.tree_util.tree_map_with_path
    return TrainState(
        step=by_path(lambda _, leaf: _plain("step", leaf), abstract.step),
        params=by_path(lambda path, leaf: of_param(PARAMS, path, path_name(path), leaf), abstract.params),
        optimizer=one_stack(
            by_path(
                lambda path, leaf, owner, role: of_param("optimizer", path, owner or None, leaf, role),
                abstract.optimizer,
                owners,
                roles,
            ),
            # optax puts an array of one number where a parameter has no state of a kind
            lambda part: len(part.shape) > 0 and part.shape != (1,),
        ),
        rest=one_stack(
            by_path(lambda path, leaf: _plain(f"{REST}/{path_name(path)}", leaf), abstract.rest), lambda part: True
        ),
        watch=by_path(lambda path, leaf: _plain(f"watch/{path_name(path)}", leaf), abstract.watch),
        in_flight=by_path(
            lambda path, leaf: _plain(f"{IN_FLIGHT}/{step.objective.pipe_name}/{path_name(path)}", leaf),
            abstract.in_flight,
        ),
        reduce=by_path(of_codec, abstract.reduce),
        outer=by_path(of_outer, abstract.outer, *of_outer_optimizer),
    )


def _roles(leaf: Any) -> Any:
    """The last part of the name of each array of a quantized one; "" for any other array."""
    if not is_quantized(leaf):
        return ""
    return dataclasses.replace(leaf, codes=CODES + leaf.map, scale=SCALE)


def _plain(name: str, leaf: Any) -> Part:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # the leaf is abstract, and only a key can tell its implementation: ask a traced one
        found: list[Any] = []
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
        return Part((name,), None, tuple(leaf.shape), key=str(found[0]))
    return Part((name,), None, tuple(leaf.shape))


def layer_name(name: str, layer: int) -> str:
    """Name of one layer of a stacked parameter: its number goes behind the last "layers" of the name.

    Example:
        >>> layer_name("params/blocks/layers/mlp/up/kernel", 3)
        'params/blocks/layers/3/mlp/up/kernel'
        >>> layer_name("params/blocks/layers_from_25/mlp/up/kernel", 3)
        'params/blocks/layers/28/mlp/up/kernel'
    """
    name, start = in_one_stack(name)
    found = list(re.finditer(r"(?:^|/)layers(?=/|$)", name))
    if not found:
        return f"{name}/{layer}"
    end = found[-1].end()
    return f"{name[:end]}/{start + layer}{name[end:]}"


def _spec(leaf: jax.ShapeDtypeStruct, part: Part) -> PartitionSpec:
    """Placement of a leaf's arrays: the leaf's own where it still divides without padding and layers."""
    if part.key:
        return PartitionSpec()
    entries = list(leaf.sharding.spec) + [None] * (len(leaf.shape) - len(leaf.sharding.spec))
    mesh = leaf.sharding.mesh
    for dim, entry in enumerate(entries):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        ways = functools.reduce(lambda n, axis: n * mesh.shape[axis], axes, 1)
        if part.shape[dim] % ways:
            entries[dim] = None
    if part.stacked is None:
        return PartitionSpec(*entries)
    layers = entries.pop(part.stacked)
    spec = PartitionSpec(*entries)
    for axis in () if layers is None else (layers,) if isinstance(layers, str) else layers:
        # a layer that lay on one stage's device is split over all of them, not copied to them
        spec = split([size for dim, size in enumerate(part.shape) if dim != part.stacked], None, spec, mesh, axis)
    return spec
