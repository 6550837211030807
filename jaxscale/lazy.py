"""Names of a package that load at their first use, so that importing the package does not import JAX."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: name of the package.
        modules: for each name of the package, the name of the module that defines it.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attribute = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    return load
