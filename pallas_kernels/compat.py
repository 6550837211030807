"""What differs between JAX versions for kernels of either platform, and the types of what kernels return."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

Interpret = bool | Literal["races"]
"""False: compiled; True: interpreted; "races": interpreted, and races are looked for."""


def interpreter(platform: str, interpret: Interpret) -> Any:
    """What a Pallas call takes as `interpret`.

    Under `jax.shard_map` the TPU's needs check_vma=False: on JAX 0.10 and 0.12 it mixes types that vary over mesh axes
    with its own, which do not.

    Args:
        platform: "tpu" or "gpu".
        interpret: whether, and with which care. A race raises from JAX 0.12 on (on the TPU's interpreter; on the GPU's
            from 0.11 on); before, it prints "RACE DETECTED".

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

    params: Any = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise NotImplementedError(f"JAX {jax.__version__} cannot interpret Mosaic GPU kernels: take 0.11 or newer")
    return params(detect_races=interpret == "races")


def like(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Type of a kernel's result: it varies over the manual mesh axes (`jax.shard_map`) that any operand varies over.

    Args:
        shape, dtype: of the result.
        operands: what the kernel reads.
    """
    kinds = [jax.typeof(one).manual_axis_type for one in jax.tree.leaves(operands)]
    widest = max(kinds, key=lambda kind: len(kind.varying), default=None)
    varying = frozenset[str]().union(*(kind.varying for kind in kinds))
    if widest is None or widest.varying == varying:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=widest)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=widest.update(varying=varying))


def varying_alike(*operands: Any) -> tuple[Any, ...]:
    """Operands of one kernel under `jax.shard_map`: each made to vary over every axis that any of them varies over.

    Args:
        operands: arrays, or None.
    """
    axes = frozenset[str]().union(*(_varying(operand) for operand in operands if operand is not None))
    if not axes:
        return operands
    return tuple(
        operand
        if operand is None or _varying(operand) == axes
        else jax.lax.pcast(operand, tuple(axes - _varying(operand)), to="varying")
        for operand in operands
    )


def varying_like(value: Any, *operands: Any) -> Any:
    """`value`, known to vary over every manual mesh axis that an operand varies over.

    Args:
        value: an array: a Mosaic GPU kernel's result, whose type carries no axes.
        operands: arrays that it was made of.
    """
    axes = frozenset[str]().union(*(_varying(one) for one in operands)) - _varying(value)
    return jax.lax.pcast(value, tuple(axes), to="varying") if axes else value


def filled(shape: tuple[int, ...], dtype: Any, value: float, *operands: Any) -> Any:
    """An array of one value that varies over every manual mesh axis that an operand varies over: a loop's first carry.

    Args:
        shape, dtype: of the array.
        value: of its elements.
        operands: arrays that the loop adds.
    """
    return varying_like(jnp.full(shape, value, dtype), *operands)


def varies(one: Any) -> bool:
    """Whether an array varies over manual mesh axes by its type (`jax.shard_map`, unless check_vma=False)."""
    return bool(_varying(one))


def _varying(one: Any) -> frozenset[str]:
    return frozenset(jax.typeof(one).manual_axis_type.varying)


def finite_inverse(x: Any) -> Any:
    """1 / x on TPU, in float32's precision, where neither is 0, infinite or NaN: without the code that looks for these.

    Args:
        x: float32, in a kernel.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    in_tpu_module = hasattr(pltpu, "reciprocal")  # from JAX 0.12 on
    reciprocal: Any = pltpu.reciprocal if in_tpu_module else pl.reciprocal  # pyright: ignore[reportAttributeAccessIssue]
    return reciprocal(x, full_range=False)


def product_precision(operand: Any) -> Any:
    """Precision of a kernel's products on TPU, where Mosaic multiplies in one pass or in full, and in no three passes.

    A float32 product for which `jax.default_matmul_precision` asks for three passes ("high") is made in full; one of
    narrower operands takes one pass, which is exact.

    Args:
        operand: either of the two.
    """
    if operand.dtype != jnp.float32:
        return jax.lax.Precision.DEFAULT
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    return jax.lax.Precision.HIGHEST if precision in ("high", "bfloat16_3x", "tensorfloat32") else None


def estimate(flop: int, ins: Sequence[Any], outs: Sequence[Any], transcendentals: int = 0) -> Any:
    """The cost of a kernel that reads and writes each array once.

    Args:
        flop: operations, a multiply and add being 2.
        ins, outs: arrays, or their types.
        transcendentals: exponentials, logarithms, roots.
    """
    from jax.experimental import pallas as pl

    bytes_accessed = sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in (*ins, *outs))
    return pl.CostEstimate(flops=flop, transcendentals=transcendentals, bytes_accessed=bytes_accessed)


def accepted(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those options that a function of this JAX version has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}
