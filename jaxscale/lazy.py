"""Package attributes that are loaded at first use, so that importing the package does not import JAX."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxscale.errors import UserError, near_argument, near_miss


def lazy_names(package: str, module_by_name: Mapping[str, str], packages: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a package, which imports the module of a name when the name is first used.

    `dir` of the package lists these names even before they are used, so that shells complete them.

    Args:
        package: name of the package.
        module_by_name: name of the module that defines each name of the package.
        packages: names of the package's subpackages, which are also imported when they are first used.
    """

    def load(name: str) -> Any:
        """Import and return the object or subpackage of this name. An object is also stored in the package."""
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_by_name:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message + near_miss(name, [*module_by_name, *packages]))
        attribute = getattr(importlib.import_module(module_by_name[name]), name)
        if isinstance(attribute, type):
            suggest_arguments(attribute)
        setattr(sys.modules[package], name, attribute)
        return attribute

    def names() -> list[str]:
        """Return the names of the package, loaded or not."""
        return sorted({*vars(sys.modules[package]), *module_by_name, *packages})

    setattr(sys.modules[package], "__dir__", names)  # noqa: B010
    return load


_suggesting_classes: set[type] = set()
"""Classes that `suggest_arguments` has changed."""


def suggest_arguments(cls: type) -> None:
    """Make a class refuse an unknown keyword argument with an error that suggests the most similar argument."""
    init = cls.__dict__.get("__init__")
    is_of_flax = any(base.__module__.startswith("flax.") for base in cls.__mro__)  # its metaclass calls the method
    if init is None or is_of_flax or cls in _suggesting_classes:
        return
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    parameter_names = list(parameters)[1:]

    @functools.wraps(init)
    def suggesting_init(self: Any, *arguments: Any, **keywords: Any) -> None:
        """Initialize the value; for an unknown argument, raise an error that suggests the most similar one."""
        try:
            init(self, *arguments, **keywords)
        except TypeError:
            unknown_names = [name for name in keywords if name not in parameter_names]
            if not unknown_names:
                raise
            name = unknown_names[0]
            hint = near_argument(name, parameter_names) or f"; there are {', '.join(parameter_names)}"
            raise UserError(f"{cls.__name__} has no argument {name!r}{hint}") from None

    _suggesting_classes.add(cls)
    cls.__init__ = suggesting_init
