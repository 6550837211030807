"""Stack and Chain: the blocks of a model in sequence, of one structure (`Stack`) or of different ones (`Chain`).

Every block is called through `blocks.wrap`, by which remat, offload and pipelines act on a model from outside. A
block's arrays enter the wrapped function as arguments, never by closure, and the state it mutates (running statistics)
is returned. In a pipeline, a `blocks.StageView` describes the stage that this device runs.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import BlockFunction, Call, Context, StageView
from jaxscale.errors import UserError
from jaxscale.layers.layer_group import LayerGroup, concatenate_layers, restack, slice_layers, stage_runner
from jaxscale.typing import PyTree

_RANDOM_OR_PARAM = nnx.Any(nnx.Param, nnx.RngState)
"""Flax filter for parameters, and for the keys and counts of random streams."""


def _split_module(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Return (structure, parameters, other state) of a module; the last two are nested dicts of arrays."""
    graphdef, params, other_state = nnx.split(module, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(other_state)


def _call_merged(graphdef: Any, params: Any, other_state: Any, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Merge a module, and return (output of `call(module)`, the module's other state after the call)."""
    nonempty_states = (params, other_state) if other_state else (params,)
    module = nnx.merge(graphdef, *nonempty_states, copy=True)
    output = call(module)
    return output, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param))) if other_state else other_state


class Stack(nnx.Module):
    """Blocks of one structure in sequence, their parameters stacked along a leading dim with the logical axis "layers".

    The block is called as `block(x, *shared, context=context.at_layer(i), **per_layer_i, **cycle_i, **shared_by_name)`
    and returns a new `x` of the same shape and type. Parameters are stored under the attribute `layers`: the leaf
    `layers/w` of shape (L, ...) stacks the leaves `layers/i/w` of a `Chain` (see `unstack`). Built under
    `blocks.grouping((25, 7))`, a stack of 32 blocks stores the last seven of them under `layers_from_25`.

    Args:
        make: function that builds a block from random streams.
        layers: number L of blocks.
        rngs: random streams; the values drawn for block i do not depend on the number of blocks or on groups.
        scan: whether to compile one block and loop over it (`lax.scan`) rather than compile L blocks in sequence. The
            parameters and the result are the same either way.

    Attributes:
        count: number L of blocks.
        groups: number of layers in each group of stacked parameters, in order.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.layers.mlp import MLP
        >>> stack = Stack(lambda rngs: MLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((1, 2, 4))).shape, stack.layers.up.weight.shape
        ((1, 2, 4), (3, 4, 8))
    """

    layers: Any

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], layers: int, *, rngs: nnx.Rngs, scan: bool = True):
        if layers < 1:
            raise UserError(f"stack: got {layers} blocks, expected at least 1")
        build_stacked = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.count, self.scan, self.groups = layers, scan, blocks.groups_of(layers)

        def build_groups(rngs: nnx.Rngs) -> list[nnx.Module]:
            """Build the stacked module of each group."""
            if len(self.groups) == 1:
                return [build_stacked(rngs)]
            graphdef, state = nnx.split(rngs)
            return [
                build_stacked(nnx.merge(graphdef, slice_layers(state, span, layers))) for span in self._layer_ranges()
            ]

        group_modules = nnx.split_rngs(splits=layers)(build_groups)(rngs)
        for span, group_module in zip(self._layer_ranges(), group_modules, strict=True):
            setattr(self, group_name(span.start), group_module)

    def _layer_ranges(self) -> list[slice]:
        """Return the range of layers of each group."""
        range_ends = list(itertools.accumulate(self.groups))
        return [
            slice(range_end - layer_count, range_end)
            for range_end, layer_count in zip(range_ends, self.groups, strict=True)
        ]

    @property
    def group_names(self) -> list[str]:
        """The attributes that hold the groups of stacked layers, in order."""
        return [group_name(span.start) for span in self._layer_ranges()]

    def __call__(
        self,
        x: Any,
        *shared: Any,
        context: Context = Context(),
        per_layer: Mapping[str, PyTree] | None = None,
        cycle: Sequence[Mapping[str, Any]] = ({},),
        outputs: bool = False,
        **shared_by_name: Any,
    ) -> Any:
        """Run all blocks.

        Args:
            x: input of the first block; any pytree.
            shared: positional arguments passed to every block.
            context: context of the forward pass; block i gets `context.at_layer(i)`.
            per_layer: keyword arguments, such as caches, whose leaves have a leading dim of L; block i gets slice i.
            cycle: keyword arguments that stay Python values; block i gets `cycle[i % len(cycle)]`. For example, the
                alternating windows of Gemma-2 are `cycle=({"window": 4096}, {"window": None})`. A scan iteration runs
                one cycle.
            outputs: whether blocks return `(x, output)` instead of `x`.
            shared_by_name: keyword arguments passed to every block.

        Returns:
            The last `x`; with `outputs`, the pair of the last `x` and the stacked outputs, with leaves (L, ...).
        """
        per_layer = {} if per_layer is None else dict(per_layer)
        treatment = blocks.treatment()
        is_unrolled = treatment.sequence is not None or not self.scan
        calls, stacked_results = [], []  # results are pairs (new state, output)

        def block_function(graphdef: Any, settings: Mapping[str, Any]) -> BlockFunction:
            """Return a pure function that calls a block of structure `graphdef` with the arguments `settings`."""

            def run(params: Any, state: Any, x: Any, index: Any, layer_arguments: Any) -> Any:
                def call(block: Any) -> Any:
                    layer_context = context.at_layer(index)
                    return block(x, *shared, context=layer_context, **layer_arguments, **settings, **shared_by_name)

                block_result, new_state = _call_merged(graphdef, params, state, call)
                x_next, output = block_result if outputs else (block_result, None)
                return x_next, (new_state, output)

            return run

        view = blocks.stage_view()
        if view is not None:
            if per_layer or outputs:
                raise UserError(
                    "pipeline: the blocks of this model take arguments or return outputs per layer, but a stage sends "
                    "only x to the next stage; put them into x, or train without a pipeline"
                )
            block_makers = [functools.partial(block_function, settings=layer_settings) for layer_settings in cycle]
            return view.run_stage(self._stage_function(view, block_makers), x)

        wrapped_ranges = treatment.wrapped_ranges(self.count)
        for span in self._layer_ranges():
            module = getattr(self, group_name(span.start))
            graphdef, params, state = _split_module(module)

            for range_start, range_stop, wrapper in wrapped_ranges:
                start, stop = max(range_start, span.start), min(range_stop, span.stop)
                if start >= stop:
                    continue
                group_rows = slice(start - span.start, stop - span.start)
                layer_inputs = (
                    *slice_layers((params, state), group_rows, span.stop - span.start),
                    jnp.arange(start, stop, dtype=jnp.int32),
                    slice_layers(per_layer, slice(start, stop), self.count),
                )
                cycle_settings = [cycle[layer % len(cycle)] for layer in range(start, start + len(cycle))]
                group = LayerGroup(
                    [block_function(graphdef, layer_settings) for layer_settings in cycle_settings],
                    wrapper,
                    treatment.unroll,
                    treatment.segment,
                )
                if is_unrolled:
                    calls += group.calls(layer_inputs, stop - start)
                else:
                    x, group_results = group.scan_layers(x, layer_inputs, stop - start)
                    stacked_results.append(group_results)
        if is_unrolled and treatment.segment is not None and treatment.sequence is None:
            for start in range(0, self.count, treatment.segment):
                x, layer_results = blocks.run_recomputed(calls[start : start + treatment.segment], x)
                stacked_results += [restack(layer_results)]
        elif is_unrolled:
            x, layer_results = blocks.run(calls, x)
            stacked_results = [restack(layer_results)]
        new_state, stacked_outputs = concatenate_layers(stacked_results)
        for span in self._layer_ranges():
            if new_state:
                nnx.update(getattr(self, group_name(span.start)), slice_layers(new_state, span, self.count))
        return (x, stacked_outputs) if outputs else x

    def _stage_function(
        self, view: StageView, block_makers: Sequence[Callable[[Any], BlockFunction]]
    ) -> Callable[[Any], Any]:
        """Return a function that runs the layers of a pipeline stage; `self` holds the parameters of this stage only.

        Args:
            view: description of the stage.
            block_makers: for each layer of a cycle, a function that maps the block's graphdef to its block function.

        Raises:
            UserError: the layers have state other than parameters, or a stage begins within a cycle.
        """
        graphdef, params, state = _split_module(self.layers)
        if jax.tree.leaves(state) and not jax.tree.leaves(nnx.state(self.layers, nnx.Not(_RANDOM_OR_PARAM))):
            raise UserError(
                "pipeline: the blocks of this model draw from random streams of their own (nnx.Rngs), which a stage "
                "does not have; use layers.Dropout, which draws from the context, or train without a pipeline"
            )
        if jax.tree.leaves(state):
            raise UserError(
                "pipeline: the blocks of this model hold running statistics, which each microbatch would change in "
                "turn; use layer or group norm, or train without a pipeline"
            )
        uneven_starts = [start for start in view.starts if start % len(block_makers)]
        if uneven_starts:
            raise UserError(
                f"pipeline: a stage begins with layer {uneven_starts[0]}, but the layers of this model repeat every "
                f"{len(block_makers)} layers: give each stage a multiple of {len(block_makers)} layers"
            )
        block_functions = [make_block(graphdef) for make_block in block_makers]
        return stage_runner(view, block_functions, (params, state, view.layer_numbers, {}), is_scanned=self.scan)


def group_name(start: int) -> str:
    """Return the name of a `Stack`'s attribute that holds the group of layers whose first layer has index `start`.

    Example:
        >>> group_name(0), group_name(25)
        ('layers', 'layers_from_25')
    """
    return f"layers_from_{start}" if start else "layers"


def in_one_stack(name: str) -> tuple[str, int]:
    """Return the name that a parameter would have in a stack without groups, and the index of its group's first layer.

    Example:
        >>> in_one_stack("blocks/layers_from_25/mlp"), in_one_stack("blocks/layers/mlp")
        (('blocks/layers/mlp', 25), ('blocks/layers/mlp', 0))
    """
    matches = list(re.finditer(r"(?:^|/)layers(_from_(\d+))(?=/|$)", name))
    if not matches:
        return name, 0
    return name[: matches[-1].start(1)] + name[matches[-1].end(1) :], int(matches[-1][2])


class Chain(nnx.Module):
    """Blocks of different structures in sequence.

    Args:
        layers: the blocks, called as `block(x, *shared, context=context.at_layer(i), **shared_by_name)`.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.layers.mlp import MLP
        >>> rngs = nnx.Rngs(0)
        >>> Chain([MLP(4, 8, rngs=rngs), MLP(4, 16, rngs=rngs)])(jnp.ones((1, 2, 4))).shape
        (1, 2, 4)
    """

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(layers)

    def __call__(self, x: Any, *shared: Any, context: Context = Context(), **shared_by_name: Any) -> Any:
        """Return `x` after all blocks."""

        def make_call(block: nnx.Module, layer_context: Context) -> Call:
            """Return the `Call` of a block. The result of the call is the block's new state."""
            graphdef, params, state = _split_module(block)

            def run(params: Any, state: Any, x: Any) -> Any:
                return _call_merged(
                    graphdef, params, state, lambda module: module(x, *shared, context=layer_context, **shared_by_name)
                )

            return Call(blocks.wrap(run, rolled=False), (params, state))

        view = blocks.stage_view()
        if view is not None:

            def make_stage(start: int, stop: int, params_by_block: Sequence[Any] | None = None) -> Callable[[Any], Any]:
                """Return a function that runs blocks `start` to `stop - 1`, by default with their own parameters."""
                calls = [make_call(self.layers[index], context.at_layer(index)) for index in range(start, stop)]
                if params_by_block is not None:
                    calls_and_params = zip(calls, params_by_block, strict=True)
                    calls = [
                        call._replace(before=(block_params, call.before[1])) for call, block_params in calls_and_params
                    ]
                return lambda x: blocks.run(calls, x)[0]

            return view.run_stage(make_stage, x)
        calls = [make_call(block, context.at_layer(index)) for index, block in enumerate(self.layers)]
        x, new_states = blocks.run(calls, x)
        for block, new_state in zip(self.layers, new_states, strict=True):
            if new_state:
                nnx.update(block, new_state)
        return x


def chain_block_paths(module: nnx.Module) -> list[tuple[str, ...]]:
    """Return, for each `Chain` in a module, the paths of its blocks.

    Example:
        >>> from jaxscale.layers.mlp import MLP
        >>> chain = Chain([MLP(4, 8, rngs=nnx.Rngs(0)), MLP(4, 8, rngs=nnx.Rngs(0))])
        >>> chain_block_paths(nnx.Dict(blocks=chain))
        [('blocks/layers/0', 'blocks/layers/1')]
    """
    paths_and_chains = [
        ("/".join(map(str, path)), chain) for path, chain in nnx.iter_graph(module) if isinstance(chain, Chain)
    ]
    return [
        tuple(f"{path}/layers/{block_index}" for block_index in range(len(chain.layers)))
        for path, chain in paths_and_chains
    ]
