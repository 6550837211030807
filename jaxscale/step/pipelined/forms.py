"""The two forms in which a pipeline's stages read a model's blocks: rows of a stack, or a chain of unlike blocks.

The model is one function of its module, and stays so: traced with its blocks cut (`blocks.cutting`), it shows what
enters the first block, what one stage's blocks make of it, and what loss comes of the last block's output.

Blocks of a stack are alike, and a stage's are the rows of a stacked parameter that lie on its device. Blocks of a
`layers.Chain` are not, and one program serves all devices: a `lax.switch` on the stage's number runs a stage's blocks.
Their parameters are one flat array, as long as the longest stage's, and a device holds those of its own stages alone.
Messages are flattened too, type by type, to the length of the longest. Between steps the parameters of a chain are
split over the pipe axis wherever a dim divides. Every device gathers each of them once before the loop, and its
gradient is scattered once after the loop.

Left out of chains, and refused by name (`recipe/combinations.py`): what would need the array to be split, residuals in
slots, memory rules that look at all blocks at once, and asynchronous schedules.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxscale import blocks
from jaxscale.blocks import Between, Context, Cut
from jaxscale.offload.weights import Streamed
from jaxscale.sharding.partition import dim_axes
from jaxscale.state.layout import PIPE_AXIS
from jaxscale.state.stages import Stages
from jaxscale.step.planned_model import PlannedModel
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Int, Key, Params, PyTree

Scored: TypeAlias = Callable[[nnx.Module, Batch, Context], PyTree]
"""From the module, a microbatch and the settings of the pass to sums."""
Named: TypeAlias = dict[str, Array]
"""Arrays by the name of their parameter."""
Weights: TypeAlias = Mapping[str, Array | Streamed]
"""Arrays by the name of their parameter, some of which may come from the host."""
Microbatch: TypeAlias = tuple[Batch, Array]
"""Rows of a batch, and the index of each in the global batch."""
RunBlocks: TypeAlias = Callable[..., PyTree]
"""Of traced arrays: runs blocks, as a cut model passes it to `blocks.Between`, or one part of a model."""


class Reached(Exception):
    """Carries a traced value out of the model, which need not run on."""

    def __init__(self, value: PyTree) -> None:
        super().__init__("a traced value, on its way out of the model")
        self.value = value


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model in three functions; each takes (stacked, shared, microbatch, key, stage), two of them `x` before.

    Args:
        before: to what enters the first block.
        inside: from `x` to what a stage's blocks make of it.
        behind: from the last block's output to sums.
    """

    before: Callable[..., PyTree]
    inside: Callable[..., PyTree]
    behind: Callable[..., PyTree]


def with_copies(stages: Stages, chunks: Named) -> Named:
    """This rank's chunks, and behind them copies of other ranks' where the schedule has two of a stage."""
    for sent, pairs in stages.copies:
        copy = jax.tree.map(lambda leaf, s=sent, p=pairs: jax.lax.ppermute(leaf[s], PIPE_AXIS, p)[None], chunks)
        chunks = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), chunks, copy)
    return chunks


def added_home(stages: Stages, gradients: Named) -> Named:
    """Gradients of this rank's chunks; those of copies are sent home and added."""
    count = len(stages.homes[0])

    def home(leaf: Array) -> Array:
        mine = leaf[:count]
        for chunk, (sent, pairs) in enumerate(stages.copies, count):
            back = jax.lax.ppermute(leaf[chunk], PIPE_AXIS, [(there, here) for here, there in pairs])
            mine = mine.at[sent].add(back)
        return mine

    return jax.tree.map(home, gradients)


def _traced_cut(
    planned: PlannedModel, cut: Cut, score: Scored, by_name: Weights, microbatch: Microbatch, key: Key
) -> PyTree:
    """What a model with its blocks cut scores, or the value that left it earlier."""
    batch, examples = microbatch
    module = planned.pure_model.module(filled(planned.pure_model.params, by_name), {})
    try:
        with blocks.cutting(cut):
            return score(module, batch, planned.context(key, examples))
    except Reached as reached:
        return reached.value


def _parts(traced: RunBlocks, enter: RunBlocks, through: RunBlocks, leave: RunBlocks) -> Parts:
    """The parts of a model that is traced with its blocks cut.

    Args:
        traced: from what runs in place of the blocks, and a part's arguments, to sums.
        enter: from what runs blocks, and the first block's input, to the message to the first stage.
        through: from the same, a message, and a part's arguments, to the message to the next stage.
        leave: from the same and the last message to the last block's output.
    """

    def before(*args: PyTree) -> PyTree:
        def between(run: RunBlocks, x: PyTree) -> PyTree:
            raise Reached(enter(run, x))

        return traced(between, *args)

    def inside(message: PyTree, *args: PyTree) -> PyTree:
        def between(run: RunBlocks, x: PyTree) -> PyTree:
            raise Reached(through(run, x, message, *args))

        return traced(between, *args)

    def behind(message: PyTree, *args: PyTree) -> PyTree:
        return traced(lambda run, x: leave(run, x, message), *args)

    return Parts(before, inside, behind)


@dataclasses.dataclass(frozen=True, eq=False)
class StackForm:
    """Stages that are rows of a stack: `lax.scan` runs a stage's rows.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
    """

    planned: PlannedModel
    stages: Stages

    def is_staged(self, name: str) -> bool:
        """Whether a parameter is read by one stage alone."""
        return self.planned.pure_model.stacked(name)

    def parts(self, score: Scored) -> Parts:
        """The model as what stands before its blocks, its blocks, and what stands behind them."""
        planned, plan = self.planned, self.planned.plan
        numbers = jnp.asarray(self.stages.numbers)
        gather = self._gathered if plan.zero == 3 or (plan.zero and plan.offload.weights == "host") else None

        def traced(
            between: Between, stacked: Weights, shared: Named, microbatch: Microbatch, key: Key, stage: Int[Array, ""]
        ) -> PyTree:
            cut = Cut(numbers[stage], self.stages.starts, -1 in self.stages.rows, between, gather)
            return _traced_cut(planned, cut, score, {**stacked, **shared}, microbatch, key)

        def through(run: RunBlocks, x: PyTree, message: PyTree, *args: PyTree) -> PyTree:
            return run(message)

        return _parts(traced, lambda run, x: x, through, lambda run, x, message: message)

    def _gathered(self, params: Params) -> Params:
        """A block's parameters, whole: ZeRO 3 gathers them when it runs, and again in the backward pass."""
        planned = self.planned
        names = [name.split("/") for name in planned.layout.placements if self.is_staged(name)]
        alike = next((n for n in range(min(map(len, names))) if len({name[n] for name in names}) > 1), None)
        parts = names[0][:alike] if alike is not None else names[0]
        start = len(parts) - parts[::-1].index("layers")
        specs = {"/".join(name[start:]): planned.read_spec("/".join(name)) for name in names}

        def whole(path: KeyPath, leaf: Array) -> Array:
            for dim, axes in enumerate(dim_axes(specs[path_name(path)])):
                if "fsdp" in axes:
                    # the first dim of a placement is the layers', which a block has no more
                    leaf = jax.lax.all_gather(leaf, "fsdp", axis=dim - 1, tiled=True)
            return leaf

        return jax.tree_util.tree_map_with_path(whole, params)

    def chunks(self, staged: Named) -> Named:
        """Rows of this rank as (chunks, depth, ...), and copies of other ranks' where two do the same stage."""
        depth = self.stages.depth
        return with_copies(self.stages, jax.tree.map(lambda leaf: leaf.reshape(-1, depth, *leaf.shape[1:]), staged))

    def home(self, gradients: Named) -> Named:
        """The inverse of `chunks` for gradients: those of copies are sent home and added."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), added_home(self.stages, gradients))


FLAT = "flat"
"""The one stacked parameter of a chain: each stage's weights in a row."""


@dataclasses.dataclass(frozen=True)
class StagePlace:
    """Where a parameter lies among those of its stage.

    Args:
        stage: that reads it.
        begin: its first element in the stage's array.
        shape: its own.
    """

    stage: int
    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.begin + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """Messages of unlike shapes in one form: a flat array for each type, as long as the longest message asks for.

    Args:
        shapes: what crosses each boundary: trees of `jax.ShapeDtypeStruct`.

    Example:
        >>> wire = MessageForm([(jnp.ones((2, 3)),), (jnp.ones(4), jnp.ones(1, int))])
        >>> packed = wire.pack((jnp.arange(4.0), jnp.array([7])))
        >>> {name: leaf.tolist() for name, leaf in packed.items()}
        {'float32': [0.0, 1.0, 2.0, 3.0, 0.0, 0.0], 'int32': [7]}
        >>> [leaf.tolist() for leaf in wire.unpack(packed, 1)]
        [[0.0, 1.0, 2.0, 3.0], [7]]
    """

    shapes: Sequence[PyTree]

    @property
    def lengths(self) -> dict[str, int]:
        """Elements of each type."""
        longest: dict[str, int] = {}
        for message in self.shapes:
            elements: collections.Counter[str] = collections.Counter()
            for leaf in jax.tree.leaves(message):
                elements[str(leaf.dtype)] += math.prod(leaf.shape)
            longest = {name: max(longest.get(name, 0), elements[name]) for name in {**longest, **elements}}
        return dict(sorted(longest.items()))

    def pack(self, tree: PyTree) -> dict[str, Array]:
        """A message in the form of all."""
        flat: dict[str, list[Array]] = {name: [] for name in self.lengths}
        for leaf in jax.tree.leaves(tree):
            flat[str(leaf.dtype)].append(leaf.reshape(-1))
        return {name: padded(flat[name], length, name) for name, length in self.lengths.items()}

    def unpack(self, packed: Mapping[str, Array], boundary: int) -> PyTree:
        """The message at a boundary: 0 enters the first stage."""
        at = dict.fromkeys(packed, 0)

        def leaf(shape: jax.ShapeDtypeStruct) -> Array:
            name, size = str(shape.dtype), math.prod(shape.shape)
            at[name] += size
            return packed[name][at[name] - size : at[name]].reshape(shape.shape)

        return jax.tree.map(leaf, self.shapes[boundary])


def padded(parts: Sequence[Array], length: int, dtype: DTypeLike) -> Array:
    """Flat arrays one behind the other, and zeros behind the last."""
    rest = length - sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros((rest,), dtype)])


@dataclasses.dataclass(frozen=True, eq=False)
class ChainForm:
    """Stages of unlike blocks: a `lax.switch` runs a stage's, on parameters in one flat array.

    Args:
        planned: the model under its plan.
        stages: the blocks of each stage, with their chain.
    """

    planned: PlannedModel
    stages: Stages

    @functools.cached_property
    def _prefix(self) -> str:
        assert self.stages.chain is not None
        return f"{self.stages.chain}/layers/"

    @functools.cached_property
    def places(self) -> dict[str, StagePlace]:
        """Where each parameter of a block lies among those of its stage."""
        starts, places, sizes = self.stages.starts, {}, [0] * len(self.stages.layers)
        for name, leaf in named_leaves(self.planned.pure_model.params).items():
            if self.is_staged(name):
                block = int(name.removeprefix(self._prefix).split("/")[0])
                stage = sum(start <= block for start in starts) - 1
                places[name] = StagePlace(stage, sizes[stage], leaf.shape)
                sizes[stage] = places[name].end
        return places

    def is_staged(self, name: str) -> bool:
        """As of `StackForm`."""
        return name.startswith(self._prefix)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _home_of(self, stage: int) -> tuple[int, int]:
        """The rank whose weights those of a stage are, and where among its own."""
        rank = self.stages.schedule.routes[0][stage]
        return rank, self.stages.homes[rank].index(stage)

    def chunks(self, staged: Named) -> Named:
        """The arrays (chunks, length) of this rank's stages, and of those that it has copies of."""
        dtype, rank = jnp.dtype(self.planned.plan.precision), jax.lax.axis_index(PIPE_AXIS)
        length = max(place.end for place in self.places.values())
        rows = [jnp.zeros((length,), dtype)] * len(self.stages.homes[0])
        for stage in range(len(self.stages.layers)):
            home, chunk = self._home_of(stage)
            names = [name for name, place in self.places.items() if place.stage == stage]
            parts = [staged[name].astype(dtype).reshape(-1) for name in names]
            rows[chunk] = jnp.where(rank == home, padded(parts, length, dtype), rows[chunk])
        return with_copies(self.stages, {FLAT: jnp.stack(rows)})

    def home(self, gradients: Named) -> Named:
        """The gradient of each parameter on its stage's rank, zeros elsewhere."""
        rows, rank = added_home(self.stages, gradients)[FLAT], jax.lax.axis_index(PIPE_AXIS)
        by_name = {}
        for name, place in self.places.items():
            home, chunk = self._home_of(place.stage)
            mine = rows[chunk, place.begin : place.end]
            by_name[name] = jnp.where(rank == home, mine, 0.0).reshape(place.shape)
        return by_name

    def _block_params(self, flat: Array, stage: int) -> list[Params]:
        """The parameters of a stage's blocks, as each block has them."""
        layers: Params = self.planned.pure_model.params
        for part in self._prefix.strip("/").split("/"):
            layers = layers[part]
        first, count = self.stages.starts[stage], self.stages.layers[stage]

        def leaf(path: KeyPath, _: jax.ShapeDtypeStruct) -> Array:
            place = self.places[f"{self._prefix}{path_name(path)}"]
            return flat[place.begin : place.end].reshape(place.shape)

        keys = {int(key): key for key in layers}
        mine = {keys[block]: layers[keys[block]] for block in range(first, first + count) if block in keys}
        params = jax.tree_util.tree_map_with_path(leaf, mine)
        return [params.get(keys.get(block), {}) for block in range(first, first + count)]

    # -- the model in parts --------------------------------------------------------------------------------------------

    def parts(self, score: Scored) -> Parts:
        """As of `StackForm`; what crosses a boundary is packed."""
        ends = [0, *itertools.accumulate(self.stages.layers)]

        def traced(
            between: Between, stacked: Named, shared: Named, microbatch: Microbatch, key: Key, stage: Int[Array, ""]
        ) -> PyTree:
            dtype = self.planned.plan.precision
            # the blocks get theirs from the stage's array, and these are never read
            absent = {name: jnp.zeros(place.shape, dtype) for name, place in self.places.items()}
            cut = Cut(jnp.zeros((0,), jnp.int32), self.stages.starts, False, between)
            return _traced_cut(self.planned, cut, score, {**absent, **shared}, microbatch, key)

        def form_of(run: RunBlocks, x: PyTree) -> MessageForm:
            shapes = [jax.eval_shape(lambda x: x, x)]
            for start, stop in itertools.pairwise(ends):
                shapes.append(jax.eval_shape(run(start, stop), shapes[-1]))
            return MessageForm(shapes)

        def through(run: RunBlocks, x: PyTree, packed: Named, stacked: Named, *args: PyTree) -> Named:
            form, stage = form_of(run, x), args[-1]

            def branch(number: int) -> Callable[[Array, Named], Named]:
                def compute(flat: Array, packed: Named) -> Named:
                    blocks_of = run(ends[number], ends[number + 1], self._block_params(flat, number))
                    return form.pack(blocks_of(form.unpack(packed, number)))

                return compute

            branches = [branch(number) for number in range(len(self.stages.layers))]
            return jax.lax.switch(stage, branches, stacked[FLAT], packed)

        return _parts(
            traced,
            lambda run, x: form_of(run, x).pack(x),
            through,
            lambda run, x, packed: form_of(run, x).unpack(packed, len(self.stages.layers)),
        )


StageForm: TypeAlias = StackForm | ChainForm
"""How stages read the parameters of their blocks."""
