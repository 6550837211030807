"""All codecs, by name. They are discovered by importing the modules of this package."""

import importlib
import inspect
import pkgutil

from jaxscale.errors import UserError
from jaxscale.replicas.codec import Codec


def _discover() -> dict[str, type[Codec]]:
    """Find the codec classes that the modules of this package define and that set `name`; return them by this name."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    classes = [member for module in modules for member in vars(module).values() if inspect.isclass(member)]
    codec_classes = [cls for cls in classes if issubclass(cls, Codec) and "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(codec_classes, key=lambda cls: cls.name)}


CODECS: dict[str, type[Codec]] = _discover()
"""Classes of codecs, by the name that begins their text form."""


def register(codec: type[Codec]) -> type[Codec]:
    """Make a codec of one's own known by its name, so that plans may name it by text: `--plan.reduce NAME`.

    Call it, or use it as a decorator, in the file that defines the experiment. A resumed run executes that file again,
    and the class that it then defines replaces the earlier one.

    Args:
        codec: a frozen dataclass derived from `Codec`, `OnePhase` or `TwoPhase`, with the class variable `name`.

    Returns:
        The codec.

    Raises:
        UserError: the class has no name, or the name of one of jaxscale's codecs.

    Example:
        >>> from jaxscale.replicas import Int8
        >>> register(Int8) is CODECS["int8"]
        True
    """
    if not isinstance(vars(codec).get("name"), str):
        raise UserError(f"codec {codec.__name__}: expected a class variable name, such as name: ClassVar[str] = 'mine'")
    holder = CODECS.get(codec.name, codec)
    if holder is not codec and holder.__module__.startswith(f"{__name__}."):
        raise UserError(f"codec {codec.name}: jaxscale's {holder.__name__} has this name; choose another")
    CODECS[codec.name] = codec
    return codec
