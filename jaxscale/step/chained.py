"""Chained: a pipeline whose stages are unlike blocks, those of a `layers.Chain`.

One program serves all devices, so what differs between stages is made alike around a `lax.switch` on the stage's
number. The parameters of a stage travel as one flat array of the longest stage's size: a device holds those of its own
stages alone while it computes, and float32 gradients of no more. Messages differ in shape from boundary to boundary;
each is flattened, type by type, into the form of the longest. Between steps parameters and optimizer state lie as those
that stages share do: split over the pipe axis wherever a dim divides. Each is gathered once before the loop, by every
device, of which its stage's keeps it, and its gradient is scattered once after it.

Left out, and refused by name: what would need the array to be split (tensor and sequence axes, ZeRO 3), residuals in
slots, whose shapes are each stage's own (the stash is a stage's input), memory rules that look at all blocks at once,
and asynchronous schedules.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import blocks
from jaxscale.blocks import Context, Cut
from jaxscale.step.layout import PIPE_AXIS
from jaxscale.step.pipelined import Parts, Pipelined, Reached
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Batch, Params

FLAT = "flat"
"""The one stacked parameter: each stage's weights in a row."""


@dataclasses.dataclass(frozen=True)
class Row:
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
class Wire:
    """Messages of unlike shapes in one form: a flat array for each type, as long as the longest message asks for.

    Args:
        shapes: what crosses each boundary: trees of `jax.ShapeDtypeStruct`.

    Example:
        >>> wire = Wire([(jnp.ones((2, 3)),), (jnp.ones(4), jnp.ones(1, int))])
        >>> packed = wire.pack((jnp.arange(4.0), jnp.array([7])))
        >>> {name: leaf.tolist() for name, leaf in packed.items()}
        {'float32': [0.0, 1.0, 2.0, 3.0, 0.0, 0.0], 'int32': [7]}
        >>> [leaf.tolist() for leaf in wire.unpack(packed, 1)]
        [[0.0, 1.0, 2.0, 3.0], [7]]
    """

    shapes: Sequence[Any]

    @property
    def lengths(self) -> dict[str, int]:
        """Elements of each type."""
        found: dict[str, int] = {}
        for tree in self.shapes:
            here: collections.Counter[str] = collections.Counter()
            for leaf in jax.tree.leaves(tree):
                here[str(leaf.dtype)] += math.prod(leaf.shape)
            found = {name: max(found.get(name, 0), here[name]) for name in {**found, **here}}
        return dict(sorted(found.items()))

    def pack(self, tree: Any) -> dict[str, Array]:
        """A message in the form of all."""
        flat: dict[str, list[Array]] = {name: [] for name in self.lengths}
        for leaf in jax.tree.leaves(tree):
            flat[str(leaf.dtype)].append(leaf.reshape(-1))
        return {name: padded(flat[name], length, name) for name, length in self.lengths.items()}

    def unpack(self, packed: Mapping[str, Array], boundary: int) -> Any:
        """The message at a boundary: 0 enters the first stage."""
        at = dict.fromkeys(packed, 0)

        def leaf(shape: Any) -> Array:
            name, size = str(shape.dtype), math.prod(shape.shape)
            at[name] += size
            return packed[name][at[name] - size : at[name]].reshape(shape.shape)

        return jax.tree.map(leaf, self.shapes[boundary])


def padded(parts: Sequence[Array], length: int, dtype: Any) -> Array:
    """Flat arrays one behind the other, and zeros behind the last."""
    rest = length - sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros((rest,), dtype)])


class Chained(Pipelined):
    """What a train step with a pipeline of unlike blocks computes; arguments as of `Pipelined`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert self.stages.chain is not None
        self._prefix = f"{self.stages.chain}/layers/"
        starts, found, sizes = self.stages.starts, {}, [0] * len(self.stages.layers)
        for name, leaf in named_leaves(self.functional.params).items():
            if name.startswith(self._prefix):
                stage = sum(start <= self._block(name) for start in starts) - 1
                found[name] = Row(stage, sizes[stage], leaf.shape)
                sizes[stage] = found[name].end
        self.places: dict[str, Row] = found
        self.length = max(sizes)

    @property
    def stage_depth(self) -> None:
        """Blocks are unlike, and each is traced."""
        return None

    def _block(self, name: str) -> int:
        return int(name.removeprefix(self._prefix).split("/")[0])

    def _of_a_stage(self, name: str) -> bool:
        return name.startswith(self._prefix)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _home_of(self, stage: int) -> tuple[int, int]:
        """The rank whose weights those of a stage are, and where among its own."""
        rank = self.stages.schedule.routes[0][stage]
        return rank, self.stages.homes[rank].index(stage)

    def _chunks(self, stacked: dict[str, Array]) -> dict[str, Array]:
        """The arrays (chunks, length) of this rank's stages, and of those that it has copies of."""
        dtype, rank = jnp.dtype(self.plan.precision), jax.lax.axis_index(PIPE_AXIS)
        rows = [jnp.zeros((self.length,), dtype)] * len(self.stages.homes[0])
        for stage in range(len(self.stages.layers)):
            home, chunk = self._home_of(stage)
            parts = [stacked[name].astype(dtype).reshape(-1) for name in self._names(stage)]
            rows[chunk] = jnp.where(rank == home, padded(parts, self.length, dtype), rows[chunk])
        return self._with_copies({FLAT: jnp.stack(rows)})

    def _home(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """The gradient of each parameter on its stage's rank, zeros elsewhere."""
        rows, rank = self._added_home(gradients)[FLAT], jax.lax.axis_index(PIPE_AXIS)
        found = {}
        for name, place in self.places.items():
            home, chunk = self._home_of(place.stage)
            mine = rows[chunk, place.begin : place.end]
            found[name] = jnp.where(rank == home, mine, 0.0).reshape(place.shape)
        return found

    def _names(self, stage: int) -> list[str]:
        return [name for name, place in self.places.items() if place.stage == stage]

    def _own(self, flat: Array, stage: int) -> list[Any]:
        """The parameters of a stage's blocks, as each block has them."""
        layers: Any = self.functional.params
        for part in self._prefix.strip("/").split("/"):
            layers = layers[part]
        first, count = self.stages.starts[stage], self.stages.layers[stage]

        def leaf(path: Any, _: Any) -> Array:
            place = self.places[f"{self._prefix}{path_name(path)}"]
            return flat[place.begin : place.end].reshape(place.shape)

        numbers = {int(key): key for key in layers}
        own = {numbers[block]: layers[numbers[block]] for block in range(first, first + count) if block in numbers}
        found = jax.tree_util.tree_map_with_path(leaf, own)
        return [found.get(numbers.get(block), {}) for block in range(first, first + count)]

    # -- the model in parts --------------------------------------------------------------------------------------------

    def _parts(self, of: Callable[[Any, Batch, Context], Any]) -> Parts:
        """As of `Pipelined`; what crosses a boundary is packed."""
        ends = [0, *itertools.accumulate(self.stages.layers)]

        def traced(between: Any, shared: Any, microbatch: Any, key: Any) -> Any:
            batch, examples = microbatch
            # the blocks get theirs from the stage's array, and these are never read
            absent = {name: jnp.zeros(place.shape, self.plan.precision) for name, place in self.places.items()}
            module = self.functional.module(self._whole(absent, shared), {})
            cut = Cut(jnp.zeros((0,), jnp.int32), self.stages.starts, False, between)
            try:
                with blocks.cutting(cut):
                    return of(module, batch, self.context(key, examples))
            except Reached as reached:
                return reached.value

        def wire(run: Any, x: Any) -> Wire:
            shapes = [jax.eval_shape(lambda x: x, x)]
            for start, stop in itertools.pairwise(ends):
                shapes.append(jax.eval_shape(run(start, stop), shapes[-1]))
            return Wire(shapes)

        def before(stacked: Any, shared: Any, microbatch: Any, key: Any, stage: Any) -> Any:
            def between(run: Any, x: Any) -> Any:
                raise Reached(wire(run, x).pack(x))

            return traced(between, shared, microbatch, key)

        def inside(packed: Any, stacked: Any, shared: Any, microbatch: Any, key: Any, stage: Any) -> Any:
            def between(run: Any, x: Any) -> Any:
                form = wire(run, x)

                def branch(number: int) -> Callable[[Any, Any], Any]:
                    def compute(flat: Any, packed: Any) -> Any:
                        blocks_of = run(ends[number], ends[number + 1], self._own(flat, number))
                        return form.pack(blocks_of(form.unpack(packed, number)))

                    return compute

                branches = [branch(number) for number in range(len(self.stages.layers))]
                raise Reached(jax.lax.switch(stage, branches, stacked[FLAT], packed))

            return traced(between, shared, microbatch, key)

        def behind(packed: Any, stacked: Any, shared: Any, microbatch: Any, key: Any, stage: Any) -> Any:
            def between(run: Any, x: Any) -> Any:
                return wire(run, x).unpack(packed, len(self.stages.layers))

            return traced(between, shared, microbatch, key)

        return Parts(before, inside, behind)

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Any, examples: Array) -> Array:
        """The objective of one microbatch of the whole model: to trace, not to run."""
        return self._loss(self._compute_params(params), rest, batch, self.context(key, examples))[0]
