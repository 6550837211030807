"""Set a context variable inside a `with` statement. Python 3.14 has this as `with variable.set(value)`."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Return a context inside which the variable has this value.

    Example:
        >>> depth = ContextVar("depth", default=0)
        >>> with scoped(depth, 1):
        ...     depth.get()
        1
        >>> depth.get()
        0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
