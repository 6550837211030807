"""Checksums of arrays. They are needed because Orbax loads a flipped byte without an error.

The bits of an array are read as unsigned integers ``b_i``, in the order of the elements, and summed with odd weights
modulo 2^32: ``s = sum_i b_i w_i``. An odd number is invertible modulo 2^32, so a change of any one element changes the
sum. A second sum with other weights makes it unlikely that several changes cancel (2^-64 for random changes). The sums
do not depend on sharding. They are computed on the devices that hold the array, so only eight bytes per array are
transferred; an array in host memory is first copied to its device. The checksums guard against accidents, not against
an adversary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.sharding.memory_space import on_host, to_device
from jaxscale.typing import Array, Shaped, UInt32

_UNSIGNED_DTYPE_BY_BYTES = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksum(x: Shaped[Array, "..."], *, is_flat: bool = False) -> UInt32[Array, "2"]:
    """Return two sums of the bits of an array, with different weights.

    Args:
        x: array of any shape, with bools, integers, floats or typed PRNG keys of up to 64 bits per element.
        is_flat: whether to flatten the array first. On a CPU the sums then take 0.4 of the time, but flattening would
            gather a sharded array.

    Returns:
        The two sums modulo 2^32.

    Example:
        >>> x = jnp.zeros((2, 3))
        >>> bool((checksum(x) == checksum(x.at[1, 2].set(1e-30))).any())
        False
    """
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    bits = _to_uint32(jax.random.key_data(x) if is_key else x)
    bits = bits.reshape(-1) if is_flat else bits
    indices, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for dim in reversed(range(bits.ndim)):
        indices += lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= bits.shape[dim]
    hashes = indices * jnp.uint32(0x9E3779B1)
    hashes = (hashes ^ (hashes >> 15)) * jnp.uint32(0x85EBCA6B)
    weights = (indices * jnp.uint32(2) + jnp.uint32(1), (hashes ^ (hashes >> 13)) | jnp.uint32(1))
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in weights])


def _to_uint32(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """Return the bits of each element as uint32; for 64-bit elements, a new last dim holds the two halves."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    try:
        element_bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).bits
    except ValueError as error:
        raise TypeError(f"checksum: got an array of {x.dtype}, expected bools, numbers or PRNG keys") from error
    if element_bits < 8:  # such as int4; different values stay different in float32
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    if element_bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, _UNSIGNED_DTYPE_BY_BYTES[element_bits // 8]).astype(jnp.uint32)


@jax.jit
def _device_checksums(arrays: dict[str, Any]) -> dict[str, UInt32[Array, "2"]]:
    """Return the checksum of each array, by name, computed in one program."""
    return {name: checksum(array) for name, array in arrays.items()}


_device_checksum = jax.jit(checksum, static_argnames="is_flat")
"""The jitted `checksum` of one array; arrays of one shape share a compiled program."""


def copies_on_one_cpu(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name, one CPU device's copy of each array that is replicated on CPU devices; leave out other arrays.

    JAX's CPU devices share the cores of the process, so a program on one device takes less time than one on all.

    Example:
        >>> list(copies_on_one_cpu({"a": jnp.zeros(3)}))
        ['a']
    """
    return {
        name: array.addressable_data(0)
        for name, array in arrays.items()
        if isinstance(array, jax.Array)
        and array.is_fully_replicated
        and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        and all(device.platform == "cpu" for device in array.sharding.device_set)
    }


def is_on_one_device(array: Any) -> bool:
    """Return whether an array lies on a single device; a program on such an array waits for no other device.

    Example:
        >>> is_on_one_device(jnp.zeros(3))
        True
    """
    return isinstance(array, jax.Array) and len(array.sharding.device_set) == 1


@jax.jit
def _host_checksum(x: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    """Return the checksum of an array in host memory."""
    return checksum(to_device(x))


def checksums(arrays: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the checksum of each array, by name: its two sums as Python integers.

    Arrays that span several devices are summed in one program. Arrays on one device are summed one by one, because the
    layers of a model have few shapes, and compiling one program for all arrays takes more time than it saves. Arrays in
    host memory are summed one by one, too: a single program would copy all of them to the device at once, and they may
    not fit there (for 24 arrays of 64 MiB, it needs 1,539 MiB of temporary memory, compiled for v5e).

    Example:
        >>> checksums({"a": jnp.arange(3, dtype=jnp.int32)})["a"][0]
        13
    """
    device_arrays = {name: array for name, array in arrays.items() if not on_host(array)}
    cpu_copies = copies_on_one_cpu(device_arrays)
    sums_by_name: dict[str, Any] = {name: _device_checksum(array, is_flat=True) for name, array in cpu_copies.items()}
    other_arrays = {name: array for name, array in device_arrays.items() if name not in cpu_copies}
    single_device_arrays = {name: array for name, array in other_arrays.items() if is_on_one_device(array)}
    sums_by_name |= {name: _device_checksum(array) for name, array in single_device_arrays.items()}
    sums_by_name |= _device_checksums(
        {name: array for name, array in other_arrays.items() if name not in single_device_arrays}
    )
    for name, array in arrays.items():
        if on_host(array):
            sums_by_name[name] = jax.device_get(_host_checksum(array))
    host_sums_by_name = jax.device_get(sums_by_name)
    return {name: (int(host_sums_by_name[name][0]), int(host_sums_by_name[name][1])) for name in arrays}
