"""The named codecs: those that the files here define are discovered by import."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping

from jaxscale.replicas.codec import Codec


def _discover() -> dict[str, type[Codec]]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    codecs = [cls for cls in classes if issubclass(cls, Codec) and "name" in vars(cls)]
    return {codec.name: codec for codec in sorted(codecs, key=lambda codec: codec.name)}


CODECS: Mapping[str, type[Codec]] = _discover()
"""Every codec by the word of its text form."""
