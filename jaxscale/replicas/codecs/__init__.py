"""All codecs, by name: this package imports its modules and collects the codecs that they define."""

import importlib
import inspect
import pkgutil

from jaxscale.errors import UserError
from jaxscale.replicas.codec import Codec


def _codec_class_by_name() -> dict[str, type[Codec]]:
    """Import the modules of this package, and return the codec classes in them that set `name`, by that name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    classes = [member for module in modules for member in vars(module).values() if inspect.isclass(member)]
    codec_classes = [cls for cls in classes if issubclass(cls, Codec) and "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(codec_classes, key=lambda cls: cls.name)}


CODECS: dict[str, type[Codec]] = _codec_class_by_name()
"""Classes of codecs, by the name at the start of their text form."""


def register(codec: type[Codec]) -> type[Codec]:
    """Register a custom codec by its name, so that plans can use it: `--plan.reduce NAME`.

    Call this function, or use it as a decorator, in the file that defines the experiment. A resumed run executes that
    file again, and the class from the second execution replaces the one from the first.

    Args:
        codec: a frozen dataclass derived from `Codec`, `OnePhase` or `TwoPhase`, with the class variable `name`.

    Returns:
        The codec.

    Raises:
        UserError: the class has no name, or one of jaxscale's own codecs already has the name.

    Example:
        >>> from jaxscale.replicas import Int8
        >>> register(Int8) is CODECS["int8"]
        True
    """
    if not isinstance(vars(codec).get("name"), str):
        raise UserError(f"codec {codec.__name__}: expected a class variable name, such as name: ClassVar[str] = 'mine'")
    registered_class = CODECS.get(codec.name, codec)
    if registered_class is not codec and registered_class.__module__.startswith(f"{__name__}."):
        raise UserError(f"codec {codec.name}: jaxscale's {registered_class.__name__} has this name; choose another")
    CODECS[codec.name] = codec
    return codec
