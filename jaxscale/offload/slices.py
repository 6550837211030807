"""Update arrays in host memory in place, slice by slice on the device.

A loop carries the arrays and writes each slice back in place. XLA then keeps one copy of a donated array on the host,
and a slice of it on the device. A scan that stacks its results would hold a second copy, and moving the whole array to
the device would save no device memory.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from jaxscale.sharding.memory_space import on_host, to_device, to_host
from jaxscale.typing import Array

SLICE_BYTES = 16 * 2**20
"""Default size of the largest slice on each device, in bytes: about a millisecond of copying over PCIe."""


@dataclasses.dataclass(frozen=True)
class SliceCut:
    """How to cut an array into equal slices.

    Args:
        dim: dim along which the array is cut.
        pieces: number of slices; 1 leaves the array whole.
    """

    dim: int = 0
    pieces: int = 1


def cut(
    shape: Sequence[int],
    itemsize: int,
    sharding: Sharding | None,
    slice_bytes: int = SLICE_BYTES,
    units: Sequence[int] | None = None,
) -> SliceCut:
    """Return how to cut an array into the fewest equal slices of at most `slice_bytes`.

    The array is cut along the first unsharded dim that allows such small slices. If no dim allows them, the array is
    cut along the unsharded dim that gives the smallest slices. A leading dim of layers is never sharded, and its slices
    are contiguous in memory.

    Args:
        shape: shape of the array.
        itemsize: bytes of an element.
        sharding: sharding of the array; `None` for one device.
        slice_bytes: largest slice on each device in bytes.
        units: for each dim, a length that must divide the length of a slice; `None` allows any length.

    Example:
        >>> cut((16, 1024, 4096), 4, None)
        SliceCut(dim=0, pieces=16)
        >>> cut((16, 1024), 4, None)
        SliceCut(dim=0, pieces=1)
        >>> cut((4096, 4096), 4, None), cut((4096, 4096), 4, None, units=(2048, 1))
        (SliceCut(dim=0, pieces=4), SliceCut(dim=1, pieces=4))
    """
    shard_shape = tuple(shape) if sharding is None else sharding.shard_shape(tuple(shape))
    shard_bytes = math.prod(shard_shape) * itemsize
    finest_cut = SliceCut()
    for dim, (global_size, shard_size) in enumerate(zip(shape, shard_shape, strict=True)):
        if global_size != shard_size:
            continue
        unit_count = global_size if units is None else global_size // units[dim]
        divisors = [count for count in range(1, unit_count + 1) if unit_count % count == 0]
        slice_count = next((count for count in divisors if shard_bytes <= count * slice_bytes), unit_count)
        if shard_bytes <= slice_count * slice_bytes:
            return SliceCut(dim, slice_count)
        finest_cut = SliceCut(dim, slice_count) if slice_count > finest_cut.pieces else finest_cut
    return finest_cut


Body = Callable[[list[Array], list[Array], Any], tuple[list[Array], Any]]
"""The function that `sweep` runs: `(slices to read, slices to replace, carry) -> (new slices, new carry)`."""


def sweep(
    body: Body,
    slice_count: int,
    read_arrays_and_dims: Sequence[tuple[Array, int]],
    written_arrays_and_dims: Sequence[tuple[Array, int]],
    carry: Any,
) -> tuple[list[Array], Any]:
    """Run `body` on the slices of some arrays, one by one.

    Args:
        body: function of slices of the read arrays, slices of the written arrays (all on the device) and the carry. It
            returns new slices of the written arrays, and the new carry.
        slice_count: number of slices of each array; with 1, `body` runs once, on the whole arrays.
        read_arrays_and_dims: (array, dim to cut) for each array that is only read.
        written_arrays_and_dims: (array, dim to cut) for each array whose slices are replaced; the array stays in its
            memory space.
        carry: initial carry, on the device.

    Returns:
        The written arrays with their new slices, and the last carry.
    """

    def slice_of(array: Array, dim: int, slice_index: Any) -> Array:
        """Return one slice of an array, on the device."""
        if slice_count == 1:
            return to_device(array)
        slice_length = array.shape[dim] // slice_count
        return to_device(jax.lax.dynamic_slice_in_dim(array, slice_index * slice_length, slice_length, dim))

    def replace_slice(array: Array, dim: int, slice_index: Any, new_slice: Array) -> Array:
        """Return the array with one slice replaced, in the same memory space."""
        placed_slice = to_host(new_slice) if on_host(array) else new_slice
        if slice_count == 1:
            return placed_slice
        return jax.lax.dynamic_update_slice_in_dim(array, placed_slice, slice_index * new_slice.shape[dim], dim)

    written_dims = [dim for _, dim in written_arrays_and_dims]

    def run_on_slices(slice_index: Any, arrays_and_carry: tuple[list[Array], Any]) -> tuple[list[Array], Any]:
        """Run `body` on one slice of each array; return the arrays with the new slices, and the new carry."""
        arrays, slice_carry = arrays_and_carry
        old_slices = [slice_of(array, dim, slice_index) for array, dim in zip(arrays, written_dims, strict=True)]
        new_slices, slice_carry = body(
            [slice_of(array, dim, slice_index) for array, dim in read_arrays_and_dims], old_slices, slice_carry
        )
        arrays_dims_and_slices = zip(arrays, written_dims, new_slices, strict=True)
        return [
            replace_slice(array, dim, slice_index, new_slice) for array, dim, new_slice in arrays_dims_and_slices
        ], slice_carry

    initial_arrays_and_carry = ([array for array, _ in written_arrays_and_dims], carry)
    return (
        run_on_slices(0, initial_arrays_and_carry)
        if slice_count == 1
        else jax.lax.fori_loop(0, slice_count, run_on_slices, initial_arrays_and_carry)
    )
