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
    """The layers `rows` of a stacked tree of `layers` layers."""
    if (rows.start, rows.stop) == (0, layers):
        return tree
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def concatenated(trees: Sequence[PyTree]) -> PyTree:
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
        """One `Call` per layer, to run the layers one by one."""
        wrapped_blocks = [self.wrapper(block, False) for block in self.cycle]
        return [
            Call(wrapped_blocks[layer % len(wrapped_blocks)], (params, state), (index, per_layer))
            for layer, (params, state, index, per_layer) in enumerate(unstack(inputs, layers))
        ]

    def scan_layers(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """`x` after the layers, and their results; the layers of a last, incomplete cycle run one by one."""
        full_layers = layers - layers % len(self.cycle)
        stacked_results = []
        if full_layers:
            run_full_layers = self._cycles if self.segment is None else self._segments
            x, full_results = run_full_layers(x, slice_layers(inputs, slice(0, full_layers), layers), full_layers)
            stacked_results.append(full_results)
        if full_layers < layers:
            tail_calls = self.calls(slice_layers(inputs, slice(full_layers, layers), layers), layers - full_layers)
            x, tail_results = blocks.one_after_another(tail_calls, x)
            stacked_results.append(restack(tail_results))
        return x, concatenated(stacked_results)

    def _cycles(self, x: Any, inputs: PyTree, layers: int, in_loop: bool = False) -> tuple[Any, PyTree]:
        """A scan over whole cycles; `in_loop` is true if the scan is inside the body of another loop."""
        period = len(self.cycle)
        cycles = layers // period
        unroll = min(cycles, max(1, self.unroll // period))
        # a loop of one iteration is no loop to XLA
        is_rolled = (in_loop or cycles > 1) and self.unroll == 1
        bodies = [self.wrapper(block, is_rolled) for block in self.cycle]

        def step(x: Any, inputs: PyTree) -> tuple[Any, PyTree]:
            layer_results = []
            for body, layer_inputs in zip(bodies, [inputs] if period == 1 else unstack(inputs, period), strict=True):
                x, layer_result = body(*layer_inputs[:2], x, *layer_inputs[2:])
                layer_results.append(layer_result)
            return x, layer_results[0] if period == 1 else restack(layer_results)

        x, scan_results = jax.lax.scan(step, x, inputs if period == 1 else _folded(inputs, cycles), unroll=unroll)
        return x, scan_results if period == 1 else _unfolded(scan_results)

    def _segments(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """A scan over segments, each recomputed in the backward pass; the layers that remain are a shorter segment."""
        assert self.segment is not None
        period = len(self.cycle)
        segment_layers = min(layers, max(1, self.segment // period) * period)
        segments = layers // segment_layers
        full_layers = segments * segment_layers

        def segment_function(segment_layers: int, rolled: bool) -> Callable[..., Any]:
            return blocks.run_again(lambda x, inputs: self._cycles(x, inputs, segment_layers, rolled), rolled=rolled)

        scanned_inputs = _folded(slice_layers(inputs, slice(0, full_layers), layers), segments)
        x, results = jax.lax.scan(segment_function(segment_layers, segments > 1), x, scanned_inputs)
        results = _unfolded(results)
        if full_layers < layers:
            x, tail_results = segment_function(layers - full_layers, False)(
                x, slice_layers(inputs, slice(full_layers, layers), layers)
            )
            results = concatenated([results, tail_results])
        return x, results


def _folded(tree: PyTree, count: int) -> PyTree:
    """Leaves (n, ...) as (count, n / count, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), tree)


def _unfolded(tree: PyTree) -> PyTree:
    """The inverse of `_folded`."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
