"""The named schedules. Each file of this folder defines one or more `Method`s, which are collected automatically."""

import importlib
import pkgutil

from jaxscale.errors import UserError
from jaxscale.pipeline.method import Method


def _methods() -> dict[str, Method]:
    """Import the files of this folder, and return a dict of the `Method`s that they define, by their names."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    methods = [attribute for module in modules for attribute in vars(module).values() if isinstance(attribute, Method)]
    return {method.name: method for method in sorted(methods, key=lambda method: method.name)}


METHODS: dict[str, Method] = _methods()
"""Every method by its name."""
_BUILT_IN_NAMES = frozenset(METHODS)


def register(method: Method) -> Method:
    """Register a custom schedule by its name, so that plans can use it: `--plan.pipeline NAME:4x8`.

    Call this function in the file that defines the experiment. A resumed run executes that file again. The method is
    then registered again, and replaces the earlier one.

    Args:
        method: the method. Its function `make` must return a valid `Schedule`.

    Returns:
        The method.

    Raises:
        UserError: one of jaxscale's own methods already has the name.

    Example:
        >>> register(METHODS["gpipe"]).name
        'gpipe'
    """
    if method.name in _BUILT_IN_NAMES and METHODS[method.name] is not method:
        raise UserError(f"schedule {method.name}: one of jaxscale's own schedules has this name; choose another")
    METHODS[method.name] = method
    return method
