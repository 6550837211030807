"""All codecs, by name: those that the modules of this package define are discovered by import."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping

from jaxscale.replicas.codec import Codec


def _discover() -> dict[str, type[Codec]]:
    """The classes of codecs with a name of their own in the modules of this package."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    codecs = [cls for cls in classes if issubclass(cls, Codec) and "name" in vars(cls)]
    return {codec.name: codec for codec in sorted(codecs, key=lambda codec: codec.name)}


CODECS: Mapping[str, type[Codec]] = _discover()
"""Classes of codecs, by the name that begins their text form."""
