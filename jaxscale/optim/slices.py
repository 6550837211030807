"""Arrays in host memory, worked on slice by slice by the device, in place.

The loop carries the arrays and writes each slice back where it came from. XLA then keeps one copy of a donated array on
the host and a slice on the device, where a scan that stacks its results would hold a second copy of all, and moving the
whole array to the device would save nothing.
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
"""Bytes of a slice on each device, at most, where a dim can be cut so small: a millisecond of PCIe."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an array is cut.

    Args:
        dim: along which.
        pieces: equal parts; 1 leaves it whole.
    """

    dim: int = 0
    pieces: int = 1


def cut(
    shape: Sequence[int],
    itemsize: int,
    sharding: Sharding | None,
    slice_bytes: int = SLICE_BYTES,
    units: Sequence[int] | None = None,
) -> Cut:
    """The fewest equal parts of at most `slice_bytes` along the first dim that lies whole on each device.

    Where no dim gives parts so small, the one that gives the smallest. A leading dim of layers is never sharded, and
    its slices lie together in memory.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        sharding: of the array; `None` for one device.
        slice_bytes: of a part on each device.
        units: of each dim, what stays together: a slice is a multiple of it; `None` cuts anywhere.

    Example:
        >>> cut((16, 1024, 4096), 4, None)
        Cut(dim=0, pieces=16)
        >>> cut((16, 1024), 4, None)
        Cut(dim=0, pieces=1)
        >>> cut((4096, 4096), 4, None), cut((4096, 4096), 4, None, units=(2048, 1))
        (Cut(dim=0, pieces=4), Cut(dim=1, pieces=4))
    """
    local = tuple(shape) if sharding is None else sharding.shard_shape(tuple(shape))
    size = math.prod(local) * itemsize
    best = Cut()
    for dim, (whole, part) in enumerate(zip(shape, local, strict=True)):
        if whole != part:
            continue
        count = whole if units is None else whole // units[dim]
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        pieces = next((n for n in divisors if size <= n * slice_bytes), count)
        if size <= pieces * slice_bytes:
            return Cut(dim, pieces)
        best = Cut(dim, pieces) if pieces > best.pieces else best
    return best


Body = Callable[[list[Array], list[Array], Any], tuple[list[Array], Any]]


def sweep(
    body: Body, pieces: int, read: Sequence[tuple[Array, int]], written: Sequence[tuple[Array, int]], carry: Any
) -> tuple[list[Array], Any]:
    """Run `body` on slice after slice of some arrays.

    Args:
        body: from slices of the arrays read, slices of those written (all on the device) and the carry, to new slices
            of those written, and the carry.
        pieces: slices of each array; 1 gives `body` the whole arrays, once.
        read: arrays with the dim along which each is cut.
        written: likewise; each is given back with its slices replaced, in the memory it lies in.
        carry: what `body` hands from slice to slice, on the device.

    Returns:
        The arrays written, and the last carry.
    """

    def part(array: Array, dim: int, number: Any) -> Array:
        if pieces == 1:
            return to_device(array)
        length = array.shape[dim] // pieces
        return to_device(jax.lax.dynamic_slice_in_dim(array, number * length, length, dim))

    def replaced(array: Array, dim: int, number: Any, new: Array) -> Array:
        new = to_host(new) if on_host(array) else new
        if pieces == 1:
            return new
        return jax.lax.dynamic_update_slice_in_dim(array, new, number * new.shape[dim], dim)

    dims = [dim for _, dim in written]

    def one(number: Any, state: tuple[list[Array], Any]) -> tuple[list[Array], Any]:
        arrays, carry = state
        parts = [part(array, dim, number) for array, dim in zip(arrays, dims, strict=True)]
        news, carry = body([part(array, dim, number) for array, dim in read], parts, carry)
        return [replaced(a, d, number, n) for a, d, n in zip(arrays, dims, news, strict=True)], carry

    start = ([array for array, _ in written], carry)
    return one(0, start) if pieces == 1 else jax.lax.fori_loop(0, pieces, one, start)
