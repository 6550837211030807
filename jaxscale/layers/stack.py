"""Stack and Chain: the sequence of blocks of a model, alike and unlike.

Every block is called through `blocks.wrap`, which is how remat, offload and pipelines reach a model from outside. A
block's arrays enter the wrapped function as arguments, never by closure, and what it mutates (running statistics)
leaves as results.
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
    `layers/w` of shape (L, ...) holds what `layers/i/w` would in a `Chain` (`unstack`). Built under
    `blocks.grouping((25, 7))`, a stack of 32 blocks keeps the last seven under `layers_from_25`.

    Args:
        make: the block from random streams.
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

        def built(rngs: nnx.Rngs) -> list[nnx.Module]:
            if len(self.groups) == 1:
                return [build(rngs)]
            graphdef, state = nnx.split(rngs)
            return [
                build(nnx.merge(graphdef, jax.tree.map(lambda leaf, part=part: leaf[part], state)))
                for part in self._spans()
            ]

        for part, module in zip(self._spans(), nnx.split_rngs(splits=layers)(built)(rngs), strict=True):
            setattr(self, group_name(part.start), module)

    def _spans(self) -> list[slice]:
        """The layers of each group."""
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
        per_layer = {} if per_layer is None else dict(per_layer)
        treatment = blocks.treatment()
        one_by_one = treatment.sequence is not None or not self.scan
        calls, found = [], []

        def block(graphdef: Any, settings: Mapping[str, Any]) -> BlockFunction:
            def run(params: Any, rest: Any, x: Any, index: Any, per_layer: Any) -> Any:
                def call(block: Any) -> Any:
                    inside = context.at_layer(index)
                    return block(x, *shared, context=inside, **per_layer, **settings, **shared_by_name)

                result, left = _run(graphdef, params, rest, call)
                x_next, output = result if outputs else (result, None)
                return x_next, (left, output)

            return run

        cut = blocks.cut()
        if cut is not None:
            if per_layer or outputs:
                raise UserError(
                    "pipeline: this model gives its blocks something of each layer's own, or takes something from each "
                    "layer, and a stage sends its neighbours nothing but x; put it into x, or train without a pipeline"
                )
            return cut.between(self._stage(cut, [functools.partial(block, settings=one) for one in cycle]), x)

        runs = treatment.runs(self.count)
        for part in self._spans():
            module = getattr(self, group_name(part.start))
            graphdef, params, rest = _states(module)

            for start, stop, wrapper in runs:
                start, stop = max(start, part.start), min(stop, part.stop)
                if start >= stop:
                    continue
                own = slice(start - part.start, stop - part.start)
                inputs = (
                    *_cut((params, rest), own, part.stop - part.start),
                    jnp.arange(start, stop, dtype=jnp.int32),
                    _cut(per_layer, slice(start, stop), self.count),
                )
                settings = [cycle[layer % len(cycle)] for layer in range(start, start + len(cycle))]
                alike = _Alike([block(graphdef, one) for one in settings], wrapper, treatment.unroll, treatment.segment)
                if one_by_one:
                    calls += alike.calls(inputs, stop - start)
                else:
                    x, result = alike.scanned(x, inputs, stop - start)
                    found.append(result)
        if one_by_one and treatment.segment is not None and treatment.sequence is None:
            for start in range(0, self.count, treatment.segment):
                x, results = blocks.again(calls[start : start + treatment.segment], x)
                found += [restack(results)]
        elif one_by_one:
            x, results = blocks.run(calls, x)
            found = [restack(results)]
        left, output = _joined(found)
        for part in self._spans():
            if left:
                nnx.update(getattr(self, group_name(part.start)), _cut(left, part, self.count))
        return (x, output) if outputs else x

    def _stage(self, cut: Cut, cycle: Sequence[Callable[[Any], BlockFunction]]) -> Callable[[Any], Any]:
        """What runs a pipeline stage's layers, which are all that the parameters here hold.

        Raises:
            UserError: layers hold more than parameters, or a stage begins within a cycle of unlike layers.
        """
        graphdef, params, rest = _states(self.layers)
        if jax.tree.leaves(rest):
            raise UserError(
                "pipeline: the blocks of this model hold running statistics, which microbatches would change one after "
                "the other; use layer or group norm, or train without a pipeline"
            )
        inside = [start for start in cut.starts if start % len(cycle)]
        if inside:
            raise UserError(
                f"pipeline: a stage begins with layer {inside[0]}, and the layers of this model repeat every "
                f"{len(cycle)}: give each stage a multiple of {len(cycle)} layers"
            )
        treatment, rows = blocks.treatment(), len(cut.numbers)
        inputs = (params, rest, cut.numbers, {})

        def run(x: Any) -> Any:
            for start, stop, wrapper in treatment.runs(rows):
                alike = _Alike(
                    [_gathered(make(graphdef), cut) for make in cycle],
                    _where_alive(wrapper) if cut.padded else wrapper,
                    treatment.unroll,
                    treatment.segment,
                )
                own = _cut(inputs, slice(start, stop), rows)
                if treatment.sequence is not None or not self.scan:
                    x, _ = blocks.run(alike.calls(own, stop - start), x)
                else:
                    x, _ = alike.scanned(x, own, stop - start)
            return x

        return run


def _gathered(block: BlockFunction, cut: Cut) -> BlockFunction:
    """A block that makes its parameters whole first."""
    if cut.gather is None:
        return block
    gather = cut.gather
    return lambda params, *given: block(gather(params), *given)


def _where_alive(wrapper: Wrapper) -> Wrapper:
    """`wrapper`, of blocks that leave `x` alone where the layer's number is negative."""

    def wrap(block: BlockFunction, rolled: bool) -> BlockFunction:
        wrapped = wrapper(block, rolled)

        def run(params: Any, rest: Any, x: Any, index: Any, per_layer: Any) -> Any:
            return jax.lax.cond(
                index >= 0, wrapped, lambda *given: (given[2], (rest, None)), params, rest, x, index, per_layer
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
    """The name that a parameter has where its stack is not in groups, and the group's first layer.

    Example:
        >>> in_one_stack("blocks/layers_from_25/mlp"), in_one_stack("blocks/layers/mlp")
        (('blocks/layers/mlp', 25), ('blocks/layers/mlp', 0))
    """
    groups = list(re.finditer(r"(?:^|/)layers(_from_(\d+))(?=/|$)", name))
    if not groups:
        return name, 0
    return name[: groups[-1].start(1)] + name[groups[-1].end(1) :], int(groups[-1][2])


def _cut(tree: PyTree, part: slice, layers: int) -> PyTree:
    """Some layers of leaves (L, ...)."""
    if (part.start, part.stop) == (0, layers):
        return tree
    return jax.tree.map(lambda leaf: leaf[part], tree)


def _joined(trees: Sequence[PyTree]) -> PyTree:
    """The inverse of `_cut`, over all parts."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Neighbouring layers that are treated alike.

    Inputs are trees of leaves (n, ...): parameters, other state, the layers' numbers, what each layer is given.

    Args:
        cycle: the block of the first layer, of the second, ...; again from the start when all have run.
        wrapper: of each block.
        unroll: layers per iteration.
        segment: layers that are kept by the input of the first alone; `None` for one level.
    """

    cycle: Sequence[BlockFunction]
    wrapper: Wrapper
    unroll: int
    segment: int | None

    def calls(self, inputs: PyTree, layers: int) -> list[Call]:
        """The blocks one by one."""
        wrapped = [self.wrapper(block, False) for block in self.cycle]
        return [
            Call(wrapped[layer % len(wrapped)], (params, rest), (index, per_layer))
            for layer, (params, rest, index, per_layer) in enumerate(unstack(inputs, layers))
        ]

    def scanned(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """`x` after the layers, and what they left; the layers of a last, incomplete cycle follow one by one."""
        whole = layers - layers % len(self.cycle)
        found = []
        if whole:
            loop = self._cycles if self.segment is None else self._segments
            x, left = loop(x, _cut(inputs, slice(0, whole), layers), whole)
            found.append(left)
        if whole < layers:
            last = self.calls(_cut(inputs, slice(whole, layers), layers), layers - whole)
            x, left = blocks.one_after_another(last, x)
            found.append(restack(left))
        return x, _joined(found)

    def _cycles(self, x: Any, inputs: PyTree, layers: int, inside: bool = False) -> tuple[Any, PyTree]:
        """A scan over whole cycles; `inside` says that it is the body of another loop."""
        period = len(self.cycle)
        count = layers // period
        unroll = min(count, max(1, self.unroll // period))
        # a loop of one iteration is no loop to XLA
        rolled = (inside or count > 1) and self.unroll == 1
        wrapped = [self.wrapper(block, rolled) for block in self.cycle]

        def step(x: Any, inputs: PyTree) -> tuple[Any, PyTree]:
            results = []
            for block, one in zip(wrapped, [inputs] if period == 1 else unstack(inputs, period), strict=True):
                x, result = block(*one[:2], x, *one[2:])
                results.append(result)
            return x, results[0] if period == 1 else restack(results)

        x, found = jax.lax.scan(step, x, inputs if period == 1 else _folded(inputs, count), unroll=unroll)
        return x, found if period == 1 else _unfolded(found)

    def _segments(self, x: Any, inputs: PyTree, layers: int) -> tuple[Any, PyTree]:
        """A scan over segments, each of which runs again in the backward pass; a shorter one follows."""
        assert self.segment is not None
        period = len(self.cycle)
        size = min(layers, max(1, self.segment // period) * period)
        count = layers // size
        whole = count * size

        def part(size: int, rolled: bool) -> Callable[..., Any]:
            return blocks.run_again(lambda x, inputs: self._cycles(x, inputs, size, rolled), rolled=rolled)

        x, found = jax.lax.scan(part(size, count > 1), x, _folded(_cut(inputs, slice(0, whole), layers), count))
        found = _unfolded(found)
        if whole < layers:
            x, left = part(layers - whole, False)(x, _cut(inputs, slice(whole, layers), layers))
            found = _joined([found, left])
        return x, found


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

        def call(block: nnx.Module, inside: Context) -> Call:
            graphdef, params, rest = _states(block)

            def run(params: Any, rest: Any, x: Any) -> Any:
                return _run(graphdef, params, rest, lambda module: module(x, *shared, context=inside, **shared_by_name))

            return Call(blocks.wrap(run, rolled=False), (params, rest))

        cut = blocks.cut()
        if cut is not None:

            def part(start: int, stop: int, params: Sequence[Any] | None = None) -> Callable[[Any], Any]:
                """Some of the blocks, with parameters in place of their own."""
                found = [call(self.layers[index], context.at_layer(index)) for index in range(start, stop)]
                if params is not None:
                    found = [one._replace(before=(own, one.before[1])) for one, own in zip(found, params, strict=True)]
                return lambda x: blocks.run(found, x)[0]

            return cut.between(part, x)
        calls = [call(block, context.at_layer(index)) for index, block in enumerate(self.layers)]
        x, found = blocks.run(calls, x)
        for block, left in zip(self.layers, found, strict=True):
            if left:
                nnx.update(block, left)
        return x
