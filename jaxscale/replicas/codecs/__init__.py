"""All codecs, by name. They are discovered by importing the modules of this package."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping

from jaxscale.replicas.codec import Codec


def _discover() -> dict[str, type[Codec]]:
    """Find the codec classes that the modules of this package define and that set `name`; return them by this name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    classes = [member for module in modules for member in vars(module).values() if inspect.isclass(member)]
    codec_classes = [cls for cls in classes if issubclass(cls, Codec) and "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(codec_classes, key=lambda cls: cls.name)}


CODECS: Mapping[str, type[Codec]] = _discover()
"""Classes of codecs, by the name that begins their text form."""
