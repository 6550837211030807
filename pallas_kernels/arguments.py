"""Checks of arguments that all kernels share; they run before anything is traced."""

from typing import Any

from jax.core import Tracer


def check_static(kernel: str, **options: Any) -> None:
    """Refuse traced options: the options of a kernel determine its program, so they must be Python values.

    Args:
        kernel: name of the kernel, for the error message.
        options: values of the options, by name.

    Raises:
        ValueError: an option is a traced value.

    Example:
        >>> check_static("top_k", k=3, block=None)
    """
    for name, option in options.items():
        if isinstance(option, Tracer):
            raise ValueError(
                f"{kernel}: got a traced value as {name}, expected a Python number: mark it static, as in "
                f"jax.jit(.., static_argnames={name!r})"
            )


def check_arrays(kernel: str, **arguments: Any) -> None:
    """Refuse arguments that are neither arrays nor None.

    Args:
        kernel: name of the kernel, for the error message.
        arguments: the arguments by name; allowed are arrays of JAX or NumPy, `jax.ShapeDtypeStruct`, and None.

    Raises:
        ValueError: an argument is neither an array nor None.

    Example:
        >>> check_arrays("grouped_matmul", sizes=[3, 5])
        Traceback (most recent call last):
        ValueError: grouped_matmul: got sizes of type list, expected an array: take jnp.asarray(sizes)
    """
    for name, argument in arguments.items():
        if argument is not None and not (hasattr(argument, "shape") and hasattr(argument, "dtype")):
            type_name = type(argument).__name__
            raise ValueError(f"{kernel}: got {name} of type {type_name}, expected an array: take jnp.asarray({name})")
