"""Differences between JAX versions that matter to kernels, and the mesh axes over which kernels' results vary."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

Interpret = bool | Literal["races"]
"""How to run a kernel: False compiles it, True interprets it, "races" interprets it and looks for races."""


def interpret_params(platform: str, interpret: Interpret) -> Any:
    """Return the value to pass as `interpret` to a Pallas call.

    Under `jax.shard_map` the TPU interpreter needs check_vma=False: in JAX 0.10 and 0.12 it mixes values that vary over
    mesh axes with its own values, which do not vary.

    Args:
        platform: "tpu" or "gpu".
        interpret: how to run the kernel. With "races", a race raises an error: for TPU kernels from JAX 0.12 on, for
            GPU kernels from JAX 0.11 on. Older versions print "RACE DETECTED" instead.

    Raises:
        NotImplementedError: JAX up to 0.10 has no interpreter for Mosaic GPU kernels.
    """
    if platform == "tpu":
        if interpret == "races":
            from jax.experimental.pallas import tpu as pltpu

            return pltpu.InterpretParams(detect_races=True)
        return bool(interpret)
    if not interpret:
        return None
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params_class: Any = getattr(plgpu, "InterpretGPUParams", None)
    if params_class is None:
        raise NotImplementedError(f"JAX {jax.__version__} cannot interpret Mosaic GPU kernels: take 0.11 or newer")
    return params_class(detect_races=interpret == "races")


def result_struct(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Type of a kernel's result; it varies over every manual mesh axis (`jax.shard_map`) that an operand varies over.

    Args:
        shape, dtype: shape and dtype of the result.
        operands: the arrays, or trees of arrays, that the kernel reads.
    """
    axis_types = [jax.typeof(operand).manual_axis_type for operand in jax.tree.leaves(operands)]
    widest_type = max(axis_types, key=lambda axis_type: len(axis_type.varying), default=None)
    varying_axes = frozenset[str]().union(*(axis_type.varying for axis_type in axis_types))
    if widest_type is None or widest_type.varying == varying_axes:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=widest_type)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=widest_type.update(varying=varying_axes))


def align_varying(*operands: Any) -> tuple[Any, ...]:
    """Make every operand vary over all manual mesh axes (`jax.shard_map`) over which at least one of them varies.

    Args:
        operands: the operands of one kernel: arrays, or None.

    Returns:
        The same operands in the same order; None stays None.
    """
    axes = frozenset[str]().union(*(_varying_axes(operand) for operand in operands if operand is not None))
    if not axes:
        return operands
    return tuple(
        operand
        if operand is None or _varying_axes(operand) == axes
        else jax.lax.pcast(operand, tuple(axes - _varying_axes(operand)), to="varying")
        for operand in operands
    )


def varying_like(value: Any, *operands: Any) -> Any:
    """Make the type of an array vary over every manual mesh axis that an operand varies over.

    Args:
        value: an array, such as the result of a Mosaic GPU kernel, whose type varies over no mesh axis.
        operands: the arrays from which the array was computed.
    """
    operand_axes = frozenset[str]().union(*(_varying_axes(operand) for operand in operands))
    missing_axes = operand_axes - _varying_axes(value)
    return jax.lax.pcast(value, tuple(missing_axes), to="varying") if missing_axes else value


def full_varying_like(shape: tuple[int, ...], dtype: Any, value: float, *operands: Any) -> Any:
    """An array of equal elements, such as a loop's initial carry, that varies over every mesh axis of the operands.

    Args:
        shape, dtype: shape and dtype of the array.
        value: the value of every element.
        operands: arrays, such as those that the loop adds to the carry; the result varies over all their mesh axes.
    """
    return varying_like(jnp.full(shape, value, dtype), *operands)


def is_varying(array: Any) -> bool:
    """Whether an array's type varies over a manual mesh axis (`jax.shard_map`, unless check_vma=False)."""
    return bool(_varying_axes(array))


def _varying_axes(array: Any) -> frozenset[str]:
    """The manual mesh axes over which an array's type varies."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def finite_inverse(x: Any) -> Any:
    """1 / x in full float32 precision, inside a TPU kernel, without the code for 0, infinity and NaN.

    Args:
        x: a float32 value; neither it nor its inverse may be 0, infinite or NaN.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    in_tpu_module = hasattr(pltpu, "reciprocal")  # from JAX 0.12 on
    reciprocal: Any = pltpu.reciprocal if in_tpu_module else pl.reciprocal  # pyright: ignore[reportAttributeAccessIssue]
    return reciprocal(x, full_range=False)


def product_precision(operand: Any) -> Any:
    """Precision of a matrix product in a TPU kernel; Mosaic offers only one pass or full precision.

    A float32 product gets full precision if `jax.default_matmul_precision` requires three passes ("high"). A product of
    narrower operands takes one pass, which is exact.

    Args:
        operand: one of the two operands; both have the same dtype.
    """
    if operand.dtype != jnp.float32:
        return jax.lax.Precision.DEFAULT
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    return jax.lax.Precision.HIGHEST if precision in ("high", "bfloat16_3x", "tensorfloat32") else None


def cost_estimate(flop: int, ins: Sequence[Any], outs: Sequence[Any], transcendentals: int = 0) -> Any:
    """Estimate the cost of a kernel that reads each operand and writes each result once.

    Args:
        flop: number of FLOP; a multiply-add counts as 2.
        ins, outs: the operands and the results; arrays or `jax.ShapeDtypeStruct`.
        transcendentals: number of exponentials, logarithms and roots.
    """
    from jax.experimental import pallas as pl

    bytes_accessed = sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in (*ins, *outs))
    return pl.CostEstimate(flops=flop, transcendentals=transcendentals, bytes_accessed=bytes_accessed)


def supported_options(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those of the options for which `function` has a parameter in this JAX version."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}
