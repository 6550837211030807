"""Soundness: whether the arrays of a checkpoint are finite and sane, computed on the devices that hold them.

Parameters are sane if the sum of their squares is finite in float32, which excludes numbers beyond 1.8e19. Optimizer
state must be finite. Single numbers of a state are not read, because some rules start from an infinite one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.sharding.memory_space import on_host, to_device
from jaxscale.state.canonical import PARAMS
from jaxscale.typing import Array, Bool


@jax.jit
def _sound(arrays: dict[str, Any]) -> Bool[Array, ""]:
    """Return whether all arrays, by the names of the canonical form, are finite and sane."""
    verdicts = [jnp.array(True)]
    for name, array in arrays.items():
        values = to_device(array).astype(jnp.float32)
        is_param = name.startswith(f"{PARAMS}/")
        verdicts.append(jnp.isfinite(jnp.sum(jnp.square(values))) if is_param else jnp.all(jnp.isfinite(values)))
    return jnp.stack(verdicts).all()


def is_sound(arrays: Mapping[str, Any]) -> bool:
    """Return whether the parameters and the optimizer state of a canonical form are finite and sane.

    Args:
        arrays: the canonical form, by name; arrays in host memory are read one by one.

    Example:
        >>> is_sound({"params/w": jnp.ones(3)}), is_sound({"params/w": jnp.full(3, 9e28)})
        (True, False)
        >>> is_sound({"optimizer/0/mu/w": jnp.array([1.0, jnp.nan])})
        False
    """
    judged_arrays = {
        name: array
        for name, array in arrays.items()
        if name.startswith((f"{PARAMS}/", "optimizer/"))
        and jnp.issubdtype(array.dtype, jnp.floating)
        and (array.ndim > 0 or name.startswith(f"{PARAMS}/"))
    }
    verdicts = [_sound({name: array for name, array in judged_arrays.items() if not on_host(array)})]
    verdicts += [_sound({name: array}) for name, array in judged_arrays.items() if on_host(array)]
    return all(bool(verdict) for verdict in jax.device_get(verdicts))
