"""The two forms in which a pipeline's stages read a model's blocks: rows of a stack, or a chain of unlike blocks.

A model is one function of its module, and need not be written in parts. To divide it, it is traced with its blocks
replaced (`blocks.viewing_stage`): a part before the blocks, the blocks of one stage inside, a part behind them, which
ends with the loss.

A rank is a device of the pipe axis. The stages of a rank are its chunks; a message is what one stage sends to the next.
A few schedules run a stage on two ranks: one is its home, the other has a copy of its weights.

In a stack all blocks are alike, and the blocks of a stage are those rows of a stacked parameter that lie on its device.
In a `layers.Chain` blocks differ, but one program serves all devices: a `lax.switch` on the stage's number runs the
stage's blocks. The parameters of each stage are one flat array, padded to the length of the longest, and a device
holds only those of its own stages. Messages are flattened too, one array for each dtype, padded to the length of the
longest. Between steps the parameters of a chain are split over the pipe axis wherever a dim divides. Every device
gathers each parameter once before the loop over ticks, and scatters its gradient once after the loop.

Not supported for chains, and refused (`recipe/combinations.py`): plans that split the flat array further, that keep
residuals in slots, whose memory rule depends on all blocks at once, and asynchronous schedules.
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
from jaxscale.blocks import Context, StageRunner, StageView
from jaxscale.offload.weights import Streamed
from jaxscale.sharding.partition import dim_axes
from jaxscale.state.layout import PIPE_AXIS
from jaxscale.state.stages import Stages
from jaxscale.step.planned_model import PlannedModel
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Int, Key, Params, PyTree

Scored: TypeAlias = Callable[[nnx.Module, Batch, Context], PyTree]
"""A score: a function from the module, a microbatch and the settings of the pass to sums, such as those of the loss."""
Named: TypeAlias = dict[str, Array]
"""Arrays by the name of their parameter."""
Weights: TypeAlias = Mapping[str, Array | Streamed]
"""Arrays by the name of their parameter, some of which may come from the host."""
Microbatch: TypeAlias = tuple[Batch, Array]
"""Rows of a batch, and the index of each in the global batch."""
RunBlocks: TypeAlias = Callable[..., PyTree]
"""A function of traced arrays: it runs the blocks that a `blocks.StageRunner` gets, or one part of a model."""


class Reached(Exception):
    """Ends the trace of a model early, and carries the traced value that the trace was for."""

    def __init__(self, value: PyTree) -> None:
        super().__init__("a traced value, on its way out of the model")
        self.value = value


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model in three functions.

    Each takes (stacked, shared, microbatch, key, stage); `inside` and `behind` take a message `x` before them.

    Args:
        before: returns the message to the first stage.
        inside: runs the blocks of the stage on `x`, and returns the message to the next stage.
        behind: returns sums, from the message of the last stage.
    """

    before: Callable[..., PyTree]
    inside: Callable[..., PyTree]
    behind: Callable[..., PyTree]


def with_copies(stages: Stages, chunks: Named) -> Named:
    """Receive the copies of other ranks' chunks that the schedule runs here; return them behind this rank's chunks."""
    for sent, pairs in stages.copies:
        copy = jax.tree.map(lambda leaf, s=sent, p=pairs: jax.lax.ppermute(leaf[s], PIPE_AXIS, p)[None], chunks)
        chunks = jax.tree.map(lambda own, copied: jnp.concatenate([own, copied]), chunks, copy)
    return chunks


def added_home(stages: Stages, gradients: Named) -> Named:
    """Receive the gradients of copies on other ranks, and return them added to those of this rank's own chunks."""
    count = len(stages.homes[0])

    def summed(leaf: Array) -> Array:
        own_rows = leaf[:count]
        for chunk, (sent, pairs) in enumerate(stages.copies, count):
            of_copy = jax.lax.ppermute(leaf[chunk], PIPE_AXIS, [(copy, home) for home, copy in pairs])
            own_rows = own_rows.at[sent].add(of_copy)
        return own_rows

    return jax.tree.map(summed, gradients)


def _traced_cut(
    planned: PlannedModel, cut: StageView, score: Scored, by_name: Weights, microbatch: Microbatch, key: Key
) -> PyTree:
    """Trace a model with its blocks replaced, and return its score, or the value with which the trace ended early.

    Args:
        planned: the model under its plan.
        cut: the function that runs in place of the model's blocks, and what it needs.
        score: function from the module, a microbatch and the settings of the pass to sums.
        by_name: all parameters, by name.
        microbatch: rows of a batch, and their indices.
        key: key of the step.
    """
    batch, examples = microbatch
    module = planned.pure_model.module(filled(planned.pure_model.params, by_name), {})
    try:
        with blocks.viewing_stage(cut):
            return score(module, batch, planned.context(key, examples))
    except Reached as reached:
        return reached.value


def _parts(traced: RunBlocks, enter: RunBlocks, through: RunBlocks, leave: RunBlocks) -> Parts:
    """The parts of a model that is traced with its blocks cut.

    In the signatures below, `run` is a function that runs blocks, `x` the first block's input, and `args` the arguments
    of a part.

    Args:
        traced: (between, *args) -> the model's sums, with `between` in place of the blocks.
        enter: (run, x) -> the message to the first stage.
        through: (run, x, message, *args) -> the message to the next stage.
        leave: (run, x, message) -> the last block's output, from the message of the last stage.
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
        """Whether a parameter belongs to one stage; if not, it is shared."""
        return self.planned.pure_model.stacked(name)

    def parts(self, score: Scored) -> Parts:
        """The model in three parts: before its blocks, the blocks of a stage, and behind its blocks."""
        planned, plan = self.planned, self.planned.plan
        numbers = jnp.asarray(self.stages.numbers)
        gather = self._gathered if plan.zero == 3 or (plan.zero and plan.offload.weights == "host") else None

        def traced(
            between: StageRunner,
            stacked: Weights,
            shared: Named,
            microbatch: Microbatch,
            key: Key,
            stage: Int[Array, ""],
        ) -> PyTree:
            cut = StageView(numbers[stage], self.stages.starts, -1 in self.stages.rows, between, gather)
            return _traced_cut(planned, cut, score, {**stacked, **shared}, microbatch, key)

        def through(run: RunBlocks, x: PyTree, message: PyTree, *args: PyTree) -> PyTree:
            return run(message)

        return _parts(traced, lambda run, x: x, through, lambda run, x, message: message)

    def _gathered(self, params: Params) -> Params:
        """Gather a block's parameters from their shards; under ZeRO 3 in both the forward and the backward pass."""
        planned = self.planned
        paths = [name.split("/") for name in planned.layout.placements if self.is_staged(name)]
        common_length = next((n for n in range(min(map(len, paths))) if len({path[n] for path in paths}) > 1), None)
        prefix = paths[0][:common_length] if common_length is not None else paths[0]
        start = len(prefix) - prefix[::-1].index("layers")
        specs = {"/".join(path[start:]): planned.read_spec("/".join(path)) for path in paths}

        def gather(path: KeyPath, leaf: Array) -> Array:
            for dim, axes in enumerate(dim_axes(specs[path_name(path)])):
                if "fsdp" in axes:
                    # the placement has a first dim for the layers, which one block does not have
                    leaf = jax.lax.all_gather(leaf, "fsdp", axis=dim - 1, tiled=True)
            return leaf

        return jax.tree_util.tree_map_with_path(gather, params)

    def chunks(self, staged: Named) -> Named:
        """Rows of this rank's stages as (chunks, depth, ...), and behind them its copies of other ranks' stages."""
        depth = self.stages.depth
        return with_copies(self.stages, jax.tree.map(lambda leaf: leaf.reshape(-1, depth, *leaf.shape[1:]), staged))

    def home(self, gradients: Named) -> Named:
        """The inverse of `chunks` for gradients; gradients of copies are sent to the stage's home and added there."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), added_home(self.stages, gradients))


FLAT = "flat"
"""Name of the one stacked parameter of a chain; its row for a stage has all weights of the stage, one after another."""


@dataclasses.dataclass(frozen=True)
class StagePlace:
    """Where a parameter of a chain lies in the flat array of its stage.

    Args:
        stage: number of the stage that reads the parameter.
        begin: index of its first element in the stage's array.
        shape: shape of the parameter.
    """

    stage: int
    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Index one past its last element."""
        return self.begin + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """Packs messages of different shapes into one form: a flat array for each dtype, padded for the longest message.

    Args:
        shapes: the message at each boundary, as a tree of shapes; boundary 0 is before the first stage.

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
        """Length of the flat array of each dtype."""
        longest: dict[str, int] = {}
        for message in self.shapes:
            elements: collections.Counter[str] = collections.Counter()
            for leaf in jax.tree.leaves(message):
                elements[str(leaf.dtype)] += math.prod(leaf.shape)
            longest = {name: max(longest.get(name, 0), elements[name]) for name in {**longest, **elements}}
        return dict(sorted(longest.items()))

    def pack(self, message: PyTree) -> dict[str, Array]:
        """A message as flat arrays of `lengths`, by dtype."""
        flat: dict[str, list[Array]] = {dtype: [] for dtype in self.lengths}
        for leaf in jax.tree.leaves(message):
            flat[str(leaf.dtype)].append(leaf.reshape(-1))
        return {dtype: padded(flat[dtype], length, dtype) for dtype, length in self.lengths.items()}

    def unpack(self, packed: Mapping[str, Array], boundary: int) -> PyTree:
        """The message at a boundary, from its flat arrays; boundary 0 is before the first stage."""
        ends = dict.fromkeys(packed, 0)  # end of the leaves read so far in each dtype's array

        def leaf(shape: jax.ShapeDtypeStruct) -> Array:
            dtype, size = str(shape.dtype), math.prod(shape.shape)
            ends[dtype] += size
            return packed[dtype][ends[dtype] - size : ends[dtype]].reshape(shape.shape)

        return jax.tree.map(leaf, self.shapes[boundary])


def padded(arrays: Sequence[Array], length: int, dtype: DTypeLike) -> Array:
    """Flat arrays, concatenated and padded with zeros to a length."""
    padding = length - sum(array.size for array in arrays)
    return jnp.concatenate([*arrays, jnp.zeros((padding,), dtype)])


@dataclasses.dataclass(frozen=True, eq=False)
class ChainForm:
    """Stages of unlike blocks: a `lax.switch` runs the blocks of a stage, with parameters in one flat array.

    Args:
        planned: the model under its plan.
        stages: the blocks of each stage, with their chain.
    """

    planned: PlannedModel
    stages: Stages

    @functools.cached_property
    def _prefix(self) -> str:
        """Prefix of the names of the chain's parameters."""
        assert self.stages.chain is not None
        return f"{self.stages.chain}/layers/"

    @functools.cached_property
    def places(self) -> dict[str, StagePlace]:
        """Where each parameter of a block lies in the flat array of its stage, by the parameter's name."""
        starts, places, lengths = self.stages.starts, {}, [0] * len(self.stages.layers)
        for name, leaf in named_leaves(self.planned.pure_model.params).items():
            if self.is_staged(name):
                block = int(name.removeprefix(self._prefix).split("/")[0])
                stage = sum(start <= block for start in starts) - 1
                places[name] = StagePlace(stage, lengths[stage], leaf.shape)
                lengths[stage] = places[name].end
        return places

    def is_staged(self, name: str) -> bool:
        """As in `StackForm`."""
        return name.startswith(self._prefix)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _home_of(self, stage: int) -> tuple[int, int]:
        """The home rank of a stage, and the index of the stage among its chunks."""
        rank = self.stages.schedule.routes[0][stage]
        return rank, self.stages.homes[rank].index(stage)

    def chunks(self, staged: Named) -> Named:
        """The flat arrays (chunks, length) of this rank's stages, and behind them its copies of other ranks' stages."""
        dtype, rank = jnp.dtype(self.planned.plan.precision), jax.lax.axis_index(PIPE_AXIS)
        length = max(place.end for place in self.places.values())
        rows = [jnp.zeros((length,), dtype)] * len(self.stages.homes[0])
        for stage in range(len(self.stages.layers)):
            home, chunk = self._home_of(stage)
            names = [name for name, place in self.places.items() if place.stage == stage]
            flat = [staged[name].astype(dtype).reshape(-1) for name in names]
            rows[chunk] = jnp.where(rank == home, padded(flat, length, dtype), rows[chunk])
        return with_copies(self.stages, {FLAT: jnp.stack(rows)})

    def home(self, gradients: Named) -> Named:
        """The gradient of each parameter on the home rank of its stage, and zeros on the other ranks."""
        rows, rank = added_home(self.stages, gradients)[FLAT], jax.lax.axis_index(PIPE_AXIS)
        by_name = {}
        for name, place in self.places.items():
            home, chunk = self._home_of(place.stage)
            gradient = rows[chunk, place.begin : place.end]
            by_name[name] = jnp.where(rank == home, gradient, 0.0).reshape(place.shape)
        return by_name

    def _block_params(self, flat: Array, stage: int) -> list[Params]:
        """The parameters of each block of a stage, from the stage's flat array."""
        layers: Params = self.planned.pure_model.params
        for key in self._prefix.strip("/").split("/"):
            layers = layers[key]
        first, count = self.stages.starts[stage], self.stages.layers[stage]

        def leaf(path: KeyPath, _: jax.ShapeDtypeStruct) -> Array:
            place = self.places[f"{self._prefix}{path_name(path)}"]
            return flat[place.begin : place.end].reshape(place.shape)

        keys = {int(key): key for key in layers}
        stage_layers = {keys[block]: layers[keys[block]] for block in range(first, first + count) if block in keys}
        params = jax.tree_util.tree_map_with_path(leaf, stage_layers)
        return [params.get(keys.get(block), {}) for block in range(first, first + count)]

    # -- the model in parts --------------------------------------------------------------------------------------------

    def parts(self, score: Scored) -> Parts:
        """As in `StackForm`; messages are packed."""
        ends = [0, *itertools.accumulate(self.stages.layers)]

        def traced(
            between: StageRunner, stacked: Named, shared: Named, microbatch: Microbatch, key: Key, stage: Int[Array, ""]
        ) -> PyTree:
            dtype = self.planned.plan.precision
            # these are never read, because blocks get their parameters from the stage's flat array
            unread = {name: jnp.zeros(place.shape, dtype) for name, place in self.places.items()}
            cut = StageView(jnp.zeros((0,), jnp.int32), self.stages.starts, False, between)
            return _traced_cut(self.planned, cut, score, {**unread, **shared}, microbatch, key)

        def form_of(run: RunBlocks, x: PyTree) -> MessageForm:
            shapes = [jax.eval_shape(lambda x: x, x)]
            for start, stop in itertools.pairwise(ends):
                shapes.append(jax.eval_shape(run(start, stop), shapes[-1]))
            return MessageForm(shapes)

        def through(run: RunBlocks, x: PyTree, packed: Named, stacked: Named, *args: PyTree) -> Named:
            form, stage = form_of(run, x), args[-1]

            def branch(number: int) -> Callable[[Array, Named], Named]:
                def compute(flat: Array, packed: Named) -> Named:
                    run_stage = run(ends[number], ends[number + 1], self._block_params(flat, number))
                    return form.pack(run_stage(form.unpack(packed, number)))

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
