"""Names of a package that load at their first use, so that importing the package does not import JAX."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxscale.errors import near_miss


def lazy_names(package: str, modules: Mapping[str, str], packages: Collection[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: name of the package.
        modules: for each name of the package, the name of the module that defines it.
        packages: names of the packages inside the package that are loaded as attributes.
    """

    def load(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in modules:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message + near_miss(name, [*modules, *packages]))
        attribute = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    return load
