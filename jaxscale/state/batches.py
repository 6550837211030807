"""Rows of a batch: which of them a process feeds, where they lie, how they split into microbatches."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.typing import Array, Batch

BatchArrays = TypeVar("BatchArrays")


def shard_of(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """(index, count): this process feeds part `index` of `count` equal parts of the rows of a batch.

    Where the devices of a process hold rows that do not lie together (a torus orders devices by their links, not by
    their hosts), it reads the whole batch, (0, 1), and puts its own rows on its devices.
    """
    mine = sharding.addressable_devices_indices_map((rows,)).values()
    return equal_part({span(part, rows) for part in mine if part is not None}, rows)


def put(batch: Batch, sharding: NamedSharding, shard: tuple[int, int]) -> dict[str, Array]:
    """This process's rows of a batch, put on the devices as their part of the global batch."""
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    index, count = shard

    def spread(mine: np.ndarray) -> Array:
        rows, first = count * len(mine), index * len(mine)

        def part(where: tuple[slice, ...] | None) -> np.ndarray:
            assert where is not None
            start, stop = span(where, rows)
            return mine[start - first : stop - first]

        return jax.make_array_from_callback((rows, *mine.shape[1:]), sharding, part)

    return {name: spread(np.asarray(mine)) for name, mine in batch.items()}


def batch_shapes(experiment: Experiment) -> Batch:
    """Shapes of a global batch: as the data tells them, else of its first batch.

    Raises:
        UserError: the data cannot be opened.
    """
    shapes_of = getattr(experiment.data, "shapes", None)
    if shapes_of is not None:
        known = shapes_of(experiment.batch).items()
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in known}
    if experiment.data is None:
        raise UserError(f"experiment {experiment.name} has no data, so the shapes of its batches are unknown: give it")
    return shapes(next(iter(experiment.data.open(experiment.batch, experiment.seed).train())))


def shapes(batch: Batch, sharding: NamedSharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a global batch, of arrays or of shapes."""
    return {name: jax.ShapeDtypeStruct(np.shape(rows), rows.dtype, sharding=sharding) for name, rows in batch.items()}


def span(where: Sequence[slice], rows: int) -> tuple[int, int]:
    """First row, and the one behind the last, of a part of an array of `rows`."""
    return where[0].start or 0, rows if where[0].stop is None else where[0].stop


def equal_part(spans: set[tuple[int, int]], rows: int) -> tuple[int, int]:
    """(index, count) of the one of `count` equal parts of `rows` that the spans make up; (0, 1) if they make up none.

    Example:
        >>> equal_part({(4, 6), (6, 8)}, 8), equal_part({(0, 2), (4, 6)}, 8)
        ((1, 2), (0, 1))
    """
    start, stop = min(a for a, _ in spans), max(b for _, b in spans)
    size = stop - start
    together = sum(b - a for a, b in spans) == size
    return (start // size, rows // size) if together and rows % size == 0 and start % size == 0 else (0, 1)


def microbatches(tree: BatchArrays, *, parts: int) -> BatchArrays:
    """Arrays (B, ...) as (parts, B / parts, ...): every parts-th row, so that no row changes its device on any mesh."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), tree)
