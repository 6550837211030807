"""Names of a package that load at their first use, so that importing the package does not import JAX."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_by_name: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a package, which imports the module of a name at its first use.

    Args:
        package: name of the package.
        module_by_name: name of the module that defines each name of the package.
    """

    def load(name: str) -> Any:
        """Return what a name of the package stands for, and store it in the package."""
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attribute = getattr(importlib.import_module(module_by_name[name]), name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    return load
