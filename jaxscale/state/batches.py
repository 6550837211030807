"""Rows of a batch: the rows that each process feeds, their devices, and their division into microbatches."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.data.arrays import common_row_count
from jaxscale.errors import UserError
from jaxscale.layers.targets import IGNORED
from jaxscale.recipe.experiment import Experiment
from jaxscale.sharding.partition import dim_axes, shard_count
from jaxscale.typing import Array, Batch

BatchArrays = TypeVar("BatchArrays")  # a tree of arrays


def shard_of(sharding: NamedSharding, row_count: int) -> tuple[int, int]:
    """Return (index, count): this process feeds part `index` of `count` equal parts of the rows of a batch.

    If the rows on a process's devices are not contiguous (a torus orders devices by their links, not by their hosts),
    the result is (0, 1): the process then reads the whole batch, and puts on its devices only their rows.

    Args:
        sharding: sharding of the arrays of a batch.
        row_count: number of rows of the global batch.
    """
    slices_of_devices = sharding.addressable_devices_indices_map((row_count,)).values()
    return equal_part({span(slices, row_count) for slices in slices_of_devices if slices is not None}, row_count)


def put(batch: Batch, sharding: NamedSharding, shard: tuple[int, int]) -> dict[str, Array]:
    """Put the rows of this process on the devices, and return the arrays of the global batch.

    Args:
        batch: arrays with this process's rows.
        sharding: sharding of the arrays of the global batch.
        shard: (index, count) from `shard_of`: these rows are part `index` of `count` equal parts.

    Raises:
        UserError: the rows cannot be split evenly over the devices.
    """
    row_count = len(next(iter(batch.values()))) * shard[1] if batch else 0
    row_shard_count = shard_count(sharding.mesh, next(iter(dim_axes(sharding.spec)), ()))
    if row_count % row_shard_count:
        raise UserError(
            f"batch: got {row_count} rows, which {row_shard_count} devices cannot share evenly: give a multiple of "
            f"{row_shard_count}, such as {-(-row_count // row_shard_count) * row_shard_count}, and set it as batch of "
            "the Experiment"
        )
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    shard_index, process_shard_count = shard

    def put_array(local_rows: np.ndarray) -> Array:
        array_row_count, first_row = process_shard_count * len(local_rows), shard_index * len(local_rows)

        def rows_at(slices: tuple[slice, ...] | None) -> np.ndarray:
            assert slices is not None
            start, stop = span(slices, array_row_count)
            return local_rows[start - first_row : stop - first_row]

        return jax.make_array_from_callback((array_row_count, *local_rows.shape[1:]), sharding, rows_at)

    return {name: put_array(np.asarray(local_rows)) for name, local_rows in batch.items()}


def check_rows(batch: Batch) -> None:
    """Raise UserError if a batch is not a dict of arrays, or if its arrays differ in their numbers of rows.

    Example:
        >>> check_rows({"x": np.ones((2, 3)), "labels": np.array([0, 1])})
    """
    if not isinstance(batch, Mapping):
        raise UserError(
            f"batch: got a {type(batch).__name__}, expected a dict of arrays, such as {{'x': x, 'y': y}}, with "
            "the names that the score reads"
        )
    for name, array in batch.items():
        if not hasattr(array, "dtype") and not isinstance(array, int | float):
            raise UserError(f"batch: {name} is a {type(array).__name__}, expected an array, such as np.asarray({name})")
        if isinstance(array, np.ndarray) and array.dtype.kind not in "biufcV":
            raise UserError(f"batch: {name} is {array.dtype}{list(array.shape)}, expected an array of numbers")
        if not np.shape(array):
            raise UserError(f"batch: {name} is a single number, expected an array with one row for each example")
    common_row_count(batch, "the batch")


def check_values(batch: Batch, class_counts: Mapping[str, int]) -> None:
    """Raise UserError if a batch on the host has tokens or labels that the model does not have.

    Arrays on devices, and arrays of types other than integers, are not checked. A target of weight 0 may have any
    value.

    Args:
        batch: the batch.
        class_counts: number of tokens in the vocabulary, or of classes, by the name of the array of tokens or labels.

    Raises:
        UserError: a token or class lies outside the range from 0 to the count minus 1, and is not the -100 that targets
            and labels may contain; or the weights add up to less than 0.

    Example:
        >>> check_values({"labels": np.array([0, -100, 9])}, {"labels": 10})
    """
    weights = batch.get("weights")
    if isinstance(weights, np.ndarray) and weights.sum() < 0:
        raise UserError(
            f"weights: got a batch whose weights add up to {weights.sum():.4g}, expected 0 or more: the loss is "
            "divided by their sum"
        )
    for name, class_count in class_counts.items():
        class_indices = batch.get(name)
        if not isinstance(class_indices, np.ndarray) or class_indices.dtype.kind not in "iu" or not class_indices.size:
            continue
        if class_indices.min() >= 0 and class_indices.max() < class_count:
            continue
        is_wrong = (class_indices < 0) | (class_indices >= class_count)
        if name != "tokens":
            is_wrong &= class_indices != IGNORED
            if isinstance(weights, np.ndarray) and weights.shape == class_indices.shape[: weights.ndim]:
                is_wrong &= weights.reshape(weights.shape + (1,) * (class_indices.ndim - weights.ndim)) != 0
        if is_wrong.any():
            ignored_text = "" if name == "tokens" else f", or {IGNORED} for a target that the loss ignores"
            raise UserError(
                f"{name}: got {class_indices[is_wrong][0]}, expected numbers from 0 to {class_count - 1}, as the model "
                f"has {class_count} classes{ignored_text}"
            )


def batch_shapes(experiment: Experiment) -> Batch:
    """Return the abstract arrays of a global batch.

    The method `shapes` of the data specifies them. If the data has no such method, its first batch is read.

    Raises:
        UserError: the experiment has no data.
    """
    shapes_of = getattr(experiment.data, "shapes", None)
    if shapes_of is not None:
        shapes_and_dtypes = shapes_of(experiment.batch)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes_and_dtypes.items()}
    if experiment.data is None:
        raise UserError(f"experiment {experiment.name} has no data, so the shapes of its batches are unknown; set data")
    return abstract_arrays(next(iter(experiment.data.open(experiment.batch, experiment.seed).train())))


def abstract_arrays(batch: Batch, sharding: NamedSharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and `sharding` of each array of a batch, by name.

    The batch may contain arrays or abstract arrays. The dtypes are those on devices: unless `jax_enable_x64` is set,
    64-bit types become 32-bit types.
    """
    abstract_by_name = {}
    for name, array in batch.items():
        is_key = not isinstance(array.dtype, np.dtype)
        dtype = array.dtype if is_key else jax.dtypes.canonicalize_dtype(array.dtype)
        abstract_by_name[name] = jax.ShapeDtypeStruct(np.shape(array), dtype, sharding=sharding)
    return abstract_by_name


def span(slices: Sequence[slice], row_count: int) -> tuple[int, int]:
    """Return (start, stop) of the rows that `slices` (one slice per dim) select from an array with `row_count` rows."""
    row_slice = slices[0]
    return row_slice.start or 0, row_count if row_slice.stop is None else row_slice.stop


def equal_part(spans: set[tuple[int, int]], row_count: int) -> tuple[int, int]:
    """Return (index, count) if the spans together are part `index` of `count` equal parts of all rows, else (0, 1).

    Args:
        spans: (start, stop) of each span of rows.
        row_count: number of all rows.

    Example:
        >>> equal_part({(4, 6), (6, 8)}, 8), equal_part({(0, 2), (4, 6)}, 8)
        ((1, 2), (0, 1))
    """
    first_row, last_stop = min(start for start, _ in spans), max(stop for _, stop in spans)
    part_row_count = last_stop - first_row
    is_contiguous = sum(stop - start for start, stop in spans) == part_row_count
    if not is_contiguous or row_count % part_row_count or first_row % part_row_count:
        return 0, 1
    return first_row // part_row_count, row_count // part_row_count


def microbatches(tree: BatchArrays, *, count: int) -> BatchArrays:
    """Return arrays (B, ...) split into microbatches, as (count, B / count, ...).

    Microbatch i has the rows i, i + count, i + 2 count and so on. No row moves to another device, whatever the mesh.

    Args:
        tree: arrays whose first dim is the B rows of a batch.
        count: number of microbatches.
    """
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), tree)
