"""The integers of a program that are known when it is traced, such as the branch that a device runs in each tick.

A pipelined step reads its schedule from a table of constants. A device picks its column by its index along the pipe
axis, and the cells select branches. This module evaluates such integers, with numpy, in the jaxpr. Left out: values
that are larger than `MOST_ELEMENTS`, floating-point numbers, the state of loops, and primitives without a formula here.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.programs.walk import is_jaxpr, open_jaxpr

MOST_ELEMENTS = 1 << 20
"""Largest number of elements of a value that is evaluated."""

Known = np.ndarray | None
"""A value, or `None` if it is not known."""

_selecting_inputs_by_jaxpr: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def known_values(jaxpr: Any, inputs: Sequence[Known], axis_indices: Mapping[str, int]) -> dict[Any, np.ndarray]:
    """Return the values of a jaxpr's variables that are known.

    Args:
        jaxpr: a jaxpr, open or closed.
        inputs: the value of each argument.
        axis_indices: index of the device along each mesh axis for which it is known.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda row, x: (row[0] == 1, x + 1.0))(np.array([1, 5]), 2.0)
        >>> values = known_values(jaxpr, [np.array([1, 5]), None], {})
        >>> bool(values[jaxpr.jaxpr.outvars[0]]), jaxpr.jaxpr.outvars[1] in values
        (True, False)
    """
    opened_jaxpr = open_jaxpr(jaxpr)
    constants = map(integers, getattr(jaxpr, "consts", ()))
    pairs = [*zip(opened_jaxpr.constvars, constants, strict=False), *zip(opened_jaxpr.invars, inputs, strict=True)]
    values = {var: value for var, value in pairs if value is not None}
    for eqn in opened_jaxpr.eqns:
        results = _results(eqn, [value_of(atom, values) for atom in eqn.invars], axis_indices)
        values |= {var: value for var, value in zip(eqn.outvars, results, strict=False) if value is not None}
    return values


def value_of(atom: Any, values: Mapping[Any, np.ndarray]) -> Known:
    """Return the value of an operand, a literal or a variable, from the values of variables."""
    return integers(atom.val) if hasattr(atom, "val") else values.get(atom)


def integers(value: Any) -> Known:
    """Return an array of integers or truth values that is not too large, as a numpy array; `None` for others."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if isinstance(value, bool | int):
        return np.asarray(value)
    if dtype is None or np.dtype(dtype).kind not in "biu" or np.prod(shape, dtype=int) > MOST_ELEMENTS:
        return None
    return np.asarray(value)


def callee_of(eqn: Any) -> Any:
    """Return the jaxpr of a call with the equation's operands and results; `None` for any other equation."""
    jaxprs = [param for param in eqn.params.values() if is_jaxpr(param)]
    if len(jaxprs) != 1 or eqn.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call"):
        return None
    opened_jaxpr = open_jaxpr(jaxprs[0])
    has_same_inputs = len(opened_jaxpr.invars) == len(eqn.invars)
    return jaxprs[0] if has_same_inputs and len(opened_jaxpr.outvars) == len(eqn.outvars) else None


def _results(eqn: Any, values: Sequence[Known], axis_indices: Mapping[str, int]) -> Sequence[Known]:
    """Return the results of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "axis_index":
        index = axis_indices.get(params["axis_name"])
        return [None if index is None else np.asarray(index, np.int32)]
    if name in _UNCHANGED:
        return values
    if all(value is None for value in values):
        return []
    if (callee := callee_of(eqn)) is not None:
        inner_values = known_values(callee, values, axis_indices)
        return [value_of(atom, inner_values) for atom in open_jaxpr(callee).outvars]
    formula = _FORMULAS.get(name)
    if formula is None or any(value is None for value in values) or integers(eqn.outvars[0].aval) is None:
        return []
    return [np.asarray(formula(params, *values), eqn.outvars[0].aval.dtype)]


def selecting_inputs(jaxpr: Any) -> frozenset[int]:
    """Return the indices of the arguments that a jaxpr may select branches by, here or in the jaxprs inside it.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, i: jax.lax.switch(i, [lambda x: x, lambda x: x + 1.0], x))(2.0, 1)
        >>> selecting_inputs(jaxpr)
        frozenset({1})
    """
    opened_jaxpr = open_jaxpr(jaxpr)
    if opened_jaxpr in _selecting_inputs_by_jaxpr:
        return _selecting_inputs_by_jaxpr[opened_jaxpr]
    selecting_vars: set[Any] = set()
    for eqn in reversed(opened_jaxpr.eqns):
        name, inputs = eqn.primitive.name, eqn.invars
        indices: set[int] = set()
        if name == "cond":
            indices |= {0, *(1 + index for branch in eqn.params["branches"] for index in selecting_inputs(branch))}
        elif name in ("scan", "shard_map"):
            indices |= selecting_inputs(eqn.params["jaxpr"])
        elif (callee := callee_of(eqn)) is not None:
            indices |= selecting_inputs(callee)
        if not selecting_vars.isdisjoint(eqn.outvars):
            indices |= set(range(len(inputs)))
        selecting_vars |= {inputs[index] for index in indices if not hasattr(inputs[index], "val")}
    indices_and_vars = enumerate(opened_jaxpr.invars)
    _selecting_inputs_by_jaxpr[opened_jaxpr] = frozenset(
        index for index, var in indices_and_vars if var in selecting_vars
    )
    return _selecting_inputs_by_jaxpr[opened_jaxpr]


def _slice(params: Any, array: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * array.ndim
    return array[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _dynamic_slice(params: Any, array: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = params["slice_sizes"]
    first_indices = [
        min(max(int(start), 0), count - size) for start, count, size in zip(starts, array.shape, sizes, strict=True)
    ]
    return array[tuple(slice(first, first + size) for first, size in zip(first_indices, sizes, strict=True))]


def _broadcast(params: Any, array: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(array.reshape(shape), params["shape"])


_UNCHANGED = ("pvary", "pcast", "copy", "optimization_barrier", "sharding_constraint", "reshard")
"""Primitives that return their operands."""

_FORMULAS: Mapping[str, Callable[..., Any]] = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "broadcast_in_dim": _broadcast,
    "squeeze": lambda params, array: np.squeeze(array, tuple(params["dimensions"])),
    "reshape": lambda params, array: array.reshape(params["new_sizes"]),
    "convert_element_type": lambda params, array: array.astype(params["new_dtype"]),
    "select_n": lambda params, which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda params, least, array, most: np.clip(array, least, most),
    "not": lambda params, array: ~array,
    "neg": lambda params, array: -array,
    **{
        name: lambda params, left, right, function=function: function(left, right)
        for name, function in {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
            "and": np.bitwise_and, "or": np.bitwise_or, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
            "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "rem": np.fmod,
        }.items()
    },
}  # fmt: skip
"""For each primitive that is evaluated, a function of its parameters and operands."""
