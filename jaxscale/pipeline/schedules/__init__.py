"""The named schedules: each file here defines one or more `Method`s, which are collected automatically."""

import importlib
import pkgutil
from collections.abc import Mapping

from jaxscale.pipeline.method import Method


def _methods() -> dict[str, Method]:
    """Import the files of this folder, and return every `Method` in them by its name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    methods = [attribute for module in modules for attribute in vars(module).values() if isinstance(attribute, Method)]
    return {method.name: method for method in sorted(methods, key=lambda method: method.name)}


METHODS: Mapping[str, Method] = _methods()
"""Every method by its name."""
