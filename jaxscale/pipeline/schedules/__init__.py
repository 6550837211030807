"""The named schedules: each file here defines one or more `Method`s, which are collected automatically."""

import importlib
import pkgutil

from jaxscale.errors import UserError
from jaxscale.pipeline.method import Method


def _methods() -> dict[str, Method]:
    """Import the files of this folder, and return every `Method` in them by its name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    methods = [attribute for module in modules for attribute in vars(module).values() if isinstance(attribute, Method)]
    return {method.name: method for method in sorted(methods, key=lambda method: method.name)}


METHODS: dict[str, Method] = _methods()
"""Every method by its name."""
_OURS = frozenset(METHODS)


def register(method: Method) -> Method:
    """Make a schedule of one's own known by its name, so that plans may name it by text: `--plan.pipeline NAME:4x8`.

    Call it in the file that defines the experiment. A resumed run executes that file again, and the method that it then
    defines replaces the earlier one.

    Args:
        method: the method, whose `make` returns a valid `Schedule` for its numbers of ranks and microbatches.

    Returns:
        The method.

    Raises:
        UserError: one of jaxscale's methods has the name.

    Example:
        >>> register(METHODS["gpipe"]).name
        'gpipe'
    """
    if method.name in _OURS and METHODS[method.name] is not method:
        raise UserError(f"schedule {method.name}: one of jaxscale's schedules has this name; choose another")
    METHODS[method.name] = method
    return method
