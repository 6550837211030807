"""LayerGroup: neighbouring layers of a `Stack` that one wrapper treats, run in a scan or one by one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import blocks
from jaxscale.blocks import BlockFunction, Call, Wrapper
from jaxscale.typing import PyTree


def unstack(tree: PyTree, layers: int) -> list[PyTree]:
    """Split a stacked tree of leaves (L, ...) into L trees of leaves (...), one per layer.

    Example:
        >>> [layer["w"].tolist() for layer in unstack({"w": jnp.arange(2)}, 2)]
        [0, 1]
    """
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree) for layer in range(layers)]


def restack(trees: Sequence[PyTree]) -> PyTree:
    """The inverse of `unstack`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def slice_layers(tree: PyTree, rows: slice, layers: int) -> PyTree:
    """Return the layers in the range `rows` of a stacked tree of `layers` layers."""
    if (rows.start, rows.stop) == (0, layers):
        return tree
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def concatenate_layers(trees: Sequence[PyTree]) -> PyTree:
    """Concatenate stacked trees along their dim of layers: the inverse of slicing a tree by `slice_layers`."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Neighbouring layers with the same wrapper.

    Inputs are trees of leaves (n, ...): parameters, other state, the layers' numbers, per-layer arguments.

    Args:
        cycle: block functions of the first layers; later layers repeat them in order.
        wrapper: function that wraps each block (remat, offload).
        unroll: number of layers in an iteration of the scan.
        segment: number of layers in a segment, of which only the input of the first layer is kept for the backward
            pass; `None` for a scan without segments.
    """

    cycle: Sequence[BlockFunction]
    wrapper: Wrapper
    unroll: int
    segment: int | None

    def calls(self, inputs: PyTree, layers: int) -> list[Call]:
        """Return one `Call` per layer, to run the layers one by one."""
        wrapped_blocks = [self.wrapper(block, False) for block in self.cycle]
        return [
            Call(wrapped_blocks[layer % len(wrapped_blocks)], (params, state), (index, per_layer))
            for layer, (params, state, index, per_layer) in enumerate(unstack(inputs, layers))
        ]

    def scan_layers(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """Run the layers, those of a last, incomplete cycle one by one; returns the last `x` and all results."""
        full_layers = layers - layers % len(self.cycle)
        results_of_parts = []
        if full_layers:
            run_full_layers = self._scan_cycles if self.segment is None else self._scan_segments
            x, full_results = run_full_layers(x, slice_layers(inputs, slice(0, full_layers), layers), full_layers)
            results_of_parts.append(full_results)
        if full_layers < layers:
            tail_calls = self.calls(slice_layers(inputs, slice(full_layers, layers), layers), layers - full_layers)
            x, tail_results = blocks.one_after_another(tail_calls, x)
            results_of_parts.append(restack(tail_results))
        return x, concatenate_layers(results_of_parts)

    def _scan_cycles(self, x: Any, inputs: PyTree, layers: int, in_loop: bool = False) -> tuple[Any, PyTree]:
        """Scan over whole cycles; `in_loop` is true if the scan is inside the body of another loop."""
        period = len(self.cycle)
        cycle_count = layers // period
        unroll = min(cycle_count, max(1, self.unroll // period))
        # a loop of one iteration is no loop to XLA
        is_rolled = (in_loop or cycle_count > 1) and self.unroll == 1
        wrapped_blocks = [self.wrapper(block, is_rolled) for block in self.cycle]

        def step(x: Any, inputs: PyTree) -> tuple[Any, PyTree]:
            """Run one cycle of layers; returns the next `x` and the layers' results."""
            layer_results = []
            inputs_of_layers = [inputs] if period == 1 else unstack(inputs, period)
            for block, layer_inputs in zip(wrapped_blocks, inputs_of_layers, strict=True):
                x, layer_result = block(*layer_inputs[:2], x, *layer_inputs[2:])
                layer_results.append(layer_result)
            return x, layer_results[0] if period == 1 else restack(layer_results)

        x, scan_results = jax.lax.scan(step, x, inputs if period == 1 else _fold(inputs, cycle_count), unroll=unroll)
        return x, scan_results if period == 1 else _unfold(scan_results)

    def _scan_segments(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """Scan over segments, which are recomputed in the backward pass; remaining layers are a shorter segment."""
        assert self.segment is not None
        period = len(self.cycle)
        segment_layers = min(layers, max(1, self.segment // period) * period)
        segment_count = layers // segment_layers
        full_layers = segment_count * segment_layers

        def segment_function(length: int, rolled: bool) -> Callable[..., Any]:
            """Return a function of `x` and inputs that runs one segment, of `length` layers."""
            return blocks.run_again(lambda x, inputs: self._scan_cycles(x, inputs, length, rolled), rolled=rolled)

        scanned_inputs = _fold(slice_layers(inputs, slice(0, full_layers), layers), segment_count)
        x, results = jax.lax.scan(segment_function(segment_layers, segment_count > 1), x, scanned_inputs)
        results = _unfold(results)
        if full_layers < layers:
            x, tail_results = segment_function(layers - full_layers, False)(
                x, slice_layers(inputs, slice(full_layers, layers), layers)
            )
            results = concatenate_layers([results, tail_results])
        return x, results


def _fold(tree: PyTree, count: int) -> PyTree:
    """Reshape leaves (n, ...) to (count, n / count, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), tree)


def _unfold(tree: PyTree) -> PyTree:
    """The inverse of `_fold`."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
