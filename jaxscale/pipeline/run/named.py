"""The names that `checkpoint_name` gives to results of a program. Residuals are selected by these names."""

from typing import Any

from jax.extend.core import Literal

_TRANSPARENT = {"convert_element_type", "copy", "device_put", "pvary", "reduce_precision", "sharding_constraint"}
"""Primitives that return their operand unchanged, except for its memory, sharding or type."""


def names_of(program: Any, result_index: int) -> set[str]:
    """Return the names of a result, including names inside a loop or inside a branch of a `cond`.

    Args:
        program: a closed or open jaxpr.
        result_index: index of the result among the program's results.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def body(x, _):
        ...     return x, checkpoint_name(jnp.sin(x), "sine")
        >>> program = jax.make_jaxpr(lambda x: jax.lax.scan(body, x, length=3))(1.0)
        >>> names_of(program, 1), names_of(program, 0)
        ({'sine'}, set())
    """
    jaxpr = getattr(program, "jaxpr", program)
    var, names = jaxpr.outvars[result_index], set()
    while not isinstance(var, Literal):
        eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
        if eqn is None:
            return names
        if eqn.primitive.name == "name":
            names.add(eqn.params["name"])
        elif eqn.primitive.name == "optimization_barrier":
            var = eqn.invars[eqn.outvars.index(var)]
            continue
        elif eqn.primitive.name not in _TRANSPARENT:
            inner_index = eqn.outvars.index(var)
            bodies = [eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params]
            return names.union(*(names_of(body, inner_index) for body in (*bodies, *eqn.params.get("branches", ()))))
        var = eqn.invars[0]
    return names
