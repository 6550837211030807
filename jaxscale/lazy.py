"""Names of a package that load at their first use, so that importing the package does not import JAX."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxscale.errors import near_miss


def lazy_names(package: str, module_by_name: Mapping[str, str], packages: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a package, which imports the module of a name at its first use.

    `dir` of the package lists these names before their first use too, so that shells complete them.

    Args:
        package: name of the package.
        module_by_name: name of the module that defines each name of the package.
        packages: names of the package's subpackages, which are imported at their first use too.
    """

    def load(name: str) -> Any:
        """Import and return the object or subpackage of this name. An object is also stored in the package."""
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_by_name:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message + near_miss(name, [*module_by_name, *packages]))
        attribute = getattr(importlib.import_module(module_by_name[name]), name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    def names() -> list[str]:
        """Return the names of the package, loaded or not."""
        return sorted({*vars(sys.modules[package]), *module_by_name, *packages})

    setattr(sys.modules[package], "__dir__", names)  # noqa: B010
    return load
