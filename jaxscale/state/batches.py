"""Rows of a batch: the rows that a process feeds, the devices on which they lie, and their split into microbatches."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.errors import UserError
from jaxscale.layers.targets import IGNORED
from jaxscale.recipe.experiment import Experiment
from jaxscale.typing import Array, Batch

BatchArrays = TypeVar("BatchArrays")


def shard_of(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """(index, count): this process feeds part `index` of `count` equal parts of the rows of a batch.

    If the rows on a process's devices are not contiguous (a torus orders devices by their links, not by their hosts),
    the process reads the whole batch, (0, 1), and puts its own rows on its devices.

    Args:
        sharding: sharding of the arrays of a batch.
        rows: number of rows of the global batch.
    """
    local_indices = sharding.addressable_devices_indices_map((rows,)).values()
    return equal_part({span(index, rows) for index in local_indices if index is not None}, rows)


def put(batch: Batch, sharding: NamedSharding, shard: tuple[int, int]) -> dict[str, Array]:
    """Put the global batch on the devices, from this process's rows, and return its arrays.

    Args:
        batch: arrays with this process's rows.
        sharding: sharding of the arrays of the global batch.
        shard: (index, count) from `shard_of`: these rows are part `index` of `count` equal parts.
    """
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    index, count = shard

    def put_array(local_rows: np.ndarray) -> Array:
        row_count, first = count * len(local_rows), index * len(local_rows)

        def rows_at(slices: tuple[slice, ...] | None) -> np.ndarray:
            assert slices is not None
            start, stop = span(slices, row_count)
            return local_rows[start - first : stop - first]

        return jax.make_array_from_callback((row_count, *local_rows.shape[1:]), sharding, rows_at)

    return {name: put_array(np.asarray(local_rows)) for name, local_rows in batch.items()}


def check_values(batch: Batch, class_counts: Mapping[str, int]) -> None:
    """Raise an error for a batch on the host with tokens or labels that the model does not have.

    Arrays on devices are not read. A target of weight 0 may hold any number.

    Args:
        batch: the batch.
        class_counts: for each array of tokens or labels, by its name, the number of tokens or classes.

    Raises:
        UserError: a number is not from 0 to the count, nor -100 in targets or labels; or the weights add up to less
            than 0.

    Example:
        >>> check_values({"labels": np.array([0, -100, 9])}, {"labels": 10})
    """
    weights = batch.get("weights")
    if isinstance(weights, np.ndarray) and weights.sum() < 0:
        raise UserError(
            f"weights: got a batch whose weights add up to {weights.sum():.4g}, expected 0 or more: the loss is "
            "divided by their sum"
        )
    for name, count in class_counts.items():
        numbers = batch.get(name)
        if not isinstance(numbers, np.ndarray) or not numbers.size or 0 <= numbers.min() <= numbers.max() < count:
            continue
        is_wrong = (numbers < 0) | (numbers >= count)
        if name != "tokens":
            is_wrong &= numbers != IGNORED
            if isinstance(weights, np.ndarray) and weights.shape == numbers.shape[: weights.ndim]:
                is_wrong &= weights.reshape(weights.shape + (1,) * (numbers.ndim - weights.ndim)) != 0
        if is_wrong.any():
            ignored_text = "" if name == "tokens" else f", or {IGNORED} for a target that the loss ignores"
            raise UserError(
                f"{name}: got {numbers[is_wrong][0]}, expected numbers from 0 to {count - 1}, as the model has {count} "
                f"classes{ignored_text}"
            )


def batch_shapes(experiment: Experiment) -> Batch:
    """Shapes of a global batch: those that the data specifies, otherwise those of its first batch.

    Raises:
        UserError: the experiment has no data.
    """
    shapes_of = getattr(experiment.data, "shapes", None)
    if shapes_of is not None:
        items = shapes_of(experiment.batch).items()
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in items}
    if experiment.data is None:
        raise UserError(f"experiment {experiment.name} has no data, so the shapes of its batches are unknown; set data")
    return shapes(next(iter(experiment.data.open(experiment.batch, experiment.seed).train())))


def shapes(batch: Batch, sharding: NamedSharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch of arrays (or of shapes), with a sharding if one is given."""
    return {name: jax.ShapeDtypeStruct(np.shape(rows), rows.dtype, sharding=sharding) for name, rows in batch.items()}


def span(slices: Sequence[slice], rows: int) -> tuple[int, int]:
    """(start, stop) of the rows that the first of some slices selects, from an array with a number of rows."""
    return slices[0].start or 0, rows if slices[0].stop is None else slices[0].stop


def equal_part(spans: set[tuple[int, int]], rows: int) -> tuple[int, int]:
    """(index, count) if spans of rows together are part `index` of `count` equal parts of all rows, otherwise (0, 1).

    Args:
        spans: (start, stop) of each span of rows.
        rows: number of all rows.

    Example:
        >>> equal_part({(4, 6), (6, 8)}, 8), equal_part({(0, 2), (4, 6)}, 8)
        ((1, 2), (0, 1))
    """
    start, stop = min(start for start, _ in spans), max(stop for _, stop in spans)
    size = stop - start
    is_contiguous = sum(stop - start for start, stop in spans) == size
    return (start // size, rows // size) if is_contiguous and rows % size == 0 and start % size == 0 else (0, 1)


def microbatches(tree: BatchArrays, *, parts: int) -> BatchArrays:
    """Arrays (B, ...) split into microbatches, as (parts, B / parts, ...).

    Microbatch i has the rows i, i + parts, i + 2 parts, ..., so that no row changes its device on any mesh.

    Args:
        tree: arrays whose first dim is the B rows of a batch.
        parts: number of microbatches.
    """
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), tree)
