"""The two forms in which a pipeline's stages read a model's blocks: rows of a stack, or a chain of unlike blocks.

A model is written as one function of its module. A pipeline divides the model by tracing this function with other
functions in place of the blocks (`blocks.viewing_stage`). The result is three parts: one before the blocks, one with
the blocks of a single stage, and one after the blocks, which ends with the loss.

A rank is a device of the pipe axis. The stages of a rank are its chunks, and the arrays that one stage sends to the
next are a message. A few schedules run a stage on two ranks: the home of the stage, and a rank that has a copy of the
stage's weights.

In a stack, all blocks are alike, and the blocks of a stage are the rows of the stacked parameters that lie on its rank.
In a `layers.Chain`, blocks differ, and one program serves all ranks: a `lax.switch` on the index of the stage runs the
blocks of the stage. The parameters of each stage are one flat array, padded to the length of the longest, and a rank
has only the arrays of its own stages. Messages are flattened too, into one array for each dtype, padded to the length
of the longest. Between steps, the parameters of a chain are split over the pipe axis where a dim can be split evenly.
Every rank gathers each parameter once before the loop over ticks, and scatters its gradient once after the loop.

For chains, `recipe/combinations.py` refuses asynchronous schedules, and plans that split the flat array further, that
keep residuals in slots, or whose memory rule depends on all blocks at once.
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

Score: TypeAlias = Callable[[nnx.Module, Batch, Context], PyTree]
"""A function from the module, a microbatch and the settings of the pass to sums, such as those of the loss."""
Arrays: TypeAlias = dict[str, Array]
"""Arrays by the name of their parameter, or in a packed message by the name of their dtype."""
WeightsByName: TypeAlias = Mapping[str, Array | Streamed]
"""Weights by the name of their parameter; a weight on the host is a `Streamed`."""
Microbatch: TypeAlias = tuple[Batch, Array]
"""Rows of a batch, and the index of each row in the global batch."""
TracedFn: TypeAlias = Callable[..., PyTree]
"""A function of traced arrays: a part of a model, or the `run_blocks` that a `blocks.StageRunner` receives."""


class TraceEnd(Exception):
    """Ends the trace of a model early.

    Args:
        value: the traced value for which the model was traced.
    """

    def __init__(self, value: PyTree) -> None:
        super().__init__("a trace ended early, and nothing caught its value")
        self.value = value


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A model in three functions.

    Each function takes (stage parameters, shared parameters, microbatch, key, stage index). For `inside` and `after`, a
    message comes before these arguments.

    Args:
        before: returns the message to the first stage.
        inside: runs the blocks of the stage on the message, and returns the message to the next stage.
        after: returns sums, from the message of the last stage.
    """

    before: TracedFn
    inside: TracedFn
    after: TracedFn


def append_copies(stages: Stages, chunks: Arrays) -> Arrays:
    """Return this rank's chunks, and after them the copies of other ranks' chunks that the schedule runs here."""
    for home_chunk, rank_pairs in stages.copy_transfers:
        chunk_copy = jax.tree.map(
            lambda leaf, chunk=home_chunk, pairs=rank_pairs: jax.lax.ppermute(leaf[chunk], PIPE_AXIS, pairs)[None],
            chunks,
        )
        chunks = jax.tree.map(lambda leaf, leaf_copy: jnp.concatenate([leaf, leaf_copy]), chunks, chunk_copy)
    return chunks


def sum_at_home(stages: Stages, gradients: Arrays) -> Arrays:
    """Return the gradients of this rank's chunks, with the gradients of the chunks' copies on other ranks added."""
    own_chunk_count = len(stages.home_stages[0])

    def sum_leaf(leaf: Array) -> Array:
        own_gradients = leaf[:own_chunk_count]
        for copy_chunk, (home_chunk, rank_pairs) in enumerate(stages.copy_transfers, own_chunk_count):
            copy_to_home = [(copy_rank, home_rank) for home_rank, copy_rank in rank_pairs]
            copy_gradient = jax.lax.ppermute(leaf[copy_chunk], PIPE_AXIS, copy_to_home)
            own_gradients = own_gradients.at[home_chunk].add(copy_gradient)
        return own_gradients

    return jax.tree.map(sum_leaf, gradients)


def _trace_view(
    planned: PlannedModel, view: StageView, score: Score, params: WeightsByName, microbatch: Microbatch, key: Key
) -> PyTree:
    """Trace a model with its blocks replaced, and return its score, or the value with which the trace ended early.

    Args:
        planned: the model under its plan.
        view: the function that replaces the model's blocks, and the values that it needs.
        score: function from the module, a microbatch and the settings of the pass to sums.
        params: all parameters, by name.
        microbatch: rows of a batch, and their indices.
        key: key of the step.
    """
    batch, examples = microbatch
    pure_model = planned.pure_model
    module = pure_model.module(filled(pure_model.abstract_params, params), pure_model.random_state())
    try:
        with blocks.viewing_stage(view):
            return score(module, batch, planned.context(key, examples))
    except TraceEnd as trace_end:
        return trace_end.value


def _model_parts(trace: TracedFn, enter: TracedFn, run_stage: TracedFn, leave: TracedFn) -> ModelParts:
    """Return the parts of a model, from traces in which another function replaces its blocks.

    In the signatures below, `run_blocks` is the first argument of a `blocks.StageRunner`, `first_input` is the input of
    the first block, and `args` are the arguments of a part of the model.

    Args:
        trace: function of (between, *args) that returns the model's sums, with `between` in place of the blocks.
        enter: function of (run_blocks, first_input) that returns the message to the first stage.
        run_stage: function of (run_blocks, first_input, message, *args) that returns the message to the next stage.
        leave: function of (run_blocks, first_input, message) that returns the last block's output, from the message of
            the last stage.
    """

    def before(*args: PyTree) -> PyTree:
        def between(run_blocks: TracedFn, first_input: PyTree) -> PyTree:
            raise TraceEnd(enter(run_blocks, first_input))

        return trace(between, *args)

    def inside(message: PyTree, *args: PyTree) -> PyTree:
        def between(run_blocks: TracedFn, first_input: PyTree) -> PyTree:
            raise TraceEnd(run_stage(run_blocks, first_input, message, *args))

        return trace(between, *args)

    def after(message: PyTree, *args: PyTree) -> PyTree:
        return trace(lambda run_blocks, first_input: leave(run_blocks, first_input, message), *args)

    return ModelParts(before, inside, after)


@dataclasses.dataclass(frozen=True, eq=False)
class StackForm:
    """Stages that are rows of a stack: a `lax.scan` runs the rows of a stage.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
    """

    planned: PlannedModel
    stages: Stages

    def is_staged(self, name: str) -> bool:
        """Return whether a parameter belongs to one stage; if not, all stages share it."""
        return self.planned.pure_model.is_stacked(name)

    def model_parts(self, score: Score) -> ModelParts:
        """Return the model in three parts: before its blocks, with the blocks of one stage, and after its blocks."""
        planned, plan = self.planned, self.planned.plan
        layer_of_stage_row = jnp.asarray(self.stages.layer_of_stage_row)
        are_weights_gathered = plan.zero == 3 or (plan.zero and plan.offload.weights == "host")
        gather_block = self._gather_block if are_weights_gathered else None

        def trace(
            between: StageRunner,
            stage_params: WeightsByName,
            shared_params: Arrays,
            microbatch: Microbatch,
            key: Key,
            stage: Int[Array, ""],
        ) -> PyTree:
            first_layers, has_padding = self.stages.first_layers, -1 in self.stages.layer_of_row
            view = StageView(layer_of_stage_row[stage], first_layers, has_padding, between, gather_block)
            return _trace_view(planned, view, score, {**stage_params, **shared_params}, microbatch, key)

        def run_stage(run_blocks: TracedFn, first_input: PyTree, message: PyTree, *args: PyTree) -> PyTree:
            return run_blocks(message)

        return _model_parts(
            trace,
            lambda run_blocks, first_input: first_input,
            run_stage,
            lambda run_blocks, first_input, message: message,
        )

    def _gather_block(self, params: Params) -> Params:
        """Gather the parameters of one block from their shards, and return them.

        Args:
            params: the parameters of a block. Names within a block of a `Stack` start after the name of the stack, and
                those of a block that a foreign module scans over are the names in the module.
        """
        planned = self.planned
        words_of_names = [name.split("/") for name in planned.layout.placements if self.is_staged(name)]
        # the words with which all names begin; names within a block start after the last "layers" among these words
        min_word_count = min(map(len, words_of_names))
        common_length = next(
            (n for n in range(min_word_count) if len({words[n] for words in words_of_names}) > 1), None
        )
        common_words = words_of_names[0][:common_length]
        start_indices = {0, len(common_words) - common_words[::-1].index("layers") if "layers" in common_words else 0}
        spec_by_name = {
            "/".join(words[start:]): planned.read_spec("/".join(words))
            for words in words_of_names
            for start in start_indices
        }

        def gather(path: KeyPath, leaf: Array) -> Array:
            for dim, axes in enumerate(dim_axes(spec_by_name[path_name(path)])):
                if "fsdp" in axes:
                    # the placement has a first dim for the layers, which one block does not have
                    leaf = jax.lax.all_gather(leaf, "fsdp", axis=dim - 1, tiled=True)
            return leaf

        return jax.tree_util.tree_map_with_path(gather, params)

    def chunks(self, stage_params: Arrays) -> Arrays:
        """Return the rows of this rank's stages, and then of the copies that it runs, as (chunks, depth, ...)."""
        depth = self.stages.depth
        own_chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, depth, *leaf.shape[1:]), stage_params)
        return append_copies(self.stages, own_chunks)

    def gradients_at_home(self, chunk_gradients: Arrays) -> Arrays:
        """Return the gradient rows of this rank's stages, from the gradients of the chunks on all ranks."""
        own_gradients = sum_at_home(self.stages, chunk_gradients)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), own_gradients)


FLAT = "flat"
"""Name of the one stacked parameter of a chain; its row for a stage has all weights of the stage, one after another."""


@dataclasses.dataclass(frozen=True)
class FlatSlice:
    """The slice of the flat array of a stage that holds one parameter of a chain.

    Args:
        stage: index of the stage that reads the parameter.
        begin: index of the parameter's first element in the flat array.
        shape: shape of the parameter.
    """

    stage: int
    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Index after the parameter's last element in the flat array."""
        return self.begin + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """One format for messages of different shapes: a flat array for each dtype, padded to the longest message.

    Args:
        abstract_messages: the abstract message at each boundary between stages; boundary 0 is before the first stage.

    Example:
        >>> form = MessageForm([(jnp.ones((2, 3)),), (jnp.ones(4), jnp.ones(1, int))])
        >>> packed = form.pack((jnp.arange(4.0), jnp.array([7])))
        >>> {name: leaf.tolist() for name, leaf in packed.items()}
        {'float32': [0.0, 1.0, 2.0, 3.0, 0.0, 0.0], 'int32': [7]}
        >>> [leaf.tolist() for leaf in form.unpack(packed, 1)]
        [[0.0, 1.0, 2.0, 3.0], [7]]
    """

    abstract_messages: Sequence[PyTree]

    @property
    def length_by_dtype(self) -> dict[str, int]:
        """Length of the flat array of each dtype, by the name of the dtype."""
        length_by_dtype: dict[str, int] = {}
        for abstract_message in self.abstract_messages:
            element_counts: collections.Counter[str] = collections.Counter()
            for leaf in jax.tree.leaves(abstract_message):
                element_counts[str(leaf.dtype)] += math.prod(leaf.shape)
            merged_counts = {**length_by_dtype, **element_counts}
            length_by_dtype = {
                dtype: max(length_by_dtype.get(dtype, 0), element_counts[dtype]) for dtype in merged_counts
            }
        return dict(sorted(length_by_dtype.items()))

    def pack(self, message: PyTree) -> Arrays:
        """Return a message as flat arrays, by the name of the dtype, padded to the lengths of `length_by_dtype`."""
        flat_leaves_by_dtype: dict[str, list[Array]] = {dtype: [] for dtype in self.length_by_dtype}
        for leaf in jax.tree.leaves(message):
            flat_leaves_by_dtype[str(leaf.dtype)].append(leaf.reshape(-1))
        return {
            dtype: concatenate_padded(flat_leaves_by_dtype[dtype], length, dtype)
            for dtype, length in self.length_by_dtype.items()
        }

    def unpack(self, flat_arrays: Mapping[str, Array], boundary: int) -> PyTree:
        """Return the message at a boundary, from its flat arrays; boundary 0 is before the first stage."""
        end_by_dtype = dict.fromkeys(flat_arrays, 0)  # end of the leaves that have been read from each flat array

        def unpack_leaf(leaf: jax.ShapeDtypeStruct) -> Array:
            dtype, element_count = str(leaf.dtype), math.prod(leaf.shape)
            end_by_dtype[dtype] += element_count
            return flat_arrays[dtype][end_by_dtype[dtype] - element_count : end_by_dtype[dtype]].reshape(leaf.shape)

        return jax.tree.map(unpack_leaf, self.abstract_messages[boundary])


def concatenate_padded(arrays: Sequence[Array], length: int, dtype: DTypeLike) -> Array:
    """Return flat arrays, concatenated and padded with zeros to a length."""
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
    def flat_slices(self) -> dict[str, FlatSlice]:
        """For each parameter of a block, by name, the slice of the stage's flat array that holds the parameter."""
        flat_slices, stage_lengths = {}, [0] * len(self.stages.layer_counts)
        for name, leaf in named_leaves(self.planned.pure_model.abstract_params).items():
            block_index = self._block_index_of(name)
            if block_index is not None:
                stage = sum(first_layer <= block_index for first_layer in self.stages.first_layers) - 1
                flat_slices[name] = FlatSlice(stage, stage_lengths[stage], leaf.shape)
                stage_lengths[stage] = flat_slices[name].end
        return flat_slices

    def _block_index_of(self, name: str) -> int | None:
        """Return the index of the block that a parameter belongs to; `None` for a parameter outside of the blocks."""
        indices_and_paths = enumerate(self.stages.chain)
        return next((block_index for block_index, path in indices_and_paths if name.startswith(f"{path}/")), None)

    def is_staged(self, name: str) -> bool:
        """Return whether a parameter belongs to one stage; if not, all stages share it."""
        return self._block_index_of(name) is not None

    # -- weights -------------------------------------------------------------------------------------------------------

    def _home_rank_and_chunk(self, stage: int) -> tuple[int, int]:
        """Return the home rank of a stage, and the index of the stage among the chunks of that rank."""
        home_rank = self.stages.schedule.routes[0][stage]
        return home_rank, self.stages.home_stages[home_rank].index(stage)

    def chunks(self, stage_params: Arrays) -> Arrays:
        """Return this rank's stages as flat arrays (chunks, length), and after them the copies that this rank runs."""
        dtype, rank = jnp.dtype(self.planned.plan.precision), jax.lax.axis_index(PIPE_AXIS)
        length = max(flat_slice.end for flat_slice in self.flat_slices.values())
        own_chunks = [jnp.zeros((length,), dtype)] * len(self.stages.home_stages[0])
        for stage in range(len(self.stages.layer_counts)):
            home_rank, chunk = self._home_rank_and_chunk(stage)
            names = [name for name, flat_slice in self.flat_slices.items() if flat_slice.stage == stage]
            flat_params = [stage_params[name].astype(dtype).reshape(-1) for name in names]
            is_home = rank == home_rank
            own_chunks[chunk] = jnp.where(is_home, concatenate_padded(flat_params, length, dtype), own_chunks[chunk])
        return append_copies(self.stages, {FLAT: jnp.stack(own_chunks)})

    def gradients_at_home(self, chunk_gradients: Arrays) -> Arrays:
        """Return the gradient of each parameter on the home rank of its stage, and zeros on the other ranks."""
        own_gradients = sum_at_home(self.stages, chunk_gradients)[FLAT]
        rank = jax.lax.axis_index(PIPE_AXIS)
        gradient_by_name = {}
        for name, flat_slice in self.flat_slices.items():
            home_rank, chunk = self._home_rank_and_chunk(flat_slice.stage)
            gradient = own_gradients[chunk, flat_slice.begin : flat_slice.end]
            gradient_by_name[name] = jnp.where(rank == home_rank, gradient, 0.0).reshape(flat_slice.shape)
        return gradient_by_name

    def _block_params(self, flat_array: Array, stage: int) -> list[Params]:
        """Return a list with the parameters of each block of a stage, from the flat array of the stage."""
        first_block = self.stages.first_layers[stage]
        block_paths = self.stages.chain[first_block : first_block + self.stages.layer_counts[stage]]

        def read_params(block_path: str) -> Params:
            """Return the parameters of the block at a path; {} for a block without parameters."""

            def read_param(path: KeyPath, _: jax.ShapeDtypeStruct) -> Array:
                flat_slice = self.flat_slices[f"{block_path}/{path_name(path)}"]
                return flat_array[flat_slice.begin : flat_slice.end].reshape(flat_slice.shape)

            abstract_subtree: Params = self.planned.pure_model.abstract_params
            for word in block_path.split("/"):
                abstract_subtree = next((entry for key, entry in abstract_subtree.items() if str(key) == word), {})
            return jax.tree_util.tree_map_with_path(read_param, abstract_subtree)

        return [read_params(block_path) for block_path in block_paths]

    # -- the model in parts --------------------------------------------------------------------------------------------

    def model_parts(self, score: Score) -> ModelParts:
        """Return the model in three parts: before its blocks, with the blocks of one stage, and after its blocks."""
        stage_count = len(self.stages.layer_counts)
        boundaries = [
            0,
            *itertools.accumulate(self.stages.layer_counts),
        ]  # stage i has the blocks from [i] until [i + 1]

        def trace(
            between: StageRunner,
            stage_params: Arrays,
            shared_params: Arrays,
            microbatch: Microbatch,
            key: Key,
            stage: Int[Array, ""],
        ) -> PyTree:
            dtype = self.planned.plan.precision
            # nothing reads these zeros, because blocks get their parameters from the stage's flat array
            zeros = {name: jnp.zeros(flat_slice.shape, dtype) for name, flat_slice in self.flat_slices.items()}
            view = StageView(jnp.zeros((0,), jnp.int32), self.stages.first_layers, False, between)
            return _trace_view(self.planned, view, score, {**zeros, **shared_params}, microbatch, key)

        def message_form(blocks_runner: TracedFn, first_input: PyTree) -> MessageForm:
            """Return the format of all messages, given the first block's input and a runner of blocks."""
            abstract_messages = [jax.eval_shape(lambda x: x, first_input)]
            for start, stop in itertools.pairwise(boundaries):
                abstract_messages.append(jax.eval_shape(blocks_runner(start, stop), abstract_messages[-1]))
            return MessageForm(abstract_messages)

        def run_stage(
            blocks_runner: TracedFn, first_input: PyTree, packed_message: Arrays, stage_params: Arrays, *args: PyTree
        ) -> Arrays:
            """Run the stage whose index is the last of `args` on a packed message; return the next packed message."""
            form, traced_stage = message_form(blocks_runner, first_input), args[-1]

            def branch(stage: int) -> Callable[[Array, Arrays], Arrays]:
                """Return the function that runs one stage, from its flat array and the packed message."""

                def run_packed(flat_array: Array, packed_message: Arrays) -> Arrays:
                    block_params = self._block_params(flat_array, stage)
                    run_blocks = blocks_runner(boundaries[stage], boundaries[stage + 1], block_params)
                    return form.pack(run_blocks(form.unpack(packed_message, stage)))

                return run_packed

            branches = [branch(stage) for stage in range(stage_count)]
            return jax.lax.switch(traced_stage, branches, stage_params[FLAT], packed_message)

        return _model_parts(
            trace,
            lambda blocks_runner, first_input: message_form(blocks_runner, first_input).pack(first_input),
            run_stage,
            lambda blocks_runner, first_input, packed_message: message_form(blocks_runner, first_input).unpack(
                packed_message, stage_count
            ),
        )


StageForm: TypeAlias = StackForm | ChainForm
"""How stages read the parameters of their blocks: from a stack, or from the flat array of a chain's stage."""
