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

_selecting_input_indices_by_jaxpr: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def known_values(jaxpr: Any, known_inputs: Sequence[Known], axis_indices: Mapping[str, int]) -> dict[Any, np.ndarray]:
    """Return the known values of a jaxpr's variables, by variable.

    Args:
        jaxpr: a jaxpr, open or closed.
        known_inputs: the value of each argument; `None` if it is not known.
        axis_indices: index of the device along each mesh axis for which it is known.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda row, x: (row[0] == 1, x + 1.0))(np.array([1, 5]), 2.0)
        >>> value_by_var = known_values(jaxpr, [np.array([1, 5]), None], {})
        >>> bool(value_by_var[jaxpr.jaxpr.outvars[0]]), jaxpr.jaxpr.outvars[1] in value_by_var
        (True, False)
    """
    opened_jaxpr = open_jaxpr(jaxpr)
    constants = map(integer_array, getattr(jaxpr, "consts", ()))
    vars_and_values = [
        *zip(opened_jaxpr.constvars, constants, strict=False),
        *zip(opened_jaxpr.invars, known_inputs, strict=True),
    ]
    value_by_var = {var: value for var, value in vars_and_values if value is not None}
    for eqn in opened_jaxpr.eqns:
        results = _known_results(eqn, [value_of(atom, value_by_var) for atom in eqn.invars], axis_indices)
        value_by_var |= {var: value for var, value in zip(eqn.outvars, results, strict=False) if value is not None}
    return value_by_var


def value_of(atom: Any, value_by_var: Mapping[Any, np.ndarray]) -> Known:
    """Return the value of an atom (a literal or a variable); `None` if it is not known."""
    return integer_array(atom.val) if hasattr(atom, "val") else value_by_var.get(atom)


def integer_array(value: Any) -> Known:
    """Return integers or booleans as a numpy array; `None` for another type, or an array that is too large."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if isinstance(value, bool | int):
        return np.asarray(value)
    if dtype is None or np.dtype(dtype).kind not in "biu" or np.prod(shape, dtype=int) > MOST_ELEMENTS:
        return None
    return np.asarray(value)


def callee_of(eqn: Any) -> Any:
    """Return the jaxpr that an equation calls with its own operands and results; `None` for any other equation."""
    jaxprs = [param for param in eqn.params.values() if is_jaxpr(param)]
    if len(jaxprs) != 1 or eqn.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call"):
        return None
    opened_jaxpr = open_jaxpr(jaxprs[0])
    has_same_inputs = len(opened_jaxpr.invars) == len(eqn.invars)
    return jaxprs[0] if has_same_inputs and len(opened_jaxpr.outvars) == len(eqn.outvars) else None


def _known_results(eqn: Any, known_operands: Sequence[Known], axis_indices: Mapping[str, int]) -> Sequence[Known]:
    """Return the known value of each result of an equation; `[]` if no result is known."""
    name, params = eqn.primitive.name, eqn.params
    if name == "axis_index":
        index = axis_indices.get(params["axis_name"])
        return [None if index is None else np.asarray(index, np.int32)]
    if name in _IDENTITY_PRIMITIVES:
        return known_operands
    if all(value is None for value in known_operands):
        return []
    if (callee := callee_of(eqn)) is not None:
        inner_value_by_var = known_values(callee, known_operands, axis_indices)
        return [value_of(atom, inner_value_by_var) for atom in open_jaxpr(callee).outvars]
    formula = _FORMULAS.get(name)
    if formula is None or any(value is None for value in known_operands) or integer_array(eqn.outvars[0].aval) is None:
        return []
    return [np.asarray(formula(params, *known_operands), eqn.outvars[0].aval.dtype)]


def selecting_input_indices(jaxpr: Any) -> frozenset[int]:
    """Return the indices of the arguments by which a jaxpr, or a jaxpr inside it, may select branches.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, i: jax.lax.switch(i, [lambda x: x, lambda x: x + 1.0], x))(2.0, 1)
        >>> selecting_input_indices(jaxpr)
        frozenset({1})
    """
    opened_jaxpr = open_jaxpr(jaxpr)
    if opened_jaxpr in _selecting_input_indices_by_jaxpr:
        return _selecting_input_indices_by_jaxpr[opened_jaxpr]
    selecting_vars: set[Any] = set()
    for eqn in reversed(opened_jaxpr.eqns):
        name, operand_atoms = eqn.primitive.name, eqn.invars
        indices: set[int] = set()
        if name == "cond":
            indices |= {
                0,
                *(1 + index for branch in eqn.params["branches"] for index in selecting_input_indices(branch)),
            }
        elif name in ("scan", "shard_map"):
            indices |= selecting_input_indices(eqn.params["jaxpr"])
        elif (callee := callee_of(eqn)) is not None:
            indices |= selecting_input_indices(callee)
        if not selecting_vars.isdisjoint(eqn.outvars):
            indices |= set(range(len(operand_atoms)))
        selecting_vars |= {operand_atoms[index] for index in indices if not hasattr(operand_atoms[index], "val")}
    indices_and_vars = enumerate(opened_jaxpr.invars)
    _selecting_input_indices_by_jaxpr[opened_jaxpr] = frozenset(
        index for index, var in indices_and_vars if var in selecting_vars
    )
    return _selecting_input_indices_by_jaxpr[opened_jaxpr]


def _slice(params: Any, array: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * array.ndim
    return array[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _dynamic_slice(params: Any, array: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    slice_sizes = params["slice_sizes"]
    first_indices = [
        min(max(int(start), 0), dim_size - slice_size)
        for start, dim_size, slice_size in zip(starts, array.shape, slice_sizes, strict=True)
    ]
    return array[
        tuple(
            slice(first_index, first_index + slice_size)
            for first_index, slice_size in zip(first_indices, slice_sizes, strict=True)
        )
    ]


def _broadcast(params: Any, array: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], array.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(array.reshape(shape), params["shape"])


_IDENTITY_PRIMITIVES = ("pvary", "pcast", "copy", "optimization_barrier", "sharding_constraint", "reshard")
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
