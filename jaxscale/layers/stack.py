"""Stack and Chain: the sequence of blocks of a model, alike and unlike.

Every block is called through `blocks.wrap`, which is how remat, offload and pipelines reach a model from outside. A
block's arrays enter the wrapped function as arguments, never by closure, and what it mutates (running statistics)
leaves as results.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.typing import PyTree


def unstack(tree: PyTree, layers: int) -> list[PyTree]:
    """Layer by layer what a `Stack` holds stacked: from leaves (L, ...) to L trees of leaves (...).

    Example:
        >>> [part["w"].tolist() for part in unstack({"w": jnp.arange(2)}, 2)]
        [0, 1]
    """
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree) for layer in range(layers)]


def restack(trees: Sequence[PyTree]) -> PyTree:
    """The inverse of `unstack`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _states(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Structure, parameters and whatever else the module holds, the last two as plain nested dicts of arrays."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def _run(graphdef: Any, params: Any, rest: Any, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """`call` of the module, and what else it then holds."""
    module = nnx.merge(graphdef, params, rest, copy=True) if rest else nnx.merge(graphdef, params, copy=True)
    result = call(module)
    return result, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param))) if rest else rest


class Stack(nnx.Module):
    """Alike blocks in sequence, their parameters stacked along a leading dim with the logical axis "layers".

    The block is called as `block(x, *shared, context=context.at_layer(i), **per_layer_i, **cycle_i, **shared_by_name)`
    and returns the new `x`, of the shape and type of the old. Parameters live under the attribute `layers`: the leaf
    `layers/w` of shape (L, ...) holds what `layers/i/w` would in a `Chain` (`unstack`).

    Args:
        make: the block from random streams.
        layers: number of blocks.
        rngs: random streams; block i's draws do not depend on the number of blocks.
        scan: compile one block and loop over it (`lax.scan`); else L blocks in sequence, same parameters, same result.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.layers.mlp import MLP
        >>> stack = Stack(lambda rngs: MLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((1, 2, 4))).shape, stack.layers.up.weight.shape
        ((1, 2, 4), (3, 4, 8))
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], layers: int, *, rngs: nnx.Rngs, scan: bool = True):
        if layers < 1:
            raise UserError(f"a stack of {layers} blocks: expected at least 1")
        build = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.count, self.scan = layers, scan
        self.layers = nnx.split_rngs(splits=layers)(build)(rngs)

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
            x: what enters the first block; any pytree.
            shared: given to every block, as are `shared_by_name`.
            context: of the forward pass; block i gets `context.at_layer(i)`.
            per_layer: keyword arguments whose leaves have a leading dim of L; block i gets slice i (caches).
            cycle: keyword arguments that stay Python values; block i gets `cycle[i % len(cycle)]`. Gemma-2's alternate
                windows are `cycle=({"window": 4096}, {"window": None})`; a scan then runs one cycle per iteration.
            outputs: blocks return `(x, output)`, and the outputs are returned stacked.

        Returns:
            `x`, or `(x, outputs)` with leaves (L, ...).
        """
        graphdef, params, rest = _states(self.layers)
        scanned = self.scan and self.count >= len(cycle)
        per_layer = {} if per_layer is None else dict(per_layer)

        def body(settings: Mapping[str, Any]) -> Callable[..., Any]:
            def run(params: Any, rest: Any, x: Any, index: Any, per_layer: Any) -> Any:
                def call(block: Any) -> Any:
                    inside = context.at_layer(index)
                    return block(x, *shared, context=inside, **per_layer, **settings, **shared_by_name)

                result, left = _run(graphdef, params, rest, call)
                x_next, output = result if outputs else (result, None)
                return x_next, (left, output)

            return blocks.wrap(run, rolled=scanned)

        bodies = [body(settings) for settings in cycle]
        inputs = (params, rest, jnp.arange(self.count), per_layer)
        if scanned:
            x, (left, output) = _scan(bodies, x, inputs, self.count)
        else:
            results = []
            for layer, (params_i, rest_i, _, per_layer_i) in enumerate(unstack(inputs, self.count)):
                x, result = bodies[layer % len(bodies)](params_i, rest_i, x, layer, per_layer_i)
                results.append(result)
            left, output = restack(results)
        if rest:
            nnx.update(self.layers, left)
        return (x, output) if outputs else x


def _scan(bodies: Sequence[Callable[..., Any]], x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
    """Scan over layers, one cycle of bodies per iteration; the layers of a last, incomplete cycle follow one by one."""
    period = len(bodies)
    groups = layers // period
    whole = groups * period

    def grouped(leaf: Any) -> Any:
        return leaf if period == 1 else leaf[:whole].reshape(groups, period, *leaf.shape[1:])

    def step(x: Any, inputs: PyTree) -> tuple[Any, PyTree]:
        results = []
        for body, (params, rest, index, per_layer) in zip(
            bodies, [inputs] if period == 1 else unstack(inputs, period), strict=True
        ):
            x, result = body(params, rest, x, index, per_layer)
            results.append(result)
        return x, results[0] if period == 1 else restack(results)

    unroll = min(groups, max(1, blocks.unroll() // period))
    x, found = jax.lax.scan(step, x, jax.tree.map(grouped, inputs), unroll=unroll)
    if period == 1:
        return x, found
    found = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), found)
    last = []
    for layer in range(whole, layers):
        params, rest, index, per_layer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], inputs)
        x, result = bodies[layer % period](params, rest, x, index, per_layer)
        last.append(result)
    if last:
        found = jax.tree.map(lambda head, tail: jnp.concatenate([head, tail]), found, restack(last))
    return x, found


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
        for index, block in enumerate(self.layers):
            graphdef, params, rest = _states(block)
            inside = context.at_layer(index)

            def run(params: Any, rest: Any, x: Any, graphdef: Any = graphdef, inside: Context = inside) -> Any:
                def call(module: Any) -> Any:
                    return module(x, *shared, context=inside, **shared_by_name)

                return _run(graphdef, params, rest, call)

            x, left = blocks.wrap(run, rolled=False)(params, rest, x)
            if rest:
                nnx.update(block, left)
        return x
