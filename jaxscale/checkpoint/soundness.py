"""Soundness: whether the arrays of a checkpoint are finite and sane, computed on the devices that hold them.

Parameters are sane if their root mean square is at most `MAX_GROWTH` times that of the run's first checkpoint. A first
value below `ZERO_RMS` counts as `ZERO_RMS`, because parameters may start from zero. All other arrays must be finite.
Scalars of an optimizer's state are not read, because some rules start from an infinite scalar.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.checkpoint.checksum import copies_on_one_cpu, is_on_one_device
from jaxscale.checkpoint.verified import Description
from jaxscale.sharding.memory_space import on_host, to_device
from jaxscale.state.canonical import PARAMS
from jaxscale.typing import Array, Bool, Float

MAX_GROWTH, ZERO_RMS = 100.0, 0.01
_JUDGED_PREFIXES = (PARAMS, "optimizer", "rest", "ema")
"""Prefixes of the names of the judged arrays; the state of exchanges between replicas is not judged."""


def _finiteness_and_square_sum(array: Array) -> tuple[Bool[Array, ""], Float[Array, ""]]:
    """Return (whether all elements of an array are finite, the sum of their squares)."""
    float32_array = to_device(array).astype(jnp.float32)
    return jnp.all(jnp.isfinite(float32_array)), jnp.sum(jnp.square(float32_array))


_facts_of_one_array = jax.jit(_finiteness_and_square_sum)
"""The jitted `_finiteness_and_square_sum` of one array; arrays of one shape share a compiled program."""


@jax.jit
def _facts_of_arrays(arrays: dict[str, Any]) -> dict[str, tuple[Bool[Array, ""], Float[Array, ""]]]:
    """Return `_finiteness_and_square_sum` of each array, by name, computed in one program."""
    return {name: _finiteness_and_square_sum(array) for name, array in arrays.items()}


def parameter_rms(arrays: Mapping[str, Any]) -> float:
    """Return the root mean square of the parameters in a canonical tree; NaN if a judged array is not finite.

    Args:
        arrays: the canonical tree, as arrays by name; arrays in host memory are read one by one.

    Example:
        >>> parameter_rms({"params/w": jnp.full(3, 2.0)})
        2.0
        >>> parameter_rms({"params/w": jnp.ones(3), "optimizer/0/mu/w": jnp.array([1.0, jnp.nan])})
        nan
    """
    judged_arrays = {
        name: array
        for name, array in arrays.items()
        if name.startswith(tuple(f"{prefix}/" for prefix in _JUDGED_PREFIXES))
        and jnp.issubdtype(array.dtype, jnp.floating)
        and (array.ndim > 0 or not name.startswith("optimizer/"))
    }
    device_arrays = {name: array for name, array in judged_arrays.items() if not on_host(array)}
    cpu_shards = copies_on_one_cpu(device_arrays)
    other_arrays = {name: array for name, array in device_arrays.items() if name not in cpu_shards}
    single_device_arrays = {name: array for name, array in other_arrays.items() if is_on_one_device(array)}
    finiteness_and_square_sum_by_name = {
        name: _facts_of_one_array(array) for name, array in (cpu_shards | single_device_arrays).items()
    }
    finiteness_and_square_sum_by_name |= _facts_of_arrays(
        {name: array for name, array in other_arrays.items() if name not in single_device_arrays}
    )
    for name, array in judged_arrays.items():
        if on_host(array):
            finiteness_and_square_sum_by_name[name] = jax.device_get(_facts_of_one_array(array))
    finiteness_and_square_sum_by_name = jax.device_get(finiteness_and_square_sum_by_name)
    param_names = [name for name in judged_arrays if name.startswith(f"{PARAMS}/")]
    element_count = sum(judged_arrays[name].size for name in param_names)
    if not all(is_finite for is_finite, _ in finiteness_and_square_sum_by_name.values()):
        return math.nan
    return (
        math.sqrt(math.fsum(float(finiteness_and_square_sum_by_name[name][1]) for name in param_names) / element_count)
        if element_count
        else 0.0
    )


def with_verdict(description: Description, arrays: Mapping[str, Any]) -> Description:
    """Return the description with the verdict on the state, and with the number of steps skipped in a row.

    Args:
        description: description of the checkpoint, with the run's `first_rms` if the run already has a checkpoint.
        arrays: the canonical tree, as arrays by name.
    """
    rms, first_rms = parameter_rms(arrays), description.first_rms
    if first_rms is None and math.isfinite(rms):
        first_rms = rms
    return dataclasses.replace(
        description,
        is_sound=is_sane(rms, first_rms or 0.0),
        skipped_in_row=int(arrays["watch/in_row"]) if "watch/in_row" in arrays else 0,
        first_rms=first_rms,
    )


def is_sane(rms: float, first_rms: float) -> bool:
    """Return whether parameters are finite, and not much larger than in the run's first checkpoint.

    Args:
        rms: root mean square of the parameters; NaN if the state is not finite.
        first_rms: root mean square of the parameters in the run's first checkpoint.

    Example:
        >>> is_sane(0.5, 0.02), is_sane(9e28, 0.02), is_sane(float("nan"), 0.02)
        (True, False, False)
    """
    return rms <= MAX_GROWTH * max(first_rms, ZERO_RMS)
