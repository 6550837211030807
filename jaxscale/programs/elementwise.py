"""Check that an optimizer's update rule treats each element by itself, so that the rule can run on slices of tensors.

The check reads the rule's program. Adam, Lion and SGD pass, with schedules, masks and decay. A rule that mixes elements
does not pass; such a rule sums over a tensor (LAMB's trust ratio, Adafactor's row means) or over all tensors (clipping
by the global norm).
"""

from typing import Any

import jax
import optax

from jaxscale.errors import UserError
from jaxscale.programs.walk import inner_jaxprs, open_jaxpr
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
"""Result of `first_mixing_primitive` for a rule that closes over an array, which would also have to be sliced."""
POSITION_DEPENDENT = frozenset(["iota", "random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"])
"""Primitives whose results depend on the position: every slice would get the results of the first slice."""


def first_mixing_primitive(rule: optax.GradientTransformation, params: Params) -> str | None:
    """Return the name of the first primitive in a rule's update that mixes elements; `None` if no primitive does.

    Args:
        rule: any optax transformation.
        params: parameters, or their shapes.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((8, 4), "float32")}
        >>> first_mixing_primitive(optax.adamw(1e-3), params), first_mixing_primitive(optax.lamb(1e-3), params)
        (None, 'reduce_sum')
    """
    abstract_params = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype), params)
    abstract_state = jax.eval_shape(rule.init, abstract_params)
    return _first_mixing_primitive_of_jaxpr(
        jax.make_jaxpr(rule.update)(abstract_params, abstract_state, abstract_params)
    )


def check_elementwise(
    rule: optax.GradientTransformation, params: Params, option: str = "optimizer_state streamed"
) -> None:
    """Raise an error if an update rule can't be run slice by slice.

    Args:
        rule: any optax transformation.
        params: parameters, or their shapes.
        option: name of the option that runs the rule on slices, for the message.

    Raises:
        UserError: the rule's update mixes elements of a tensor.
    """
    primitive_name = first_mixing_primitive(rule, params)
    if primitive_name is not None:
        raise UserError(
            f"{option}: this optimizer's update mixes elements of a tensor ({primitive_name}), so it can't be "
            "run slice by slice; use adamw, lion or sgd, or optimizer_state host, or keep the state on the device"
        )


def _first_mixing_primitive_of_jaxpr(jaxpr: Any) -> str | None:
    """Return the name of a jaxpr's first primitive that mixes elements, or `ARRAY`; `None` if no primitive does."""
    opened_jaxpr = open_jaxpr(jaxpr)
    if any(_element_count(var) > 1 for var in opened_jaxpr.constvars):
        return ARRAY
    for eqn in opened_jaxpr.eqns:
        if any(hasattr(var, "val") and _element_count(var) > 1 for var in eqn.invars):
            return ARRAY
        name = eqn.primitive.name
        if all(_element_count(var) <= 1 for var in (*eqn.invars, *eqn.outvars)) or name in ELEMENTWISE:
            continue
        if name == "bitcast_convert_type" and _element_count(eqn.invars[0]) == _element_count(eqn.outvars[0]):
            continue
        callee_jaxprs = inner_jaxprs(eqn)
        if callee_jaxprs and name not in ("scan", "while"):
            inner_name = next(filter(None, map(_first_mixing_primitive_of_jaxpr, callee_jaxprs)), None)
            if inner_name is not None:
                return inner_name
        elif name in POSITION_DEPENDENT or any(_element_count(var) > 1 for var in eqn.invars):
            return name
    return None


def _element_count(variable: Any) -> int:
    """Return the number of elements of a variable or literal of a jaxpr; 1 for a value that is not an array."""
    return getattr(variable.aval, "size", 1)
