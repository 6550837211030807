"""LayerGroup: neighboring layers of a stack with the same wrapper, run in a scan or one by one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jaxscale import blocks
from jaxscale.blocks import BlockFunction, Call, StageView, Wrapper
from jaxscale.memory.prepared import with_prepared_args
from jaxscale.programs import walk
from jaxscale.typing import PyTree

_CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""Names of the primitive of `jax.checkpoint`."""


def unstack(tree: PyTree, layer_count: int) -> list[PyTree]:
    """Split a stacked tree with leaves (L, ...) into L trees with leaves (...), one per layer.

    Example:
        >>> [layer["w"].tolist() for layer in unstack({"w": jnp.arange(2)}, 2)]
        [0, 1]
    """
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree) for layer in range(layer_count)]


def restack(trees: Sequence[PyTree]) -> PyTree:
    """Stack trees, one per layer, into one tree with leaves (L, ...): the inverse of `unstack`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def slice_layers(tree: PyTree, layer_range: slice, layer_count: int) -> PyTree:
    """Return the slice `layer_range` of a stacked tree that has `layer_count` layers."""
    if (layer_range.start, layer_range.stop) == (0, layer_count):
        return tree
    return jax.tree.map(lambda leaf: leaf[layer_range], tree)


def concatenate_layers(trees: Sequence[PyTree]) -> PyTree:
    """Concatenate stacked trees along their dim of layers: the inverse of slicing a tree by `slice_layers`."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Neighboring layers with the same wrapper.

    The methods take `inputs`, the tuple (parameters, other state, layer indices, per-layer arguments) with leaves of
    shape (n, ...), and the number n of layers. A block's result is the pair (new state, output).

    Args:
        cycle: block functions of the first layers; the later layers repeat them in order.
        wrapper: function that wraps each block function (for remat, offload).
        unroll: number of layers in one iteration of the scan.
        segment: number of layers in a segment, which the backward pass recomputes from the segment's input; `None` for
            a scan without segments.
        has_padding: whether some layers may be padding. A padding layer has a negative index and returns its input.
    """

    cycle: Sequence[BlockFunction]
    wrapper: Wrapper
    unroll: int
    segment: int | None
    has_padding: bool = False

    def calls(self, inputs: PyTree, layer_count: int) -> list[Call]:
        """Return one `Call` per layer, to run the layers one by one."""
        wrapped_blocks = [self._wrapped(block, self.wrapper, False) for block in self.cycle]
        return [
            Call(wrapped_blocks[layer % len(wrapped_blocks)], (params, state), (index, layer_arguments))
            for layer, (params, state, index, layer_arguments) in enumerate(unstack(inputs, layer_count))
        ]

    def scan_layers(self, x: Any, inputs: PyTree, layer_count: int) -> tuple[Any, PyTree]:
        """Scan whole cycles of layers and run the other layers one by one; return (last `x`, stacked results)."""
        full_layer_count = layer_count - layer_count % len(self.cycle)
        results_by_part = []
        if full_layer_count:
            run_full_layers = self._scan_cycles if self.segment is None else self._scan_segments
            x, full_results = run_full_layers(
                x, slice_layers(inputs, slice(0, full_layer_count), layer_count), full_layer_count
            )
            results_by_part.append(full_results)
        if full_layer_count < layer_count:
            tail_calls = self.calls(
                slice_layers(inputs, slice(full_layer_count, layer_count), layer_count), layer_count - full_layer_count
            )
            x, tail_results = blocks.one_after_another(tail_calls, x)
            results_by_part.append(restack(tail_results))
        return x, concatenate_layers(results_by_part)

    def _scan_cycles(self, x: Any, inputs: PyTree, layer_count: int, is_in_loop: bool = False) -> tuple[Any, PyTree]:
        """Scan over whole cycles; `is_in_loop` is true if the scan is inside the body of another loop."""
        period = len(self.cycle)
        cycle_count = layer_count // period
        cycles_per_iteration = min(cycle_count, max(1, self.unroll // period))
        # XLA removes a loop of one iteration
        is_rolled = (is_in_loop or cycle_count > 1) and self.unroll == 1

        def run_cycle(x: Any, cycle_inputs: PyTree) -> tuple[Any, PyTree]:
            """Run one cycle of layers, and return the next `x` and the layers' results."""
            if period == 1:
                params, state, *others = cycle_inputs
                return self._wrapped(self.cycle[0], self.wrapper, is_rolled)(params, state, x, *others)
            layer_results = []
            cycle_params = blocks.treatment().prepare_cycle(cycle_inputs[0])
            for position, layer_inputs in enumerate(unstack(cycle_inputs, period)):
                x, layer_result = self._run_in_cycle(position, cycle_params, layer_inputs, x, is_rolled)
                layer_results.append(layer_result)
            return x, restack(layer_results)

        x, scan_results = jax.lax.scan(
            run_cycle,
            x,
            inputs if period == 1 else _split_leading_dim(inputs, cycle_count),
            unroll=cycles_per_iteration,
        )
        return x, scan_results if period == 1 else _merge_leading_dims(scan_results)

    def _run_in_cycle(
        self, position: int, cycle_params: PyTree, layer_inputs: PyTree, x: Any, is_rolled: bool
    ) -> tuple[Any, PyTree]:
        """Run one layer of a cycle; return the next `x` and the layer's result.

        If the layer's parameters were sliced outside its block, the scan would keep a copy of all of them for the
        backward pass. The slices are made outside nevertheless if the block is recorded with its own parameters, if it
        may be padding, because the conditional around it would keep the parameters of the cycle, and if it contains a
        checkpoint, which would lose its effect inside the one that does not keep slices.
        """
        block, (params, state, *others) = self.cycle[position], layer_inputs
        is_sliced_inside = not (self.has_padding or blocks.treatment().is_recorded)
        if is_sliced_inside and self.wrapper is blocks.identity:
            block, has_checkpoint = _traced(block, (params, state, x, *others))
            is_sliced_inside = not has_checkpoint
        if is_sliced_inside:
            wrapper = _with_own_weights(self.wrapper, cycle_params, position)
            return self._wrapped(block, wrapper, is_rolled)(cycle_params, state, x, *others)
        return self._wrapped(block, self.wrapper, is_rolled)(params, state, x, *others)

    def _wrapped(self, block: BlockFunction, wrapper: Wrapper, is_rolled: bool) -> BlockFunction:
        """Return a wrapped block, which returns its input if its layer is padding."""
        wrapped_block = wrapper(blocks.adapted(block), is_rolled)
        return _with_padding_skipped(wrapped_block) if self.has_padding else wrapped_block

    def _scan_segments(self, x: Any, inputs: PyTree, layer_count: int) -> tuple[Any, PyTree]:
        """Scan segments, which the backward pass recomputes. The remaining layers form a shorter segment."""
        assert self.segment is not None
        period = len(self.cycle)
        layers_per_segment = min(layer_count, max(1, self.segment // period) * period)
        segment_count = layer_count // layers_per_segment
        full_layer_count = segment_count * layers_per_segment

        def make_segment(segment_layer_count: int, is_rolled: bool) -> Callable[..., Any]:
            """Return a function of (x, inputs) that runs a segment of `segment_layer_count` layers."""
            return blocks.run_again(
                lambda x, segment_inputs: self._scan_cycles(x, segment_inputs, segment_layer_count, is_rolled),
                rolled=is_rolled,
            )

        scanned_inputs = _split_leading_dim(
            slice_layers(inputs, slice(0, full_layer_count), layer_count), segment_count
        )
        x, folded_results = jax.lax.scan(make_segment(layers_per_segment, segment_count > 1), x, scanned_inputs)
        results = _merge_leading_dims(folded_results)
        if full_layer_count < layer_count:
            x, tail_results = make_segment(layer_count - full_layer_count, False)(
                x, slice_layers(inputs, slice(full_layer_count, layer_count), layer_count)
            )
            results = concatenate_layers([results, tail_results])
        return x, results


def stage_runner(
    view: StageView, cycle: Sequence[BlockFunction], inputs: PyTree, *, is_scanned: bool = True
) -> Callable[[Any], Any]:
    """Return a function of `x` that runs the layers of a pipeline stage under the current plan.

    Args:
        view: description of the stage.
        cycle: block functions of the first layers; the later layers repeat them in order.
        inputs: the inputs of a `LayerGroup`, with a row for each layer of this stage. A padding row has a negative
            layer index.
        is_scanned: whether a scan may run the layers.
    """
    treatment, row_count = blocks.treatment(), len(view.layer_numbers)

    def run_stage(x: Any) -> Any:
        """Return `x` after the layers of the stage."""
        for start, stop, wrapper in treatment.wrapped_ranges(row_count):
            group = LayerGroup(
                [_with_gathering(block, view) for block in cycle],
                wrapper,
                treatment.unroll,
                treatment.segment,
                view.has_padding,
            )
            range_inputs = slice_layers(inputs, slice(start, stop), row_count)
            if treatment.sequence is not None or not is_scanned:
                x, _ = blocks.run(group.calls(range_inputs, stop - start), x)
            else:
                x, _ = group.scan_layers(x, range_inputs, stop - start)
        return x

    return run_stage


def _with_gathering(block: BlockFunction, view: StageView) -> BlockFunction:
    """Return a function that gathers the block's parameters if the view shards them, and then calls `block`."""
    if view.gather is None:
        return block
    gather = view.gather
    return lambda params, *arguments: block(gather(params), *arguments)


def _with_padding_skipped(block: BlockFunction) -> BlockFunction:
    """Return a block like `block`, except that it returns `x` unchanged if its layer index is negative."""

    def run(params: Any, state: Any, x: Any, index: Any, layer_arguments: Any) -> Any:
        return jax.lax.cond(
            index >= 0,
            block,
            lambda *operands: (operands[2], (state, None)),
            params,
            state,
            x,
            index,
            layer_arguments,
        )

    return run


def _traced(block: BlockFunction, args: tuple[Any, ...]) -> tuple[BlockFunction, bool]:
    """Trace a block; return the traced block, and whether it contains a checkpoint."""
    jaxpr, result_shapes = jax.make_jaxpr(block, return_shape=True)(*args)
    has_checkpoint = any(eqn.primitive.name in _CHECKPOINTS for eqn, _ in walk.equations_with_runs(jaxpr))

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(result_shapes), jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args)))

    return run, has_checkpoint


def _with_own_weights(wrapper: Wrapper, cycle_params: PyTree, position: int) -> Wrapper:
    """Return a wrapper of blocks that get the parameters of their cycle, and run on those of their own position."""
    stacked_shapes = {leaf.shape for leaf in jax.tree.leaves(cycle_params)}
    shapes_by_primitive = {
        "dynamic_slice": stacked_shapes,
        "squeeze": {(1, *shape[1:]) for shape in stacked_shapes},
    }

    def own_args(args: Any) -> Any:
        """Return the arguments of the block."""
        params, *others = args

        def own_slice(leaf: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(leaf, position, keepdims=False)

        return jax.tree.map(own_slice, params), *others

    def keep_all_but_slices(primitive: Any, *input_avals: Any, **params: Any) -> bool:
        """Return whether to keep a residual; a policy for `jax.checkpoint`. False for slices of the parameters."""
        return not input_avals or input_avals[0].shape not in shapes_by_primitive.get(primitive.name, ())

    return with_prepared_args(wrapper, own_args, keep_all_but_slices)


def _split_leading_dim(tree: PyTree, part_count: int) -> PyTree:
    """Reshape leaves (n, ...) to (part_count, n / part_count, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(part_count, leaf.shape[0] // part_count, *leaf.shape[1:]), tree)


def _merge_leading_dims(tree: PyTree) -> PyTree:
    """Reshape leaves (part_count, n / part_count, ...) to (n, ...): the inverse of `_split_leading_dim`."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
