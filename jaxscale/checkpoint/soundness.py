"""Soundness: whether the arrays of a checkpoint are finite and sane, computed on the devices that hold them.

Parameters are sane if their root mean square is at most `MAX_GROWTH` times that of the run's first checkpoint, which
counts as at least `ZERO_RMS`, for parameters that start from zero. Everything else must be finite. Single numbers of an
optimizer's state are not read, because some rules start from an infinite one.
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
_JUDGED = (PARAMS, "optimizer", "rest", "ema")
"""First names of the judged arrays; the state of exchanges between replicas is not judged."""


def _judged(array: Array) -> tuple[Bool[Array, ""], Float[Array, ""]]:
    """Return whether an array is finite, and the sum of its squares."""
    values = to_device(array).astype(jnp.float32)
    return jnp.all(jnp.isfinite(values)), jnp.sum(jnp.square(values))


_judged_alone = jax.jit(_judged)
"""Judges one array; arrays of one shape share a program."""


@jax.jit
def _judged_together(arrays: dict[str, Any]) -> dict[str, tuple[Bool[Array, ""], Float[Array, ""]]]:
    """Return whether each array is finite, and the sum of its squares, by name, computed in one program."""
    return {name: _judged(array) for name, array in arrays.items()}


def parameter_rms(arrays: Mapping[str, Any]) -> float:
    """Return the root mean square of the parameters of a canonical form; NaN if an array is not finite.

    Args:
        arrays: the canonical form, by name; arrays in host memory are read one by one.

    Example:
        >>> parameter_rms({"params/w": jnp.full(3, 2.0)})
        2.0
        >>> parameter_rms({"params/w": jnp.ones(3), "optimizer/0/mu/w": jnp.array([1.0, jnp.nan])})
        nan
    """
    judged_arrays = {
        name: array
        for name, array in arrays.items()
        if name.startswith(tuple(f"{prefix}/" for prefix in _JUDGED))
        and jnp.issubdtype(array.dtype, jnp.floating)
        and (array.ndim > 0 or not name.startswith("optimizer/"))
    }
    on_devices = {name: array for name, array in judged_arrays.items() if not on_host(array)}
    on_one_cpu = copies_on_one_cpu(on_devices)
    others = {name: array for name, array in on_devices.items() if name not in on_one_cpu}
    alone = {name: array for name, array in others.items() if is_on_one_device(array)}
    figures = {name: _judged_alone(array) for name, array in (on_one_cpu | alone).items()}
    figures |= _judged_together({name: array for name, array in others.items() if name not in alone})
    for name, array in judged_arrays.items():
        if on_host(array):
            figures[name] = jax.device_get(_judged_alone(array))
    figures = jax.device_get(figures)
    param_names = [name for name in judged_arrays if name.startswith(f"{PARAMS}/")]
    number_count = sum(judged_arrays[name].size for name in param_names)
    if not all(is_finite for is_finite, _ in figures.values()):
        return math.nan
    return math.sqrt(math.fsum(float(figures[name][1]) for name in param_names) / number_count) if number_count else 0.0


def judged(description: Description, arrays: Mapping[str, Any]) -> Description:
    """Return the description with the verdict on the state, and with the number of steps skipped in a row.

    Args:
        description: description of the checkpoint, with the `first_rms` of the run if it has a checkpoint.
        arrays: the canonical form, by name.
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
        first_rms: that of the run's first checkpoint.

    Example:
        >>> is_sane(0.5, 0.02), is_sane(9e28, 0.02), is_sane(float("nan"), 0.02)
        (True, False, False)
    """
    return rms <= MAX_GROWTH * max(first_rms, ZERO_RMS)
