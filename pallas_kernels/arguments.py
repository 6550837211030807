"""Arguments that every kernel refuses alike, before anything is traced."""

from typing import Any

from jax.core import Tracer


def static(kernel: str, **options: Any) -> None:
    """Refuse options that are traced: they shape the program.

    Args:
        kernel: its name, for the message.
        options: by name.

    Raises:
        ValueError: an option is traced.

    Example:
        >>> static("top_k", k=3, block=None)
    """
    for name, option in options.items():
        if isinstance(option, Tracer):
            raise ValueError(
                f"{kernel}: got a traced value as {name}, expected a Python number: mark it static, as by "
                f"jax.jit(.., static_argnames={name!r})"
            )


def arrays(kernel: str, **given: Any) -> None:
    """Refuse what is no array; `None` passes.

    Args:
        kernel: its name, for the message.
        given: by name: arrays of JAX or NumPy, or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: a value is no array.

    Example:
        >>> arrays("grouped_matmul", sizes=[3, 5])
        Traceback (most recent call last):
        ValueError: grouped_matmul: got sizes of type list, expected an array: take jnp.asarray(sizes)
    """
    for name, array in given.items():
        if array is not None and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            kind = type(array).__name__
            raise ValueError(f"{kernel}: got {name} of type {kind}, expected an array: take jnp.asarray({name})")
