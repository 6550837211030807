"""Stack and Chain: the blocks of a model in sequence, alike (`Stack`) or unlike (`Chain`).

Every block is called through `blocks.wrap`, which is how remat, offload and pipelines reach a model from outside. A
block's arrays enter the wrapped function as arguments, never by closure, and the state it mutates (running statistics)
is returned.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import BlockFunction, Call, Context, Cut, Wrapper
from jaxscale.errors import UserError
from jaxscale.typing import PyTree


def unstack(tree: PyTree, layers: int) -> list[PyTree]:
    """Split a stacked tree of leaves (L, ...) into L trees of leaves (...), one per layer.

    Example:
        >>> [part["w"].tolist() for part in unstack({"w": jnp.arange(2)}, 2)]
        [0, 1]
    """
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree) for layer in range(layers)]


def restack(trees: Sequence[PyTree]) -> PyTree:
    """The inverse of `unstack`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _states(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Structure, parameters and other state of a module, the last two as plain nested dicts of arrays."""
    graphdef, params, other_state = nnx.split(module, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(other_state)


def _run(graphdef: Any, params: Any, other_state: Any, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The result of `call(module)`, and the module's other state after the call."""
    module = (
        nnx.merge(graphdef, params, other_state, copy=True) if other_state else nnx.merge(graphdef, params, copy=True)
    )
    result = call(module)
    return result, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param))) if other_state else other_state


class Stack(nnx.Module):
    """Alike blocks in sequence, their parameters stacked along a leading dim with the logical axis "layers".

    The block is called as `block(x, *shared, context=context.at_layer(i), **per_layer_i, **cycle_i, **shared_by_name)`
    and returns a new `x` of the same shape and type. Parameters are stored under the attribute `layers`: the leaf
    `layers/w` of shape (L, ...) stacks the leaves `layers/i/w` of a `Chain` (`unstack`). Built under
    `blocks.grouping((25, 7))`, a stack of 32 blocks stores the last seven under `layers_from_25`.

    Args:
        make: builds the block from random streams.
        layers: number of blocks.
        rngs: random streams; block i's draws do not depend on the number of blocks, nor on groups.
        scan: compile one block and loop over it (`lax.scan`); else L blocks in sequence, same parameters, same result.

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
            raise UserError(f"a stack of {layers} blocks: expected at least 1")
        build = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.count, self.scan, self.groups = layers, scan, blocks.groups_of(layers)

        def build_groups(rngs: nnx.Rngs) -> list[nnx.Module]:
            if len(self.groups) == 1:
                return [build(rngs)]
            graphdef, state = nnx.split(rngs)
            return [
                build(
                    nnx.merge(
                        graphdef,
                        jax.tree.map(lambda leaf, layers_of_group=layers_of_group: leaf[layers_of_group], state),
                    )
                )
                for layers_of_group in self._spans()
            ]

        for layers_of_group, module in zip(
            self._spans(), nnx.split_rngs(splits=layers)(build_groups)(rngs), strict=True
        ):
            setattr(self, group_name(layers_of_group.start), module)

    def _spans(self) -> list[slice]:
        """The layers of each group, as slices."""
        ends = list(itertools.accumulate(self.groups))
        return [slice(end - count, end) for end, count in zip(ends, self.groups, strict=True)]

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
        """`x` after all blocks.

        Args:
            x: input of the first block; any pytree.
            shared: passed to every block, as are `shared_by_name`.
            context: of the forward pass; block i gets `context.at_layer(i)`.
            per_layer: keyword arguments whose leaves have a leading dim of L; block i gets slice i (caches).
            cycle: keyword arguments that stay Python values; block i gets `cycle[i % len(cycle)]`. Gemma-2's alternate
                windows are `cycle=({"window": 4096}, {"window": None})`; a scan then runs one cycle per iteration.
            outputs: blocks return `(x, output)`; the outputs are returned stacked.

        Returns:
            `x`, or `(x, outputs)` with leaves (L, ...).
        """
        per_layer = {} if per_layer is None else dict(per_layer)
        treatment = blocks.treatment()
        one_by_one = treatment.sequence is not None or not self.scan
        calls, states_and_outputs = [], []

        def block_function(graphdef: Any, settings: Mapping[str, Any]) -> BlockFunction:
            def run(params: Any, state: Any, x: Any, index: Any, per_layer: Any) -> Any:
                def call(block: Any) -> Any:
                    layer_context = context.at_layer(index)
                    return block(x, *shared, context=layer_context, **per_layer, **settings, **shared_by_name)

                layer_result, new_state = _run(graphdef, params, state, call)
                x_next, output = layer_result if outputs else (layer_result, None)
                return x_next, (new_state, output)

            return run

        cut = blocks.cut()
        if cut is not None:
            if per_layer or outputs:
                raise UserError(
                    "pipeline: the blocks of this model take arguments or return outputs per layer, and a stage sends "
                    "its neighbours nothing but x; put them into x, or train without a pipeline"
                )
            return cut.between(
                self._stage(
                    cut, [functools.partial(block_function, settings=layer_settings) for layer_settings in cycle]
                ),
                x,
            )

        runs = treatment.runs(self.count)
        for span in self._spans():
            module = getattr(self, group_name(span.start))
            graphdef, params, state = _states(module)

            for start, stop, wrapper in runs:
                start, stop = max(start, span.start), min(stop, span.stop)
                if start >= stop:
                    continue
                rows = slice(start - span.start, stop - span.start)
                inputs = (
                    *_slice((params, state), rows, span.stop - span.start),
                    jnp.arange(start, stop, dtype=jnp.int32),
                    _slice(per_layer, slice(start, stop), self.count),
                )
                settings = [cycle[layer % len(cycle)] for layer in range(start, start + len(cycle))]
                group = _LayerGroup(
                    [block_function(graphdef, layer_settings) for layer_settings in settings],
                    wrapper,
                    treatment.unroll,
                    treatment.segment,
                )
                if one_by_one:
                    calls += group.calls(inputs, stop - start)
                else:
                    x, layer_result = group.scan_layers(x, inputs, stop - start)
                    states_and_outputs.append(layer_result)
        if one_by_one and treatment.segment is not None and treatment.sequence is None:
            for start in range(0, self.count, treatment.segment):
                x, results = blocks.again(calls[start : start + treatment.segment], x)
                states_and_outputs += [restack(results)]
        elif one_by_one:
            x, results = blocks.run(calls, x)
            states_and_outputs = [restack(results)]
        new_state, output = _concatenated(states_and_outputs)
        for span in self._spans():
            if new_state:
                nnx.update(getattr(self, group_name(span.start)), _slice(new_state, span, self.count))
        return (x, output) if outputs else x

    def _stage(self, cut: Cut, cycle: Sequence[Callable[[Any], BlockFunction]]) -> Callable[[Any], Any]:
        """A function that runs the layers of a pipeline stage; `self` holds the parameters of that stage alone.

        Raises:
            UserError: layers hold state besides parameters, or a stage begins within a cycle of unlike layers.
        """
        graphdef, params, state = _states(self.layers)
        if jax.tree.leaves(state):
            raise UserError(
                "pipeline: the blocks of this model hold running statistics, which each microbatch would change in "
                "turn; use layer or group norm, or train without a pipeline"
            )
        bad_starts = [start for start in cut.starts if start % len(cycle)]
        if bad_starts:
            raise UserError(
                f"pipeline: a stage begins with layer {bad_starts[0]}, and the layers of this model repeat every "
                f"{len(cycle)}: give each stage a multiple of {len(cycle)} layers"
            )
        treatment, rows = blocks.treatment(), len(cut.numbers)
        inputs = (params, state, cut.numbers, {})

        def run(x: Any) -> Any:
            for start, stop, wrapper in treatment.runs(rows):
                group = _LayerGroup(
                    [_gathered(block_of(graphdef), cut) for block_of in cycle],
                    _skip_padding(wrapper) if cut.padded else wrapper,
                    treatment.unroll,
                    treatment.segment,
                )
                stage_rows = _slice(inputs, slice(start, stop), rows)
                if treatment.sequence is not None or not self.scan:
                    x, _ = blocks.run(group.calls(stage_rows, stop - start), x)
                else:
                    x, _ = group.scan_layers(x, stage_rows, stop - start)
            return x

        return run


def _gathered(block: BlockFunction, cut: Cut) -> BlockFunction:
    """The block, run on parameters that are gathered first."""
    if cut.gather is None:
        return block
    gather = cut.gather
    return lambda params, *inputs: block(gather(params), *inputs)


def _skip_padding(wrapper: Wrapper) -> Wrapper:
    """`wrapper`, of blocks that return `x` unchanged where the layer's number is negative."""

    def wrap(block: BlockFunction, rolled: bool) -> BlockFunction:
        wrapped = wrapper(block, rolled)

        def run(params: Any, state: Any, x: Any, index: Any, per_layer: Any) -> Any:
            return jax.lax.cond(
                index >= 0, wrapped, lambda *operands: (operands[2], (state, None)), params, state, x, index, per_layer
            )

        return run

    return wrap


def group_name(start: int) -> str:
    """The attribute of a `Stack` that holds its layers from number `start` on.

    Example:
        >>> group_name(0), group_name(25)
        ('layers', 'layers_from_25')
    """
    return f"layers_from_{start}" if start else "layers"


def in_one_stack(name: str) -> tuple[str, int]:
    """The name of a parameter if its stack were not in groups, and the group's first layer.

    Example:
        >>> in_one_stack("blocks/layers_from_25/mlp"), in_one_stack("blocks/layers/mlp")
        (('blocks/layers/mlp', 25), ('blocks/layers/mlp', 0))
    """
    groups = list(re.finditer(r"(?:^|/)layers(_from_(\d+))(?=/|$)", name))
    if not groups:
        return name, 0
    return name[: groups[-1].start(1)] + name[groups[-1].end(1) :], int(groups[-1][2])


def _slice(tree: PyTree, rows: slice, layers: int) -> PyTree:
    """A slice of the layers of leaves (L, ...)."""
    if (rows.start, rows.stop) == (0, layers):
        return tree
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _concatenated(trees: Sequence[PyTree]) -> PyTree:
    """The inverse of `_slice`, over all parts."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


@dataclasses.dataclass(frozen=True)
class _LayerGroup:
    """Neighbouring layers with the same wrapper.

    Inputs are trees of leaves (n, ...): parameters, other state, the layers' numbers, per-layer arguments.

    Args:
        cycle: the blocks of the first layers; later layers repeat them in order.
        wrapper: applied to each block.
        unroll: layers per iteration.
        segment: layers per segment, of which only the first one's input is kept; `None` for one level.
    """

    cycle: Sequence[BlockFunction]
    wrapper: Wrapper
    unroll: int
    segment: int | None

    def calls(self, inputs: PyTree, layers: int) -> list[Call]:
        """One call per layer."""
        wrapped = [self.wrapper(block, False) for block in self.cycle]
        return [
            Call(wrapped[layer % len(wrapped)], (params, state), (index, per_layer))
            for layer, (params, state, index, per_layer) in enumerate(unstack(inputs, layers))
        ]

    def scan_layers(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """`x` after the layers, and their results; the layers of a last, incomplete cycle run one by one."""
        full_layers = layers - layers % len(self.cycle)
        results = []
        if full_layers:
            loop = self._cycles if self.segment is None else self._segments
            x, part_results = loop(x, _slice(inputs, slice(0, full_layers), layers), full_layers)
            results.append(part_results)
        if full_layers < layers:
            tail_calls = self.calls(_slice(inputs, slice(full_layers, layers), layers), layers - full_layers)
            x, part_results = blocks.one_after_another(tail_calls, x)
            results.append(restack(part_results))
        return x, _concatenated(results)

    def _cycles(self, x: Any, inputs: PyTree, layers: int, in_loop: bool = False) -> tuple[Any, PyTree]:
        """A scan over whole cycles; `in_loop`: inside the body of another loop."""
        period = len(self.cycle)
        count = layers // period
        unroll = min(count, max(1, self.unroll // period))
        # a loop of one iteration is no loop to XLA
        rolled = (in_loop or count > 1) and self.unroll == 1
        wrapped = [self.wrapper(block, rolled) for block in self.cycle]

        def step(x: Any, inputs: PyTree) -> tuple[Any, PyTree]:
            layer_results = []
            for block, layer_inputs in zip(wrapped, [inputs] if period == 1 else unstack(inputs, period), strict=True):
                x, layer_result = block(*layer_inputs[:2], x, *layer_inputs[2:])
                layer_results.append(layer_result)
            return x, layer_results[0] if period == 1 else restack(layer_results)

        x, scan_results = jax.lax.scan(step, x, inputs if period == 1 else _folded(inputs, count), unroll=unroll)
        return x, scan_results if period == 1 else _unfolded(scan_results)

    def _segments(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """A scan over segments, each recomputed in the backward pass; a shorter one follows."""
        assert self.segment is not None
        period = len(self.cycle)
        size = min(layers, max(1, self.segment // period) * period)
        count = layers // size
        full_layers = count * size

        def segment_function(size: int, rolled: bool) -> Callable[..., Any]:
            return blocks.run_again(lambda x, inputs: self._cycles(x, inputs, size, rolled), rolled=rolled)

        x, results = jax.lax.scan(
            segment_function(size, count > 1), x, _folded(_slice(inputs, slice(0, full_layers), layers), count)
        )
        results = _unfolded(results)
        if full_layers < layers:
            x, tail_results = segment_function(layers - full_layers, False)(
                x, _slice(inputs, slice(full_layers, layers), layers)
            )
            results = _concatenated([results, tail_results])
        return x, results


def _folded(tree: PyTree, count: int) -> PyTree:
    """Leaves (n, ...) as (count, n / count, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), tree)


def _unfolded(tree: PyTree) -> PyTree:
    """The inverse of `_folded`."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)


class Chain(nnx.Module):
    """Unlike blocks in sequence.

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
        """`x` after all blocks."""

        def call(block: nnx.Module, layer_context: Context) -> Call:
            graphdef, params, state = _states(block)

            def run(params: Any, state: Any, x: Any) -> Any:
                return _run(
                    graphdef, params, state, lambda module: module(x, *shared, context=layer_context, **shared_by_name)
                )

            return Call(blocks.wrap(run, rolled=False), (params, state))

        cut = blocks.cut()
        if cut is not None:

            def part(start: int, stop: int, params: Sequence[Any] | None = None) -> Callable[[Any], Any]:
                """Run some of the blocks, with `params` in place of their parameters."""
                calls = [call(self.layers[index], context.at_layer(index)) for index in range(start, stop)]
                if params is not None:
                    pairs = zip(calls, params, strict=True)
                    calls = [block._replace(before=(block_params, block.before[1])) for block, block_params in pairs]
                return lambda x: blocks.run(calls, x)[0]

            return cut.between(part, x)
        calls = [call(block, context.at_layer(index)) for index, block in enumerate(self.layers)]
        x, new_states = blocks.run(calls, x)
        for block, new_state in zip(self.layers, new_states, strict=True):
            if new_state:
                nnx.update(block, new_state)
        return x
