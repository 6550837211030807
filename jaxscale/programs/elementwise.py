"""Check that an update rule treats each number by itself, and can run on slices of the parameters, one by one.

The check reads the rule's program: Adam, Lion and SGD pass, with schedules, masks and decay. A rule that sums over a
tensor (LAMB's trust ratio, Adafactor's row means), or over all of them (clipping by the global norm), does not.
"""

from typing import Any

import jax
import optax

from jaxscale.errors import UserError
from jaxscale.programs.walk import inner_jaxprs, opened
from jaxscale.typing import Params

ELEMENTWISE = frozenset(
    [
        "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "div",
        "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
        "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
        "optimization_barrier", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
        "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square",
        "stop_gradient", "sub", "tan", "tanh", "xor",
    ]
)  # fmt: skip
"""Primitives whose results depend only on the operands at the same position."""
ARRAY = "a constant array"
"""Result of `first_mixing` for a rule that closes over an array, which slices would need sliced."""
PLACED = frozenset(["iota", "random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"])
"""Primitives whose results depend on the position: each slice would get those of the first."""


def first_mixing(rule: optax.GradientTransformation, params: Params) -> str | None:
    """The first operation of a rule's update that mixes elements, by its primitive's name; `None` if none does.

    Args:
        rule: any optax transformation.
        params: parameters, or their shapes.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((8, 4), "float32")}
        >>> first_mixing(optax.adamw(1e-3), params), first_mixing(optax.lamb(1e-3), params)
        (None, 'reduce_sum')
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(rule.init, shapes)
    return _mixing(jax.make_jaxpr(rule.update)(shapes, state, shapes))


def check_elementwise(
    rule: optax.GradientTransformation, params: Params, option: str = "optimizer_state streamed"
) -> None:
    """Refuse a rule that can't be run slice by slice.

    Args:
        rule: any optax transformation.
        params: parameters, or their shapes.
        option: the option that needs it, as the user wrote it.

    Raises:
        UserError: its update mixes elements.
    """
    operation = first_mixing(rule, params)
    if operation is not None:
        raise UserError(
            f"{option}: this optimizer's update mixes elements of a tensor ({operation}), so it can't be "
            "run slice by slice; take adamw, lion or sgd, or optimizer_state host, or keep the state on the device"
        )


def _mixing(jaxpr: Any) -> str | None:
    jaxpr = opened(jaxpr)
    if any(_size(v) > 1 for v in jaxpr.constvars):
        return ARRAY
    for eqn in jaxpr.eqns:
        if any(hasattr(v, "val") and _size(v) > 1 for v in eqn.invars):
            return ARRAY
        name = eqn.primitive.name
        if all(_size(v) <= 1 for v in (*eqn.invars, *eqn.outvars)) or name in ELEMENTWISE:
            continue
        if name == "bitcast_convert_type" and _size(eqn.invars[0]) == _size(eqn.outvars[0]):
            continue
        inner = inner_jaxprs(eqn)
        if inner and name not in ("scan", "while"):
            operation = next((operation for operation in map(_mixing, inner) if operation is not None), None)
            if operation is not None:
                return operation
        elif name in PLACED or any(_size(v) > 1 for v in eqn.invars):
            return name
    return None


def _size(variable: Any) -> int:
    return getattr(variable.aval, "size", 1)
